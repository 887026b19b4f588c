"""A fragment of a round: pieces of a rank that one exchange carries together as one vector."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dilocox.compression import FragmentCodec, compressor
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.errors import ExchangeError, TrainingError
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout


class FragmentGroup:
    """Neighbouring pieces, whose vectors are concatenated for the exchange.

    Each piece keeps a state of its own, because the next round may group the pieces differently.
    """

    def __init__(self, states: Sequence[FragmentState]) -> None:
        self._states = states
        self.layout = Layout.joined([state.layout for state in states])

    @property
    def warm(self) -> Tensor | None:
        """Q of a low-rank codec, flat fp32. None for other codecs."""
        return self._states[0].warm

    def slices(self) -> Iterator[tuple[FragmentState, slice]]:
        """Yield each piece's state and its place in the fragment's vector."""
        start = 0
        for state in self._states:
            yield state, slice(start, start + state.layout.length)
            start += state.layout.length

    def compressor(self, name: str) -> FragmentCodec:
        """Return the codec `name` for this fragment; see `FragmentState.compressor`.

        Raises `TrainingError` for a low-rank codec and several pieces, because each piece has a Q
        of its own.
        """
        if len(self._states) == 1:
            return self._states[0].compressor(name)
        found = compressor(name, self.layout.geometry)
        if found.agreement is not None:
            raise TrainingError(
                f"{name}: each piece has a low-rank basis of its own, so pieces cannot be "
                "exchanged together"
            )
        return found

    def boundary(
        self, live: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool, str | None]:
        """Return (u, finite, name) of the pieces together; see `FragmentState.boundary`.

        `u` is the contribution, flat fp32 [layout.length]. If `finite` is False, u must not be
        contributed, and `name` is the first value that is not finite; otherwise `name` is None.
        """
        parts, bad = [], None
        for state in self._states:
            u, finite = state.boundary(live, weight, decay)
            parts.append(u)
            if not finite and bad is None:
                bad = state.non_finite
        return _one(parts), bad is None, bad

    def check(self, *vectors: Tensor | None) -> None:
        """Raise `ExchangeError` if a vector has another length than this fragment. None passes."""
        length = self.layout.length
        for vector in vectors:
            if vector is not None and vector.shape != (length,):
                raise ExchangeError(
                    f"{list(vector.shape)} values cannot land on a fragment of {length}"
                )

    def only(self, pieces: Collection[FragmentState]) -> list[tuple[FragmentState, slice]]:
        """Return `slices` restricted to `pieces`."""
        chosen = {id(state) for state in pieces}
        return [(state, place) for state, place in self.slices() if id(state) in chosen]

    def committed(
        self,
        u: Tensor,
        sent: Tensor | None,
        second_error: tuple[int, Tensor] | None = None,
        pieces: Collection[FragmentState] | None = None,
    ) -> None:
        """Call `FragmentState.committed` for `pieces`; None means all pieces of the fragment."""
        for state, place in self.slices() if pieces is None else self.only(pieces):
            state.committed(
                u[place], None if sent is None else sent[place], _within(second_error, place)
            )


def fragment_of(states: Sequence[FragmentState], fragment: int, fragments: int) -> FragmentGroup:
    """Return fragment number `fragment` of `fragments`, at a rank whose pieces are `states`.

    Raises `ConfigError` if the rank has fewer pieces than fragments.
    """
    return FragmentGroup([states[piece] for piece in pieces_of(fragment, fragments, len(states))])


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _within(error: tuple[int, Tensor] | None, place: slice) -> tuple[int, Tensor] | None:
    """Return the part of (start, values) within a piece, with start relative to the piece.

    None if no value lies in the piece.
    """
    if error is None:
        return None
    start, values = error
    first, last = max(start, place.start), min(start + values.numel(), place.stop)
    if first >= last:
        return None
    return first - place.start, values[first - start : last - start]
