"""Payloads that no store has whole, rebuilt from the pieces in the same stores."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError
from dilocox.record.pieces import erasure
from dilocox.record.pieces.errors import TooFewPiecesError
from dilocox.record.verify.piece_stores import PieceStores, WrongPiecesError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.signed_cuts import SignedCut, signed_cuts

CACHED = 4
"""Rebuilt cuts that stay in memory; a replay needs the payloads of one exchange together."""


class RebuiltPayloads:
    """Objects of a run with `[availability]`, by SHA-256."""

    def __init__(self, course: RunHistory, places: Sequence[str]) -> None:
        """Read the cuts of `course`. `places`: stores, folders or URLs. Raises `RecordError`."""
        self._signed, self._stores = signed_cuts(course), PieceStores(places)
        by_cut = {(each.exchange, each.shard): each for each in self._signed.cuts}
        self._where: dict[str, SignedCut] = {}
        for step in course.steps.values():
            for place, digest in step.payloads.items():
                cut = by_cut.get((step.key.text, int(place.rsplit("/", 1)[1])))
                if cut is not None:
                    self._where[digest] = cut
        self._enough: dict[str, bool] = {}
        self._cached: OrderedDict[str, dict[str, bytes]] = OrderedDict()

    def has(self, digest: str) -> bool:
        """Return True if enough pieces for this object are there; they are read once."""
        cut = self._where.get(digest)
        if cut is None:
            return False
        if cut.root not in self._enough:
            code = self._signed.code
            found = self._stores.first(cut, range(code.pieces), code.needed)
            self._enough[cut.root] = len(found) == code.needed
        return self._enough[cut.root]

    def get(self, digest: str) -> bytes | None:
        """Return the bytes of an object; None if it is not known.

        Objects beside payloads, such as a codec's basis, are known once a payload of the same
        exchange was rebuilt. Raises `MissingError` if too few pieces are there or the package zfec
        is missing, and `RecordError` if the pieces under a certified root prove a wrong encoding.
        """
        cut = self._where.get(digest)
        if cut is None:
            return None
        if not erasure.is_installed():
            raise MissingError(erasure.MISSING)
        try:
            return self._objects(cut)[digest]
        except TooFewPiecesError as error:
            raise MissingError(str(error)) from None
        except WrongPiecesError as error:
            if cut.certified:
                raise
            # One dishonest site alone cannot make a record FAIL: honest sites have the payloads.
            raise MissingError(str(error)) from None

    def _objects(self, cut: SignedCut) -> dict[str, bytes]:
        if cut.root not in self._cached:
            layout, objects = self._stores.rebuilt(cut, self._signed.code)
            named = {
                digest: data for (digest, _), data in zip(layout.objects, objects, strict=True)
            }
            self._where.update(dict.fromkeys(named, cut))
            self._cached[cut.root] = named
            while len(self._cached) > CACHED:
                self._cached.popitem(last=False)
        return self._cached[cut.root]


def rebuilt_payloads(course: RunHistory, places: Sequence[str]) -> RebuiltPayloads | None:
    """Return the payloads that pieces in `places` give back; None if the run has no pieces.

    The claim `availability` reports a malformed section.
    """
    if course.config.get("availability") is None:
        return None
    try:
        return RebuiltPayloads(course, places)
    except RecordError:
        return None
