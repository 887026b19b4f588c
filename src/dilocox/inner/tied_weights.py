"""A tensor at both ends of a pipeline: the embedding on the first stage, its copy on the last."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.errors import ModelError
from dilocox.inner.mesh import SiteMesh


class TiedPair:
    """Keeps a tied tensor, the owner, and its copy equal to the bit, shard by shard.

    Calls are collective between the two ranks that hold owner and copy of one shard of one replica;
    on other ranks they do nothing. `owner` and `copy` are this rank's local tensors. Each is None
    on a rank that does not hold it. With V-shaped schedules one rank holds both, and nothing is
    sent.
    """

    def __init__(self, mesh: SiteMesh, owner_stage: int, copy_stage: int) -> None:
        self._group: dist.ProcessGroup | None = None
        self._source = mesh.rank_at(owner_stage, mesh.shard, mesh.replica)
        self._near = owner_stage == copy_stage
        if self._near:
            return
        # Making a group is collective over the whole site, including ranks outside the group.
        for replica in range(mesh.replicas):
            for shard in range(mesh.shards):
                pair = [mesh.rank_at(stage, shard, replica) for stage in (owner_stage, copy_stage)]
                group = dist.new_group(pair)
                if mesh.rank in pair:
                    self._group = group

    def sum_gradients(self, owner: Tensor | None, copy: Tensor | None) -> None:
        """Set both gradients to owner + copy. A sum of two has the same bits in either order."""
        if self._near:
            if owner is not None and copy is not None:
                owner.add_(copy)
                copy.copy_(owner)
        else:
            self._each(owner, copy, lambda tensor: dist.all_reduce(tensor, group=self._group))

    def send(self, owner: Tensor | None, copy: Tensor | None) -> None:
        """Set the copy to the owner's values."""
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


def find_tied(
    tied: tuple[str, str] | None,
    names: Container[str],
    mesh: SiteMesh,
    is_first: bool,
    is_last: bool,
) -> tuple[str | None, str | None]:
    """Return the full names of owner and copy; None for each that this rank does not hold.

    Both are None if one chunk is the whole model, since owner and copy are one parameter there.

    Args:
        tied: full names (owner, copy) of a tensor that the first and the last chunk share.
        names: full names of this rank's trained parameters.
        mesh: this rank's place in the site.
        is_first: this rank holds the model's first chunk.
        is_last: this rank holds the model's last chunk.

    Raises `ModelError` if owner or copy is not in the expected chunk.
    """
    if tied is None:
        return None, None
    owner, copy = tied
    if mesh.stages == 1:
        if owner not in names or copy in names:
            raise ModelError(
                f"{owner} and {copy} are tied, but the one chunk of this site does not hold "
                "them as one parameter; tie them before and after it is filled"
            )
        return None, None
    holds = (owner in names, copy in names)
    if holds != (is_first, is_last):
        raise ModelError(
            f"stage {mesh.stage}: {owner} belongs to the first and {copy} to the last "
            "chunk, but this cut has them elsewhere; untie them or use one stage"
        )
    return owner if holds[0] else None, copy if holds[1] else None
