"""What the workers run of a site's parts: its layout, layers of real models, and their buffers."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dilocox.config.run_config import ModelSection
from dilocox.config.site import InnerSection, SiteSection
from dilocox.data.rows import NOT_COUNTED
from dilocox.inner import (
    ChunkSettings,
    SiteMesh,
    SiteModel,
    chunks_of_stage,
    head_loss,
    start_site_group,
)
from dilocox.inner.counted import CountedLabels
from tests.support import toy_model
from tests.support.process_starts import ARCHITECTURE
from tests.support.site_cases import CPU, build, rows_of, site_section


def gathered_when(tied: bool, **setting: Any) -> dict[str, list[str]]:
    """Which of embedding, first and last layer, norm and head are whole when a part of the
    chunk begins its forward pass, and when the first layer's gradient is there."""
    model = build(tied=tied, **setting)
    chunk = model._chunks[0]
    modules = {"embed": chunk.embed, "first": chunk.layers[0].mix, "last": chunk.layers[-1].mix,
               "norm": chunk.norm, "head": chunk.head}  # fmt: skip
    found: dict[str, list[str]] = {}

    def look(when: str) -> None:
        whole = [n for n, each in modules.items() if not isinstance(each.weight, DTensor)]
        found.setdefault(when, whole)

    for name, module in modules.items():
        module.register_forward_pre_hook(lambda *_, name=name: look(name))
    chunk.layers[0].mix.register_full_backward_hook(lambda *_: look("backward of first"))
    ids, labels = toy_model.batch(setting.get("rows", 8), seed=0)
    shards, shard = setting["shards"], model._mesh.shard
    model.inner_step(rows_of(shard, shards, ids), rows_of(shard, shards, labels), 0.1)
    look("between steps")
    return found


