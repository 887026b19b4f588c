"""The run's batches for a user's loop, read only if the loop asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.round_plan import MemberPlan
from dilocox.data import TokenFiles
from dilocox.errors import ConfigError
from dilocox.training.batches import NO_BATCH, Batch, Batches, Ranges, Sequences

NO_TEXT = (
    "data.own: the run has no text of its own; give site.batches a loader, or let the loop read "
    "its data without site.batches"
)


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
        return NO_BATCH

    def labels(self, ranges: Ranges, count: int) -> int | None:
        """Return the labels that count (see `Batches`); None with data of the loop's own."""
        return None if self.own_loader else super().labels(ranges, count)

    def read_now(self) -> Batch:
        """Return the batch of the latest step."""
        assert self._due is not None
        return self._due()


def batches_of_loop(
    config: RunConfig,
    site: str,
    part: tuple[int, int],
    files: TokenFiles | None,
    device: torch.device,
) -> LoopBatches:
    """Return the batches of a user's loop at `site`.

    Args:
        config: the run.
        site: name of the site.
        part: (number, parts): the part of each batch that this process reads.
        files: the run's token files; None if the run has no text.
        device: device that trains on the batches.
    """
    if files is None:
        found = LoopBatches(_no_text, *part, device)
        found.own_loader = True
        return found
    opened = LoopBatches.open(config, site, part[0], files, device, shards=part[1])
    assert isinstance(opened, LoopBatches)
    return opened


def _no_text(_start: int, _count: int) -> Sequences:
    """Raise `ConfigError`: the run has no text."""
    raise ConfigError(NO_TEXT)
