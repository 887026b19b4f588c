"""Rebuilds the payloads of a record from any stores that have enough pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError, Store, piece_path
from dilocox.record.pieces.errors import TooFewPiecesError
from dilocox.record.pieces.piece import Piece
from dilocox.record.verify.piece_stores import PieceStores, WrongPiecesError, check_content
from dilocox.record.verify.signed_cuts import SignedCut, SignedCuts
from dilocox.utils.storage import replace_file

EVIDENCE = "wrong-encoding"
"""Folder, below that of the rebuilt store, of the pieces that prove a wrong encoding."""
_WHOLE = (
    "; it has no certificate, so the sites still have its payloads whole: give their stores to "
    "`dilocox verify --store`, too"
)


@dataclass
class Restored:
    """What was rebuilt."""

    cuts: int
    """Number of cuts whose payloads count."""
    rebuilt: int = 0
    """Cuts whose payloads are in the target now."""
    size: int = 0
    """Bytes of these payloads."""
    lost: list[str] = field(default_factory=list)
    """One line for each cut that could not be rebuilt."""
    wrong: list[str] = field(default_factory=list)
    """One line for each file that is not the signed piece, and for each wrong encoding."""
    dead: dict[str, str] = field(default_factory=dict)
    """Why a store was not asked any more, by its place."""

    @property
    def passed(self) -> bool:
        """True if the payloads of all cuts are there."""
        return self.rebuilt == self.cuts


def restore(
    signed: SignedCuts,
    stores: PieceStores,
    target: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> Restored:
    """Rebuild the payloads of all cuts into the store `target`, which may have some of them.

    A cut that fails does not stop the others. Raises `RecordError` if `target` cannot be written.
    """
    found = Restored(len(signed.cuts))
    store = Store(str(target))
    for number, cut in enumerate(signed.cuts):
        try:
            found.size += _restore(signed, cut, stores, store)
            found.rebuilt += 1
        except WrongPiecesError as error:
            found.wrong.append(str(error))
            _keep_evidence(error.pieces, cut, target)
        except TooFewPiecesError as error:
            found.lost.append(str(error))
        progress((number + 1) / max(1, len(signed.cuts)))
    found.wrong, found.dead = [*stores.wrong, *found.wrong], dict(stores.dead)
    return found


def _restore(signed: SignedCuts, cut: SignedCut, stores: PieceStores, store: Store) -> int:
    """Rebuild the payloads of a cut; return their bytes. What is there already is left as it is."""
    known = stores.first(cut, range(signed.code.pieces), 1)
    if known:
        # First of all: an empty layout would name nothing that could be missing.
        check_content(cut, known)
        lacking = [each for each in known[0].layout.objects if not _is_there(store, *each)]
        if not lacking:
            return known[0].layout.size
    try:
        layout, objects = stores.rebuilt(cut, signed.code)
    except TooFewPiecesError as error:
        raise TooFewPiecesError(f"{error}{'' if cut.certified else _WHOLE}") from None
    for data, (digest, _) in zip(objects, layout.objects, strict=True):
        store.put(data, digest)
    return layout.size


def _is_there(store: Store, digest: str, size: int) -> bool:
    """Return True if a store has an object; remove what it has if its bytes are damaged."""
    try:
        store.get(digest, size)
    except MissingError:
        return False
    except RecordError:
        store.drop(digest)
        return False
    return True


def _keep_evidence(pieces: Sequence[Piece], cut: SignedCut, target: Path) -> None:
    for each in pieces:
        path = target / EVIDENCE / piece_path(cut.root, each.index)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, each.to_bytes())
        except OSError as error:
            raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