def messages(**setting: Any) -> dict[str, int]:
    """How often a step of four micro-batches gathers and reduces over the shards, and sums over the
    replicas."""
    shards = setting["shards"]
    model = build(rows=4 * shards * setting.get("replicas", 1), **setting)
    shard = model._mesh.shard
    ids, labels = (rows_of(shard, shards, part) for part in toy_model.batch(4 * shards, seed=0))
    counts = {"gathers": 0, "reductions": 0, "sums": 0}

    def counting(name: str, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return inner(*args, **kwargs)

        return call

    own = {"all_reduce": ("sums", dist.all_reduce)}
    for name in ("all_gather_into_tensor", "all_gather_single"):
        own[name] = ("gathers", getattr(dist, name, None))
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        own[name] = ("reductions", getattr(dist, name, None))
    try:
        for name, (kind, inner) in own.items():
            if inner is not None:
                setattr(dist, name, counting(kind, inner))
        model._backward(ids, labels)
    finally:
        for name, (_, inner) in own.items():
            if inner is not None:
                setattr(dist, name, inner)
    return counts


def compiled(backend: str) -> list[float]:
    """Losses of three steps without and with compiled layers."""
    plain, losses = torch.nn.Module.compile, []
    torch.nn.Module.compile = lambda module: plain(module, backend=backend)  # type: ignore
    try:
        for compile_layers in (False, True):
            model = build(compile_layers=compile_layers, rows=4, micro=2)
            for step in range(3):
                losses.append(model.inner_step(*toy_model.batch(4, seed=step), 0.01).loss)
    finally:
        torch.nn.Module.compile = plain  # type: ignore[method-assign]
    return losses


def real_model(
    stages: int,
    shards: int,
    schedule: str,
    head_chunk: int | None = None,
    precision: str = "float32",
    packed: bool = False,
) -> dict[str, Any]:
    """Losses and norms of a tiny tied Qwen3 from the models room, cut as the setting says.

    `packed`: rows hold two documents each, of lengths that differ, and a third of the labels does
    not count. `head_chunk`: logits that head and loss compute at a time, and how many times in a
    micro-batch they did; without it all at once.
    """
    if head_chunk is not None:
        before = head_loss.AT_ONCE, head_loss.CHUNK, head_loss.logits_are_less
        loss_of_chunk, calls = head_loss._loss_and_gradient, []

        def counted(*given: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(len(given[1]))
            return loss_of_chunk(*given)

        head_loss.AT_ONCE, head_loss.CHUNK = 0, {"cpu": head_chunk}
        head_loss.logits_are_less = lambda tokens, hidden: False
        head_loss._loss_and_gradient = counted
        try:
            found = real_model(stages, shards, schedule, precision=precision, packed=packed)
        finally:
            head_loss.AT_ONCE, head_loss.CHUNK, head_loss.logits_are_less = before
            head_loss._loss_and_gradient = loss_of_chunk
        assert set(calls) <= {head_chunk // 64}
        return {**found, "chunked": len(calls) > 0}
    from dilocox.models import (
        build_chunk,
        load_model_config,
        materialise,
        open_weights,
        plan_cut,
        tied_pair,
    )

    section = ModelSection(architecture={**ARCHITECTURE, "vocab_size": 64})
    hf_config = load_model_config(section, 64)
    # Four micro-batches, of eight rows or of the half of them that a shard has.
    site = site_section(stages, shards, schedule, micro=2 if shards == 1 else 1)
    per_stage = site.chunks
    cut = plan_cut(hf_config, stages * per_stage, toy_model.LENGTH)
    mesh = SiteMesh.create(stages, shards, CPU)
    source = open_weights(section, hf_config, seed=3)
    model = SiteModel(
        [
            build_chunk(hf_config, cut[number], attention="sdpa", activation_checkpointing=True)
            for number in chunks_of_stage(schedule, stages, per_stage, mesh.stage)
        ],
        lambda chunk, device: materialise(chunk, source, device),  # type: ignore[arg-type]
        mesh,
        site,
        InnerSection(clip=0.5),
        ChunkSettings(
            hidden_size=32, tied=tied_pair(hf_config), precision=getattr(torch, precision)
        ),
    )
    values = []
    for step in range(2):
        ids, labels = toy_model.batch(8, seed=step)
        counted = None
        if packed:
            ends = torch.arange(8).unsqueeze(1) % (toy_model.LENGTH - 1) + 1
            places = torch.arange(toy_model.LENGTH).expand(8, -1)
            positions = torch.where(places < ends, places, places - ends)
            labels = torch.where((ids % 3 == 0) | (places == ends - 1), NOT_COUNTED, labels)
            count = int((labels >= 0).sum())
            mine = rows_of(mesh.shard, shards, positions)
            counted = CountedLabels(count, float(count), mine)
        ids, labels = (rows_of(mesh.shard, shards, part) for part in (ids, labels))
        result = model.inner_step(ids, labels, 0.01, None, counted)
        values += [result.loss, result.grad_norm, model.evaluate(ids, labels, counted)]
    return {
        "values": values,
        "names": sorted(model.local_tensors()),
        "last": mesh.stage == model._last_stage,
    }


def model_types(shards: int, tied: bool, names: list[str]) -> dict[str, list[float]]:
    """Losses and norms of two steps of model types with three layers each, in one stage."""
    from dilocox.models import build_chunk, materialise, open_weights, plan_cut, tied_pair
    from tests.support.architectures import ARCHITECTURES, section, small_config

    found: dict[str, list[float]] = {}
    for name in names:
        keys: dict[str, Any] = {"num_hidden_layers": 3, "tie_word_embeddings": tied}
        if "layer_types" in ARCHITECTURES[name]:
            keys["layer_types"] = ARCHITECTURES[name]["layer_types"][:3]
        hf_config = small_config(name, **keys)
        mesh = SiteMesh.create(1, shards, CPU)
        source = open_weights(section(name, **keys), hf_config, seed=3)
        (spec,) = plan_cut(hf_config, 1, toy_model.LENGTH)
        model = SiteModel(
            [build_chunk(hf_config, spec, attention="sdpa", activation_checkpointing=False)],
            lambda chunk, device, source=source: materialise(chunk, source, device),
            mesh,
            SiteSection(shards=shards, batch_size=4, micro_batch_size=1),
            InnerSection(),
            ChunkSettings(hidden_size=32, tied=tied_pair(hf_config)),
        )
        values = found.setdefault(name, [])
        for step in range(2):
            ids, labels = (
                rows_of(mesh.shard, shards, part) for part in toy_model.batch(4, seed=step)
            )
            result = model.inner_step(ids, labels, 0.01)
            values += [result.loss, result.grad_norm]
    return found


def saved_buffers(stages: int, shards: int) -> dict[str, list[float]]:
    """What a rank of a model with router biases would publish of them after a step in bf16."""
    from dilocox.models import build_chunk, load_model_config, materialise, open_weights, plan_cut
    from tests.support.architectures import BUFFERS, ROUTED

    section = ModelSection(architecture=ROUTED)
    hf_config = load_model_config(section, 96)
    cut = plan_cut(hf_config, stages, toy_model.LENGTH)
    mesh = SiteMesh.create(stages, shards, CPU)
    source = open_weights(section, hf_config, seed=3)

    class Biased:
        def tensor(self, full_name: str) -> Tensor:
            tensor = source.tensor(full_name)
            return tensor + 0.3 + BUFFERS.index(full_name) if full_name in BUFFERS else tensor

    model = SiteModel(
        [build_chunk(hf_config, cut[mesh.stage], attention="sdpa", activation_checkpointing=False)],
        lambda chunk, device: materialise(chunk, Biased(), device),  # type: ignore[arg-type]
        mesh,
        SiteSection(stages=stages, shards=shards, batch_size=8, micro_batch_size=1),
        InnerSection(),
        ChunkSettings(hidden_size=32, precision=torch.bfloat16),
    )
    ids, labels = (rows_of(mesh.shard, shards, part) for part in toy_model.batch(8, seed=0))
    model.inner_step(ids, labels, 0.01)
    found = model.saved_buffers()
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    return {name: tensor.tolist() for name, tensor in found.items()}


def joined(rank: int, stages: int, shards: int, place: str, launcher: bool) -> tuple[int, ...]:
    """Where a rank stands after joining by a store, or by a launcher's variables."""
    if launcher:
        given = {
            "RANK": str(rank),
            "WORLD_SIZE": str(stages * shards),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": place,
        }
        os.environ.update(given)
        mesh = start_site_group(stages, shards, CPU, timedelta(seconds=30))
        for key in given:
            del os.environ[key]
    else:
        mesh = start_site_group(
            stages,
            shards,
            CPU,
            timedelta(seconds=30),
            rank=rank,
            store=dist.FileStore(place, stages * shards),
        )
    names = mesh.gather_names([f"é{mesh.rank}"] * mesh.rank)
    assert names == [[f"é{i}"] * i for i in range(mesh.ranks)]
    return (
        mesh.stage,
        mesh.shard,
        dist.get_rank(mesh.pipeline_group),
        mesh.shard_mesh.get_local_rank(),
    )


def patience_of_replicas(rank: int, place: str) -> tuple[float, ...]:
    """Seconds after which collectives of a replica, and orders, give up."""
    mesh = start_site_group(
        2,
        1,
        CPU,
        timedelta(seconds=77),
        replicas=2,
        rank=rank,
        store=dist.FileStore(place, 4),
    )
    found = []
    for group in (mesh.own_replica, mesh.same_ranks, mesh.orders):
        assert group is not None
        found.append(group._get_backend(CPU).options._timeout.total_seconds())
    return tuple(found)
