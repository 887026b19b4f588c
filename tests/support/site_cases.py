"""What the workers run: one site of the toy model, trained beside the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.config.site import InnerSection, SiteSection
from dilocox.errors import TrainingError
from dilocox.inner import ChunkSettings, SiteMesh, SiteModel, chunks_of_stage, mean_cross_entropy
from dilocox.inner.counted import OwnLoss as LossFunction
from dilocox.inner.muon import gather_matrices, scatter_matrices
from dilocox.inner.optimizer import InnerOptimizer
from tests.support import toy_model

CPU = torch.device("cpu")
Reference = dict[str, Tensor]


def site_section(
    stages: int, shards: int, schedule: str, *, replicas: int = 1, rows: int = 8, micro: int = 1
) -> SiteSection:
    """The shape of a site; a looped schedule has two chunks a stage. `rows`: of a batch."""
    looped = schedule in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")
    return SiteSection(
        stages=stages,
        shards=shards,
        replicas=replicas,
        chunks=2 if looped else 1,
        schedule=schedule,  # type: ignore[arg-type]
        batch_size=rows,
        micro_batch_size=micro,
    )


def build(
    *,
    stages: int = 1,
    shards: int = 1,
    replicas: int = 1,
    schedule: str = "1f1b",
    rows: int = 8,
    micro: int = 1,
    checkpointing: bool = False,
    tied: bool = False,
    unused: int | None = None,
    precision: torch.dtype = torch.float32,
    inner: InnerSection | None = None,
    compile_layers: bool = False,
    head_in_parts: int = 0,
    whole_gradients: bool = False,
    loss: LossFunction = mean_cross_entropy,
) -> SiteModel:
    """A rank's toy site model. `unused`: the chunk that has a parameter it does not use.
    `head_in_parts`: the head's weight is used so often, and the head is not called."""
    site = site_section(stages, shards, schedule, replicas=replicas, rows=rows, micro=micro)
    per_stage = site.chunks
    mesh = SiteMesh.create(stages, shards, CPU, replicas)
    total = stages * per_stage
    chunks = [
        toy_model.ToyChunk(
            number, total, checkpointing=checkpointing, unused=number == unused, tied=tied
        )
        for number in chunks_of_stage(schedule, stages, per_stage, mesh.stage)
    ]
    for chunk in chunks:
        chunk.parts = head_in_parts
    return SiteModel(
        chunks,
        toy_model.fill,
        mesh,
        site,
        inner or InnerSection(),
        ChunkSettings(
            hidden_size=toy_model.WIDTH,
            precision=precision,
            tied=(toy_model.OWNER, toy_model.COPY) if tied else None,
            compile_layers=compile_layers,
            whole_gradients=whole_gradients,
        ),
        loss=loss,
    )


def reference_model(tied: bool) -> toy_model.ToyChunk:
    model = toy_model.ToyChunk(0, 1, tied=tied)
    toy_model.fill(model, CPU)
    return model


def rows_of(mesh_shard: int, shards: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(shards)[mesh_shard]


def gradients(**setting: Any) -> dict[str, Any]:
    """Largest difference of any gradient to the single process, over two steps, and the norms."""
    shards, rows = setting.get("shards", 1), setting.get("rows", 8)
    clip = 0.5
    model = build(inner=InnerSection(optimizer="sgd", clip=clip), **setting)
    if follows(model):
        return {"worst": 0.0, "kept": kept_buffers(model)}
    shard = model._mesh.shard
    whole = reference_model(setting.get("tied", False))
    names = whole.full_names()
    seen: Reference = {}
    worst, norms, losses = 0.0, [], []
    for step in range(2):
        ids, labels = toy_model.batch(rows, seed=step)
        whole.zero_grad()
        loss = mean_cross_entropy(whole(ids), labels)
        loss.backward()
        wanted = {
            names[name]: toy_model.rows_of_shard(parameter.grad.clone(), shards, shard)
            for name, parameter in whole.named_parameters()
            if parameter.grad is not None
        }
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), clip)
        seen.clear()
        mine = (rows_of(shard, shards, ids), rows_of(shard, shards, labels))
        # The step after it must not see that somebody has looked.
        looked, without_step = model.loss_and_gradients(*mine, [*model.local_tensors()])
        result = model.inner_step(
            *mine, 0.1, lambda grads: seen.update({k: v.clone() for k, v in grads.items()})
        )
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.1 * parameter.grad
        assert seen.keys() == without_step.keys() == model.local_tensors().keys()
        for name, gradient in seen.items():
            assert gradient.shape == wanted[name].shape, name
            assert gradient.dtype == torch.float32
            if gradient.numel():
                worst = max(worst, float((gradient - wanted[name]).abs().max()))
                worst = max(worst, float((without_step[name] - wanted[name]).abs().max()))
        norms.append((result.grad_norm, float(norm)))
        losses += [(result.loss, float(loss)), (looked, float(loss))]
    model.let_go()
    return {"worst": worst, "norms": norms, "losses": losses, "kept": kept_buffers(model)}


