"""A fragment of one round: the pieces of a rank that are exchanged together, as one vector."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dilocox.compression import Compressor, LowRank, compressor
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.errors import ExchangeError, TrainingError
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout


class FragmentGroup:
    """Neighbouring pieces, whose vectors lie one behind the other in what is exchanged.

    Each keeps its own state: pieces that are exchanged together in one round may part in the next.
    """

    def __init__(self, states: Sequence[FragmentState]) -> None:
        self._states = states
        self.layout = Layout.joined([state.layout for state in states])

    @property
    def warm(self) -> Tensor | None:
        """Q of a low-rank codec; none for other codecs."""
        return self._states[0].warm

    def slices(self) -> Iterator[tuple[FragmentState, slice]]:
        """Each piece's state, and where it lies in the fragment's vector."""
        start = 0
        for state in self._states:
            yield state, slice(start, start + state.layout.length)
            start += state.layout.length

    def compressor(self, name: str) -> Compressor | LowRank:
        """The codec `name` for this fragment; see `FragmentState.compressor`.

        Raises `TrainingError` for a low-rank codec and several pieces: Q is one piece's.
        """
        if len(self._states) == 1:
            return self._states[0].compressor(name)
        found = compressor(name, self.layout.geometry)
        if isinstance(found, LowRank):
            raise TrainingError(f"{name}: pieces with a basis each cannot be exchanged together")
        return found

    def boundary(
        self, live: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool, str | None]:
        """The contribution u, flat fp32 [layout.length]; whether it may be contributed; and the
        value that is not finite, if one is (see `FragmentState.boundary`)."""
        parts, bad = [], None
        for state in self._states:
            u, finite = state.boundary(live, weight, decay)
            parts.append(u)
            if not finite and bad is None:
                bad = state.non_finite
        return _one(parts), bad is None, bad

    def check(self, *vectors: Tensor | None) -> None:
        """Raise `ExchangeError` for one that is there and not of this fragment's length."""
        length = self.layout.length
        for vector in vectors:
            if vector is not None and vector.shape != (length,):
                raise ExchangeError(
                    f"{list(vector.shape)} values cannot land on a fragment of {length}"
                )

    def only(self, pieces: Collection[FragmentState]) -> list[tuple[FragmentState, slice]]:
        """`slices` of some of its pieces."""
        chosen = {id(state) for state in pieces}
        return [(state, place) for state, place in self.slices() if id(state) in chosen]

    def committed(
        self,
        u: Tensor,
        sent: Tensor | None,
        second_error: tuple[int, Tensor] | None = None,
        pieces: Collection[FragmentState] | None = None,
    ) -> None:
        """The contribution set is fixed: see `FragmentState.committed`. `pieces`: of these alone,
        none for all."""
        for state, place in self.slices() if pieces is None else self.only(pieces):
            state.committed(
                u[place], None if sent is None else sent[place], _within(second_error, place)
            )


def fragment_of(states: Sequence[FragmentState], fragment: int, fragments: int) -> FragmentGroup:
    """`fragment` of `fragments` of a rank with these pieces. Raises `ConfigError`."""
    return FragmentGroup([states[piece] for piece in pieces_of(fragment, fragments, len(states))])


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _within(error: tuple[int, Tensor] | None, place: slice) -> tuple[int, Tensor] | None:
    """What of (start, values) lies in a piece, counted from the piece's start; none if nothing."""
    if error is None:
        return None
    start, values = error
    first, last = max(start, place.start), min(start + values.numel(), place.stop)
    if first >= last:
        return None
    return first - place.start, values[first - start : last - start]
