"""Whole tensors of a stage whose ranks are shards: its anchor, and its outer momentum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from dilocox.config.handover import MOMENTUM as OUTER_MOMENTUM
from dilocox.record.writer.rank_recorder import MOMENTUM_OF
from dilocox.training.builder import RankParts, anchors


def anchor_of(rank: RankParts, momentum: bool) -> dict[str, torch.Tensor]:
    """Return the anchor like `whole_anchor`; with `momentum`, the outer momentum as well."""
    tensors = whole_anchor(rank)
    if momentum:
        momenta = {
            name: view.float()
            for state in rank.states
            for name, view in state.layout.views(state.momentum).items()
        }
        tensors |= {MOMENTUM_OF + name: t for name, t in _whole(rank, momenta).items()}
    return tensors


def take_momentum(rank: RankParts, folder: str) -> None:
    """Load this rank's outer momentum from the handover in `folder`.

    The digest of the file is not checked here: `preflight` has checked it once per machine.
    """
    with safe_open(Path(folder).expanduser() / OUTER_MOMENTUM, framework="pt") as file:
        for state in rank.states:
            rows = {}
            for name, shape in zip(state.layout.names, state.layout.shapes, strict=True):
                run = -(-rank.shapes[name][0] // rank.mesh.shards)
                start = rank.mesh.shard * run
                rows[name] = file.get_slice(name)[start : start + run].reshape(shape)
            state.take_momentum(rows)


def whole_anchor(rank: RankParts) -> dict[str, torch.Tensor]:
    """Return this stage's anchor in whole tensors: fp32 on the CPU, by full name.

    Collective over the stage's shards. Only shard 0 gets the tensors; others get an empty dict.
    """
    return _whole(rank, anchors(rank))


def _whole(rank: RankParts, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, view in views.items():
        if rank.mesh.shards == 1:
            result[name] = view.detach().cpu()
            continue
        shape = rank.shapes[name]
        sharded = DTensor.from_local(
            view.to(rank.mesh.device),
            rank.mesh.shard_mesh,
            [torch.distributed.tensor.Shard(0)],
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        tensor = sharded.full_tensor()
        if rank.place.shard == 0:
            result[name] = tensor.cpu()
    return result