def follows(model: SiteModel) -> bool:
    """Whether this rank is of a further replica; then it has done all that the first one did."""
    if model._mesh.replica > 0:
        model.follow(lambda: None)
        return True
    model.lead()
    return False


def kept_buffers(model: SiteModel) -> int:
    """Buffers for what comes in from other stages that are still there between steps."""
    kept = 0
    for schedule in model._pipeline._built.values():
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            assert infos
            buffers = [getattr(info, "buffer", None) for row in infos for info in row]
            kept += sum(buffer is not None and not buffer.is_meta for buffer in buffers)
    return kept


def trained(steps: int = 3, exchange: bool = False, **setting: Any) -> dict[str, Any]:
    """Local tensors (numpy), tied copy and losses after inner steps; also an evaluation."""
    shards, rows = setting.get("shards", 1), setting.get("rows", 8)
    model = build(**{"inner": InnerSection(clip=0.5), **setting})
    if follows(model):
        return what_remains(model)
    shard = model._mesh.shard

    def double(grads: dict[str, Tensor]) -> None:
        for gradient in grads.values():
            gradient.mul_(2.0)

    losses, norms = [], []
    for step in range(steps):
        ids, labels = (rows_of(shard, shards, part) for part in toy_model.batch(rows, seed=step))
        result = model.inner_step(ids, labels, 0.02, double if exchange else None)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    ids, labels = (rows_of(shard, shards, part) for part in toy_model.batch(2 * rows, seed=99))
    first = model.evaluate(ids, labels)
    copy = model._storage(model._copy)
    # What the outer loop does at a landing: write in place. The next pass must see it.
    held = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    for tensor in model.local_tensors().values():
        tensor.mul_(0.5)
    model.sync_tied()
    halved = model.evaluate(ids, labels)
    owner_after = model._storage(model._owner)
    copy_after = model._storage(model._copy)
    model.let_go()
    return {
        **what_remains(model),
        "stage": model._mesh.stage,
        "shard": shard,
        "tensors": {name: tensor.numpy() for name, tensor in held.items()},
        "copy": None if copy is None else (copy * 2.0).numpy(),
        "losses": losses,
        "norms": norms,
        "evaluated": first,
        "halved": halved,
        "owner_after": None if owner_after is None else owner_after.clone().numpy(),
        "copy_after": None if copy_after is None else copy_after.clone().numpy(),
    }


def what_remains(model: SiteModel) -> dict[str, Any]:
    """Bits that all replicas of a rank have in the end."""
    tensors = {**model.local_tensors(), **model.optimizer_state()}
    copy = model._storage(model._copy)
    if copy is not None:
        tensors["copy"] = copy
    return {"remains": {name: tensor.clone().numpy() for name, tensor in tensors.items()}}


def resumed(**setting: Any) -> dict[str, Any]:
    """Bits after a break (tensors and state carried to a new model) against no break."""
    shards, rows = setting.get("shards", 1), setting.get("rows", 8)
    through = build(**setting)
    shard = through._mesh.shard

    def steps(model: SiteModel, first: int, last: int) -> None:
        for step in range(first, last):
            ids, labels = (
                rows_of(shard, shards, part) for part in toy_model.batch(rows, seed=step)
            )
            model.inner_step(ids, labels, 0.02)

    steps(through, 0, 2)
    tensors = {name: tensor.clone() for name, tensor in through.local_tensors().items()}
    state = {name: tensor.clone() for name, tensor in through.optimizer_state().items()}
    steps(through, 2, 4)
    later = build(**setting)
    for name, tensor in later.local_tensors().items():
        tensor.copy_(tensors[name])
    later.sync_tied()
    later.load_optimizer_state(state)
    steps(later, 2, 4)
    return {
        "tensors": all(
            torch.equal(tensor, later.local_tensors()[name])
            for name, tensor in through.local_tensors().items()
        ),
        "state": all(
            torch.equal(tensor, later.optimizer_state()[name])
            for name, tensor in through.optimizer_state().items()
        ),
        "step": float(through.optimizer_state()["step"]),
        "moved": any(float(t.abs().max()) > 0 for t in state.values() if t.numel()),
        "keys": sorted(state),
    }


