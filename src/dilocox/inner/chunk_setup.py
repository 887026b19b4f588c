"""Makes a rank's chunks ready to compute: compiled, sharded, filled, and with copies in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dilocox.inner.compilation import Compilation, Compile
from dilocox.inner.fsdp import finish_sharding, shard_chunk
from dilocox.inner.mesh import SiteMesh
from dilocox.inner.pipeline import Computation, cast_boundary

Fill = Callable[[nn.Module, torch.device], None]
"""Gives a chunk, which is sharded already, its values; called with chunk and device."""


@dataclass(frozen=True)
class ChunkSettings:
    """How the chunks of a rank compute, beside the run file's `[site]` and `[inner]`."""

    hidden_size: int
    """Last dimension of the chunks' outputs."""
    precision: torch.dtype = torch.float32
    """Compute dtype. Parameters, gradients and optimizer state are fp32."""
    tied: tuple[str, str] | None = None
    """Full names (owner, copy) of a tensor that the first and the last chunk share."""
    frozen_base: bool = False
    """Only adapters are trained: tensors without gradients are not part of the model's state."""
    compile_layers: Compile = False
    """`model.compile` of the run file."""
    whole_gradients: bool = False
    """Shards of one stage gather parameters and reduce gradients once per step, and hold both whole
    until then. Otherwise they do so once per micro-batch."""


def prepare_chunk(
    chunk: nn.Module,
    fill: Fill,
    mesh: SiteMesh,
    computation: Computation,
    *,
    is_last: bool,
    compilation: Compilation | None,
    whole_gradients: bool,
) -> None:
    """Make `chunk`, which is on the meta device, ready to train on this rank.

    Collective over the shards. `is_last`: the chunk is the model's last one. `compilation` compiles
    the chunk's layers; None compiles nothing. `whole_gradients`: see `ChunkSettings`.
    """
    layers = [layer for layer in chunk.layers if isinstance(layer, nn.Module)]  # type: ignore[union-attr]
    if compilation is not None:
        for layer in layers:
            compilation.compile(layer)
    if not is_last:
        cast_boundary(chunk, computation.boundary_dtype)
    if mesh.sharded:
        # Split backward passes need gathered parameters to stay: FSDP's hooks do not see the
        # weight half, and gradients of freed parameters are lost silently. In other pipelines
        # a micro-batch is too short to gather a stage twice for it.
        reshard = mesh.stages == 1 and not whole_gradients
        shard_chunk(chunk, mesh.fsdp_mesh, computation.boundary_dtype, reshard)
    fill(chunk, mesh.device)
    finish_sharding(chunk)
    computation.prepare(chunk)
    chunk.train()
