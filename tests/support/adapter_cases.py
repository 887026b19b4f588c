"""What the workers run of a site that trains adapters."""

from __future__ import annotations

from typing import Any

import torch

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.config.site import InnerSection
from dilocox.inner import ChunkSettings, SiteMesh, SiteModel, chunks_of_stage
from dilocox.inner.fsdp import local
from dilocox.models import build_chunk, load_model_config, materialise, open_weights, plan_cut
from dilocox.models.adapter import is_adapter
from dilocox.models.adapter_weights import AdapterWeights
from tests.support import toy_model
from tests.support.process_starts import ARCHITECTURE
from tests.support.site_cases import CPU, follows, rows_of, site_section

LORA = AdapterSection(rank=4)


def train(
    stages: int,
    shards: int,
    schedule: str = "1f1b",
    precision: str = "float32",
    checkpointing: bool | str = False,
    whole_gradients: bool = False,
    replicas: int = 1,
    **lora: Any,
) -> dict[str, Any]:
    """Two steps of a tiny tied Qwen3 with adapters: losses, names, and whether the base moved."""
    section = ModelSection(architecture={**ARCHITECTURE, "vocab_size": 64})
    hf_config = load_model_config(section, 64)
    # Four micro-batches, of eight rows or of the half of them that a shard or a replica has.
    micro = 2 if shards == replicas == 1 else 1
    site = site_section(stages, shards, schedule, replicas=replicas, micro=micro)
    per_stage = site.chunks
    adapter = LORA.model_copy(update=lora)
    cut = plan_cut(hf_config, stages * per_stage, toy_model.LENGTH, adapter)
    mesh = SiteMesh.create(stages, shards, CPU, replicas)
    source = AdapterWeights(hf_config, adapter, 7, open_weights(section, hf_config, seed=3))
    dtype = getattr(torch, precision)
    chunks = [
        build_chunk(
            hf_config,
            cut[number],
            attention="sdpa",
            activation_checkpointing=checkpointing,  # type: ignore[arg-type]
            dtype=dtype,
            adapter=adapter,
        )
        for number in chunks_of_stage(schedule, stages, per_stage, mesh.stage)
    ]
    model = SiteModel(
        chunks,
        lambda chunk, device: materialise(chunk, source, device),  # type: ignore[arg-type]
        mesh,
        site,
        InnerSection(clip=0.5),
        ChunkSettings(
            hidden_size=32, precision=dtype, frozen_base=True, whole_gradients=whole_gradients
        ),
    )
    frozen = [p for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
    before = [local(parameter).clone() for parameter in frozen]
    torch.manual_seed(1)
    if follows(model):
        return {}
    values = []
    for step in range(2):
        ids, labels = (rows_of(mesh.shard, shards, part) for part in toy_model.batch(8, seed=step))
        result = model.inner_step(ids, labels, 0.01)
        values += [result.loss, result.grad_norm, model.evaluate(ids, labels)]
    model.let_go()
    names = sorted(model.local_tensors())
    assert all(map(is_adapter, names))
    state = {name.partition("/")[2] for name in model.optimizer_state() if "/" in name}
    return {
        "values": values,
        "names": names,
        "optimized": sorted(state),
        "dtypes": {str(parameter.dtype) for parameter in frozen},
        "live": {str(tensor.dtype) for tensor in model.local_tensors().values()},
        "kept": all(torch.equal(a, local(b)) for a, b in zip(before, frozen, strict=True)),
        "graded": any(parameter.grad is not None for parameter in frozen),
    }