def muon_over_shards() -> dict[str, Any]:
    """A rank's rows (numpy) of matrices of odd sizes after Muon's steps, a skipped one between."""
    shapes = {"up": (7, 4), "down": (5, 9), "gate": (1, 4), "other": (7, 4)}
    full = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    group = dist.group.WORLD if dist.is_initialized() else None
    shards, shard = (1, 0) if group is None else (group.size(), group.rank())
    held = {
        name: torch.nn.Parameter(
            toy_model.rows_of_shard(toy_model.value(name, shape), shards, shard).clone()
        )
        for name, shape in full.items()
    }
    optimizer = InnerOptimizer(held, InnerSection(optimizer="muon"), shapes=full, group=group)
    for step in range(4):
        for name, shape in full.items():
            gradient = toy_model.value(f"{name} {step}", shape)
            held[name].grad = toy_model.rows_of_shard(gradient, shards, shard).clone()
        optimizer.step(0.02, torch.tensor(2.0), torch.tensor(float(step == 1)))
    return {name: parameter.detach().numpy() for name, parameter in held.items()}


def swapped(count: int, rows: int) -> dict[str, Any]:
    """The whole matrices that a rank gets of all ranks' rows, and whether its rows come back."""
    group = dist.group.WORLD
    assert group is not None
    matrices = toy_model.value("matrices", (count, rows, 3)).to(torch.bfloat16)
    own = torch.stack([toy_model.rows_of_shard(m, group.size(), group.rank()) for m in matrices])
    whole = gather_matrices(own, rows, group)
    back = scatter_matrices(whole, count, own.shape[1], group)
    return {
        "whole": whole.float().numpy(),
        "wanted": matrices.float().numpy(),
        "back": torch.equal(back, own),
    }


def unused_parameter(**setting: Any) -> str:
    """The error of a step in which a parameter got no gradient."""
    model = build(**setting)
    ids, labels = toy_model.batch(setting["rows"] // setting["shards"], seed=0)
    try:
        model.inner_step(ids, labels, 0.1)
    except TrainingError as error:
        return str(error)
    return "no error"


def spoiled(name: str, place: float, **setting: Any) -> dict[str, Any]:
    """A step with one bad value in the tensor called `name`, then one in which it is mended."""
    model = build(**setting)
    ids, labels = toy_model.batch(setting["rows"] // setting["shards"], seed=0)
    before = {key: tensor.clone() for key, tensor in model.local_tensors().items()}

    def poison(gradients: dict[str, Tensor]) -> None:
        if name in gradients and gradients[name].numel():
            gradients[name].view(-1)[0] = place

    bad = model.inner_step(ids, labels, 0.1, poison)
    kept = all(torch.equal(t, before[key]) for key, t in model.local_tensors().items())
    step = float(model.optimizer_state()["step"])
    good = model.inner_step(ids, labels, 0.1)
    moved = all(
        not torch.equal(t, before[k]) for k, t in model.local_tensors().items() if t.numel()
    )
    return {
        "finite": (bad.finite, good.finite),
        "culprit": (bad.culprit, good.culprit),
        "kept": kept,
        "step": step,
        "moved": moved,
    }


def poisoned_weight(**setting: Any) -> dict[str, Any]:
    """A step from a parameter that is already infinite: loss and gradients are not finite."""
    model = build(**setting)
    tensor = model.local_tensors().get("model.layers.4.up.weight")
    if tensor is not None:
        tensor.fill_(float("inf"))
    ids, labels = toy_model.batch(setting["rows"] // setting["shards"], seed=0)
    result = model.inner_step(ids, labels, 0.1)
    return {"finite": result.finite, "culprit": result.culprit}


def half_precision(micros: int = 4, **setting: Any) -> dict[str, Any]:
    """bf16 gradients (numpy) of the rank, and how far they are from fp32 ones, relatively."""
    shards, rows = setting.get("shards", 1), micros * setting.get("shards", 1)
    seen: list[Reference] = []
    losses = []
    for precision in (torch.float32, torch.bfloat16):
        model = build(precision=precision, rows=rows, **setting)
        shard = model._mesh.shard
        ids, labels = (rows_of(shard, shards, part) for part in toy_model.batch(rows, seed=5))
        for _ in range(2):
            found: Reference = {}
            result = model.inner_step(
                ids,
                labels,
                0.0,
                lambda g, found=found: found.update({k: v.clone() for k, v in g.items()}),
            )
        seen.append(found)
        losses.append(result.loss)
    exact, rough = seen
    scale = max(float(g.abs().max()) for g in exact.values() if g.numel())
    errors = [float((rough[k] - exact[k]).abs().max()) for k in exact if exact[k].numel()]
    return {
        "error": max(errors) / scale,
        "losses": losses,
        "gradients": {name: gradient.numpy() for name, gradient in rough.items()},
        "fp32": all(t.dtype == torch.float32 for t in model.local_tensors().values()),
    }
