"""Rebuilds the payloads of a record from any stores that have enough pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import Store, piece_path
from dilocox.record.log.custody import content_of
from dilocox.record.pieces.errors import WrongEncodingError
from dilocox.record.pieces.piece import Piece
from dilocox.record.pieces.rebuild import rebuild
from dilocox.tools.availability.cuts import SignedCut, SignedCuts
from dilocox.tools.availability.piece_stores import PieceStores
from dilocox.utils.storage import replace_file

EVIDENCE = "wrong-encoding"
"""Folder, below that of the rebuilt store, of the pieces that prove a wrong encoding."""


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
            objects = _objects(signed, cut, stores, store, target)
            found.size += sum(objects)
            found.rebuilt += 1
        except WrongEncodingError as error:
            found.wrong.append(f"{cut.name}: {error}; signed by {', '.join(cut.sites)}")
        except _LostError as error:
            found.lost.append(str(error))
        progress((number + 1) / max(1, len(signed.cuts)))
    found.wrong, found.dead = [*stores.wrong, *found.wrong], dict(stores.dead)
    return found


class _LostError(Exception):
    """The stores have too few pieces of a cut."""


def _objects(
    signed: SignedCuts, cut: SignedCut, stores: PieceStores, store: Store, target: Path
) -> list[int]:
    """Rebuild the payloads of a cut; return their bytes. What is there already is left as it is."""
    code = signed.code
    pieces = stores.first(cut, range(code.pieces), 1)
    if pieces and all(store.has(digest) for digest, _ in pieces[0].layout.objects):
        return [size for _, size in pieces[0].layout.objects]
    if pieces:
        after = range(pieces[0].index + 1, code.pieces)
        pieces += stores.first(cut, after, code.needed - 1)
    if len(pieces) < code.needed:
        there = ", ".join(code.sites[each.index] for each in pieces) or "none"
        raise _LostError(
            f"{cut.name}: {code.needed} pieces are needed, {len(pieces)} are there ({there})"
        )
    root = bytes.fromhex(cut.root)
    try:
        objects = rebuild(pieces, root, code.needed)
        _check_content(cut, pieces[0])
    except WrongEncodingError:
        _keep_evidence(pieces, cut, target)
        raise
    for data, (digest, _) in zip(objects, pieces[0].layout.objects, strict=True):
        store.put(data, digest)
    return [len(each) for each in objects]


def _check_content(cut: SignedCut, piece: Piece) -> None:
    """Raise `WrongEncodingError` unless a piece's layout begins with the payloads of its cut."""
    digests = [digest for digest, _ in piece.layout.objects]
    if not any(content_of(digests[:count]) == cut.content for count in range(1, len(digests) + 1)):
        raise WrongEncodingError(
            f"the pieces under root {cut.root[:12]}… are of other payloads than those that count"
        )


def _keep_evidence(pieces: list[Piece], cut: SignedCut, target: Path) -> None:
    for each in pieces:
        path = target / EVIDENCE / piece_path(cut.root, each.index)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, each.to_bytes())
        except OSError as error:
            raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
