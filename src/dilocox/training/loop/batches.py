"""The run's batches for a user's loop, read only if the loop asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from dilocox.coordinator.protocol.round_plan import MemberPlan
from dilocox.training.batches import Batch, Batches, Ranges

_NONE = torch.empty(0, 0, dtype=torch.int64)


class LoopBatches(Batches):
    """Batches that `read_now` reads, in the user's thread."""

    own_loader = False
    """Whether the loop reads data of its own."""
    last = False
    """Whether the latest step is its round's last one."""
    due: tuple[Ranges, int, int] | None = None
    """Of the latest step: (the site's ranges in the round, sequences per step, step of the
    round)."""
    _due: Callable[[], Batch] | None = None

    def step(
        self, ranges: Ranges, batch: int, number: int, members: Sequence[MemberPlan] = ()
    ) -> Batch:
        """Note the batch of one inner step. The result is empty; see `Batches` for arguments."""
        self.last = sum(count for _, count in ranges) < (number + 2) * batch
        self.due = (ranges, batch, number)
        self._due = functools.partial(super().step, ranges, batch, number, members)
        return Batch(_NONE, _NONE)

    def labels(self, ranges: Ranges, count: int) -> int | None:
        """Return the labels that count (see `Batches`); None with data of the loop's own."""
        return None if self.own_loader else super().labels(ranges, count)

    def read_now(self) -> Batch:
        """Return the batch of the latest step."""
        assert self._due is not None
        return self._due()
