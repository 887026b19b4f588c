"""One tensor at both ends of a pipeline: embedding on the first stage, its copy on the last."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.inner.mesh import SiteMesh


class TiedPair:
    """Keeps the owner's and the copy's local tensor (the same shard of each) equal to the bit.

    Collective between the owner's and the copy's rank of one shard of one replica only; every other
    rank passes through. `owner` and `copy` are this rank's tensors, none where it does not hold
    them. Both may lie on one rank (V-shaped schedules): then nothing is sent.
    """

    def __init__(self, mesh: SiteMesh, owner_stage: int, copy_stage: int) -> None:
        self._group: dist.ProcessGroup | None = None
        self._source = mesh.rank_at(owner_stage, mesh.shard, mesh.replica)
        self._near = owner_stage == copy_stage
        if self._near:
            return
        # Making a group is collective over the whole site, also for those who are not in it.
        for replica in range(mesh.replicas):
            for shard in range(mesh.shards):
                pair = [mesh.rank_at(stage, shard, replica) for stage in (owner_stage, copy_stage)]
                group = dist.new_group(pair)
                if mesh.rank in pair:
                    self._group = group

    def sum_gradients(self, owner: Tensor | None, copy: Tensor | None) -> None:
        """Set both gradients to owner + copy. A sum of two is the same on both ends, to the bit."""
        if self._near:
            if owner is not None and copy is not None:
                owner.add_(copy)
                copy.copy_(owner)
        else:
            self._each(owner, copy, lambda tensor: dist.all_reduce(tensor, group=self._group))

    def send(self, owner: Tensor | None, copy: Tensor | None) -> None:
        """Set the copy from the owner."""
        if self._near:
            if owner is not None and copy is not None:
                copy.copy_(owner)
        else:
            self._each(
                owner, copy, lambda tensor: dist.broadcast(tensor, self._source, group=self._group)
            )

    def _each(
        self, owner: Tensor | None, copy: Tensor | None, collective: Callable[[Tensor], object]
    ) -> None:
        tensor = owner if owner is not None else copy
        if tensor is None or tensor.numel() == 0:
            return
        with torch.no_grad():
            collective(tensor)
