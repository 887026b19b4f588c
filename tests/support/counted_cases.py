"""What the workers run: batches of which some labels count, against float64 in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.config.preference import PreferenceSection
from dilocox.config.site import InnerSection
from dilocox.data.columns import targets
from dilocox.data.rows import NOT_COUNTED
from dilocox.inner import mean_cross_entropy
from dilocox.inner.columns import ColumnLoss
from dilocox.inner.counted import CountedLabels, OwnLoss
from dilocox.inner.preference import preference_loss
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
    "dpo": preference_loss(PreferenceSection(beta=0.7, label_smoothing=0.1), ("pair", "reference")),
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
) -> tuple[Tensor, list[float]]:
    """Sum of the losses of all pairs, one pair after the other, written from the paper; margins."""
    total = logits.new_zeros(())
    margins = []
    likelihoods = logits.log_softmax(-1)
    for row in range(len(labels)):
        for number in range(1, int(columns["pair"][row].max()) + 1):
            sums = []
            for side in (number, -number):
                at = (columns["pair"][row] == side) & (labels[row] >= 0)
                own = likelihoods[row, at].gather(1, labels[row, at].unsqueeze(1)).sum()
                sums.append(own - columns["reference"][row, at].double().sum())
            margin = beta * (sums[0] - sums[1])
            margins.append(float(margin))
            better = torch.sigmoid(margin)
            total = total - (1 - smoothing) * better.log() - smoothing * (1 - better).log()
    return total, margins


def expected(
    name: str, logits: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, dict[str, Tensor], Tensor, int, dict[str, float]]:
    """Labels, columns, loss of the whole batch, what the loss's sum is divided by, and figures."""
    if name == "dpo":
        labels, total, columns = pairs(labels, seed)
        count = int(total)
        loss, margins = dpo_reference(logits, labels, columns, 0.7, 0.1)
        right = sum(margin > 0 for margin in margins)
        figures = {"val_accuracy": right / count, "val_margin": sum(margins) / count}
        return labels, columns, loss / count, count, figures
    weights = torch.ones(labels.shape)
    if name == "own columns":
        weights = torch.randint(0, 5, labels.shape, generator=torch.Generator()) / 4
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    count = int((labels >= 0).sum())
    loss = (each * weights.double().flatten()).sum() / count
    columns = {"weight": weights, "a": weights + 1} if name == "own columns" else {}
    return labels, columns, loss, count, {}


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
        labels, beside, loss, count, figures = expected(name, whole(ids), labels, step)
        loss.backward()
        largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
        counted = CountedLabels(count, float(count)) if told else None
        columns = {key: value.numpy() for key, value in beside.items()}
        labels = torch.from_numpy(targets(labels.numpy(), columns))
        mine = tuple(site_cases.rows_of(shard, shards, part) for part in (ids, labels))
        looked, found = model.loss_and_gradients(*mine, [*model.local_tensors()], counted)
        evaluated = model.evaluate(*mine, counted)
        measured = model.measure(*mine, counted)
        assert measured.loss == evaluated
        assert measured.figures.keys() == figures.keys()
        losses += [(measured.figures[key], wanted) for key, wanted in figures.items()]
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


def half_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `own_sums`, with half the count: what counts is not the labels, but goes with them."""
    total, count = own_sums(logits, labels)
    return total, count / 2


SHARE = (3, 1)
"""Weights of two sites whose gradients are averaged."""
OVER_SITES: dict[str, tuple[OwnLoss, float]] = {
    "built in": (mean_cross_entropy, 1.0),
    "own mean": (own_mean, 1.0),
    "own sums": (own_sums, 1.0),
    "half sums": (half_sums, 2.0),
    "dpo": (LOSSES["dpo"], 1.0),
}
"""Losses by name, each with its factor over the mean cross-entropy."""


def over_sites(name: str, **setting: Any) -> dict[str, Any]:
    """Average the gradients of two sites of unequal counts, and compare with float64 over both.

    `worst`: largest difference of any gradient, relative to the largest. `losses`: what each site
    reports of its batch, and what it should.
    """
    shards, rows = setting.get("shards", 1), 8
    loss_function, factor = OVER_SITES[name]
    model = site_cases.build(
        inner=InnerSection(optimizer="sgd", clip=0), loss=loss_function, rows=rows, **setting
    )
    shard = model._mesh.shard
    whole = site_cases.reference_model(False).double()
    names = whole.full_names()
    sites = []
    for number, own in enumerate((rows, rows // 2)):
        ids, labels = (part[:own] for part in batch(rows, number))
        labels, beside, loss, count, _ = expected(
            "dpo" if name == "dpo" else "own", whole(ids), labels, number
        )
        columns = {key: value.numpy() for key, value in beside.items()}
        given = torch.from_numpy(targets(labels.numpy(), columns))
        sites.append((ids, given, factor * loss, count))
    counts = [site[3] for site in sites]
    everything = sum(counts)
    sum(loss * (count / everything) for _, _, loss, count in sites).backward()
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    mean: dict[str, Tensor] = {}
    losses = []
    for weight, (ids, given, loss, count) in zip(SHARE, sites, strict=True):
        counted = CountedLabels(count, everything * weight / sum(SHARE))
        mine = tuple(site_cases.rows_of(shard, shards, part) for part in (ids, given))
        looked, found = model.loss_and_gradients(*mine, [*model.local_tensors()], counted)
        result = model.inner_step(*mine, 0.0, None, counted)
        losses += [(looked, float(loss)), (result.loss, float(loss))]
        for each, gradient in found.items():
            part = gradient.double() * (weight / sum(SHARE))
            mean[each] = mean[each] + part if each in mean else part
    worst = 0.0
    for local, parameter in whole.named_parameters():
        if parameter.grad is not None and names[local] in mean:
            wanted = toy_model.rows_of_shard(parameter.grad, shards, shard)
            gap = (mean[names[local]] - wanted).abs()
            worst = max(worst, float(gap.max()) / largest if gap.numel() else 0.0)
    return {"worst": worst, "losses": losses, "counts": counts}
