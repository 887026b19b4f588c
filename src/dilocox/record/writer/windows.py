"""Windows of payloads: how `record.keep` bounds what stays in the store.

A window holds the payloads of consecutive rounds. The first window begins with theta_0. Each later
window begins with the anchor and the outer momentum of one rank, signed by the rank's site. A
replay of the later rounds needs nothing of a window that was removed. Windows lie in stores of
their own below the record's store, by site, rank and first round: one rank never removes what
another rank keeps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dilocox.config.base import parse_bytes
from dilocox.config.run_config import RunConfig
from dilocox.outer.outer_step import MOMENTUM_DTYPES
from dilocox.record.log.blob_store import Store

WHOLE_BELOW = 10**9
"""Parameters. With `record.keep = "auto"` a smaller model keeps all payloads."""
AUTO_BYTES = 500 * 10**9
AUTO_BYTES_PER_PARAMETER = 80
"""Bytes per parameter that a larger model keeps with `record.keep = "auto"`; at least `AUTO_BYTES`.
Checkpoints of a run take about as much."""
PARTS = 4
"""Windows that the bound is divided into."""
STARTS = 8
"""Start states that a byte budget must hold at least: half of the budget is payloads then."""


@dataclass(frozen=True)
class Bound:
    """Bound on a site's payloads: in rounds or in bytes, never in both."""

    rounds: int | None = None
    """Number of newest rounds that always stay."""
    bytes: int | None = None
    """Bytes of one site's windows. The two newest windows stay even if they are larger."""

    def for_one_of(self, ranks: int) -> Bound:
        """The bound of each of a site's ranks."""
        return self if self.bytes is None else Bound(bytes=self.bytes // ranks)


def bound_of(config: RunConfig, parameters: int) -> Bound | None:
    """Return the bound of `record.keep` for a model of `parameters` parameters.

    Returns None if all payloads stay.
    """
    keep = config.record.keep
    if config.exchanges_gradients or keep == "all":
        return None
    if config.availability is not None and not config.availability.keep_whole:
        return None  # certificates of pieces decide what is removed
    if isinstance(keep, int):
        return Bound(rounds=keep)
    if keep != "auto":
        return Bound(bytes=parse_bytes(keep))
    if parameters < WHOLE_BELOW:
        return None
    return Bound(bytes=max(AUTO_BYTES, AUTO_BYTES_PER_PARAMETER * parameters))


def has_windows(config: RunConfig, parameters: int) -> bool:
    """Return True if the ranks of a model of `parameters` parameters keep payloads in windows."""
    return config.record.enabled and bound_of(config, parameters) is not None


def start_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes per parameter of a window's start state: fp32 anchor and outer momentum."""
    return 4 + MOMENTUM_DTYPES[config.outer.momentum_dtype].itemsize


def small_budget(config: RunConfig, parameters: int) -> int | None:
    """Return the least byte budget of this model if `record.keep` is smaller, else None."""
    bound = bound_of(config, parameters)
    least = STARTS * start_bytes_per_parameter(config) * parameters
    return least if bound is not None and bound.bytes is not None and bound.bytes < least else None


def first_kept(starts: Collection[int], newest: int, bound: Bound) -> int:
    """Return the first round of which a rank keeps all payloads, whatever their size.

    Args:
        starts: First rounds of the windows that the rank has begun.
        newest: First round of the newest window.
        bound: The bound of the rank.
    """
    if bound.rounds is not None:
        most = bound.rounds
        return max((start for start in starts if newest - start >= most), default=0)
    return sorted(starts)[-2] if len(starts) > 1 else 0


class Windows:
    """The windows of one rank. Only the record's thread calls `open`, `add` and `drop`."""

    def __init__(self, store: Store, rank: str, bound: Bound) -> None:
        """Find the rank's windows in `store`. Raises `RecordError` if it cannot be read.

        `rank`: `SITE/STAGE.SHARD`. `bound`: the bound of this rank.
        """
        self._store, self._rank, self._bound = store, rank, bound
        # A restarted rank continues with the windows that it wrote before.
        self._sizes = store.windows(rank) or {0: 0}
        self._newest = max(self._sizes)
        self._before = self._sizes[self._newest]
        self.current = store.window(rank, self._newest)
        """Store of the newest window, into which payloads are put."""

    def due(self, round_: int) -> bool:
        """Return True if a window begins with this round. Call exactly once for each round."""
        if self._bound.rounds is not None:
            return round_ > 0 and round_ % max(1, -(-self._bound.rounds // PARTS)) == 0
        assert self._bound.bytes is not None
        size = self._sizes[self._newest]
        grown, self._before = size - self._before, size
        # After one more round as large as the last one the window would exceed its part.
        return round_ > self._newest and size + grown > self._bound.bytes // PARTS

    def open(self, round_: int) -> Store:
        """Begin the window of round `round_`; return its store."""
        self._newest, self._before = round_, 0
        self._sizes.setdefault(round_, 0)
        self.current = self._store.window(self._rank, round_)
        return self.current

    def add(self, size: int) -> None:
        """Count `size` bytes that were put into the newest window."""
        self._sizes[self._newest] += size

    def drop(self) -> None:
        """Remove windows beyond the bound. The newest window and the one before always stay.

        Raises `RecordError`.
        """
        while self._is_beyond():
            oldest = min(self._sizes)
            self._store.drop_window(self._rank, oldest)
            del self._sizes[oldest]

    def _is_beyond(self) -> bool:
        first = sorted(self._sizes)
        if len(first) < 2 or first[1] > first_kept(first, self._newest, self._bound):
            return False
        if self._bound.rounds is not None:
            return True
        assert self._bound.bytes is not None
        closed = sum(self._sizes.values()) - self._sizes[self._newest]
        return closed + self._bound.bytes // PARTS > self._bound.bytes
