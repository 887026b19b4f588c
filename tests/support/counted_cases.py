"""What the workers run: batches of which some labels count, against float64 in one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.config.site import InnerSection
from dilocox.data.columns import targets
from dilocox.data.rows import NOT_COUNTED
from dilocox.inner import mean_cross_entropy
from dilocox.inner.columns import ColumnLoss
from dilocox.inner.counted import CountedLabels, OwnLoss
from dilocox.inner.preference import dpo_loss
from tests.support import site_cases, toy_model

NOTHING, FEW = (1, 2), (4, 5)
"""Rows without any label that counts, and rows with one."""


def own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED)


def own_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows, targets = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(rows, targets, reduction="sum"), (targets >= 0).sum()


def own_columns(
    logits: Tensor, labels: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    assert columns["a"].equal(columns["weight"] + 1)
    rows, known = logits.flatten(0, 1), labels.flatten()
    each = F.cross_entropy(rows, known, reduction="none", ignore_index=NOT_COUNTED)
    return (each * columns["weight"].flatten()).sum(), (known >= 0).sum()


LOSSES: dict[str, OwnLoss] = {
    "built in": mean_cross_entropy,
    "own mean": own_mean,
    "own sums": own_sums,
    "own columns": ColumnLoss(own_columns, ("a", "weight")),
    "dpo": ColumnLoss(
        functools.partial(dpo_loss, beta=0.7, label_smoothing=0.1),
        ("pair", "reference"),
        counts_known=True,
    ),
}


def batch(rows: int, seed: int, empty: tuple[int, ...] = NOTHING) -> tuple[Tensor, Tensor]:
    """Inputs and labels: some rows have no label that counts, some have one, others about half."""
    ids, labels = toy_model.batch(rows, seed)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(labels.shape, generator=generator) < 0.5
    counts[:, 0] = True
    counts[list(FEW), 1:] = False
    counts[list(empty)] = False
    return ids, torch.where(counts, labels, NOT_COUNTED)


def pairs(labels: Tensor, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Labels that all count, the number of pairs, and the columns of one or two pairs per row."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = labels.shape
    pair = torch.zeros(rows, length)
    total = 0
    for row in range(rows):
        number = 1 + row % 2
        bounds = torch.randperm(length - 1, generator=generator)[: 2 * number].sort().values + 1
        starts = [0, *bounds[:-1].tolist()]
        for part, (first, last) in enumerate(zip(starts, bounds.tolist(), strict=True)):
            pair[row, first:last] = (1 + part // 2) * (-1 if part % 2 else 1)
        total += number
    reference = -3 * torch.rand(rows, length, generator=generator)
    known = torch.where(pair != 0, labels.clamp(min=0), NOT_COUNTED)
    return known, torch.tensor(total), {"pair": pair, "reference": reference}


def dpo_reference(
    logits: Tensor, labels: Tensor, columns: dict[str, Tensor], beta: float, smoothing: float
) -> Tensor:
    """Sum of the losses of all pairs, one pair after the other, written from the paper."""
    total = logits.new_zeros(())
    likelihoods = logits.log_softmax(-1)
    for row in range(len(labels)):
        for number in range(1, int(columns["pair"][row].max()) + 1):
            sums = []
            for side in (number, -number):
                at = (columns["pair"][row] == side) & (labels[row] >= 0)
                own = likelihoods[row, at].gather(1, labels[row, at].unsqueeze(1)).sum()
                sums.append(own - columns["reference"][row, at].double().sum())
            margin = beta * (sums[0] - sums[1])
            better = torch.sigmoid(margin)
            total = total - (1 - smoothing) * better.log() - smoothing * (1 - better).log()
    return total


def expected(
    name: str, logits: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, dict[str, Tensor], Tensor, int]:
    """Labels, columns, loss of the whole batch, and what the loss's sum is divided by."""
    if name == "dpo":
        labels, total, columns = pairs(labels, seed)
        count = int(total)
        return labels, columns, dpo_reference(logits, labels, columns, 0.7, 0.1) / count, count
    weights = torch.ones(labels.shape)
    if name == "own columns":
        weights = torch.randint(0, 5, labels.shape, generator=torch.Generator()) / 4
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    count = int((labels >= 0).sum())
    loss = (each * weights.double().flatten()).sum() / count
    columns = {"weight": weights, "a": weights + 1} if name == "own columns" else {}
    return labels, columns, loss, count


def gradients(name: str, told: bool = True, **setting: Any) -> dict[str, Any]:
    """Largest difference of any gradient from float64, relative to the largest, and the losses.

    `name`: of the loss. `told`: tell the model how many labels count.
    """
    shards, rows = setting.get("shards", 1), setting.get("rows", 8)
    model = site_cases.build(
        inner=InnerSection(optimizer="sgd", clip=0), loss=LOSSES[name], **setting
    )
    if site_cases.follows(model):
        return {}
    shard = model._mesh.shard
    whole = site_cases.reference_model(setting.get("tied", False)).double()
    names = whole.full_names()
    worst, losses = 0.0, []
    # In the second step whole shards have no label that counts.
    for step, empty in enumerate((NOTHING, tuple(range(rows // 2)))):
        ids, labels = batch(rows, step, empty)
        whole.zero_grad()
        labels, beside, loss, count = expected(name, whole(ids), labels, step)
        loss.backward()
        largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
        counted = CountedLabels(count, float(count)) if told else None
        columns = {key: value.numpy() for key, value in beside.items()}
        labels = torch.from_numpy(targets(labels.numpy(), columns))
        mine = tuple(site_cases.rows_of(shard, shards, part) for part in (ids, labels))
        looked, found = model.loss_and_gradients(*mine, [*model.local_tensors()], counted)
        evaluated = model.evaluate(*mine, counted)
        result = model.inner_step(*mine, 0.1, None, counted)
        losses += [(each, float(loss)) for each in (looked, evaluated, result.loss)]
        with torch.no_grad():
            for local, parameter in whole.named_parameters():
                if parameter.grad is None:
                    continue
                if names[local] in found:
                    wanted = toy_model.rows_of_shard(parameter.grad, shards, shard)
                    gap = (found[names[local]].double() - wanted).abs()
                    worst = max(worst, float(gap.max()) / largest if gap.numel() else 0.0)
                parameter -= 0.1 * parameter.grad
    model.let_go()
    return {"worst": worst, "losses": losses}
