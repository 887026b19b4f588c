"""Stores of sites, asked for pieces. A store may be dead, silent, incomplete or dishonest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilocox.config.availability import PieceCode
from dilocox.errors import RecordError
from dilocox.record.bundles.place import CALL_SECONDS, DeniedError, Place
from dilocox.record.log import bounded_reads
from dilocox.record.log.blob_store import MissingError, piece_path
from dilocox.record.log.custody import begins_with
from dilocox.record.pieces.errors import BadPieceError, TooFewPiecesError, WrongEncodingError
from dilocox.record.pieces.layout import Layout
from dilocox.record.pieces.piece import Piece
from dilocox.record.pieces.rebuild import rebuild
from dilocox.record.verify.signed_cuts import SignedCut

_SLACK = 1 << 16
"""Bytes beyond a piece's signed size that are read, so that a longer file fails by its content."""


class WrongPiecesError(WrongEncodingError):
    """The pieces of a cut prove that whoever has signed their root has encoded wrongly."""

    def __init__(self, cut: SignedCut, why: str, pieces: Sequence[Piece]) -> None:
        super().__init__(f"{cut.name}: {why}; signed by {', '.join(cut.sites)}")
        self.pieces = pieces
        """The evidence."""


class PieceStores:
    """Several stores, each with the pieces of one site or more."""

    def __init__(self, places: Sequence[str], seconds: float = CALL_SECONDS) -> None:
        """Open stores, folders or URLs; nothing is read yet.

        `seconds`: time limit of one call, beside the time for its bytes. Raises `RecordError` if a
        URL cannot be opened.
        """
        self._places = [Place(each, seconds=seconds) for each in places]
        self.dead: dict[str, str] = {}
        """Why a store is not asked any more, by its place."""
        self.wrong: list[str] = []
        """One line for each file that is not the signed piece."""
        self._found: dict[tuple[str, int], bool] = {}

    def has(self, cut: SignedCut, index: int) -> bool:
        """Return True if some store has this piece of a cut; each piece is read only once."""
        known = self._found.get((cut.root, index))
        return self.find(cut, index) is not None if known is None else known

    def find(self, cut: SignedCut, index: int) -> Piece | None:
        """Return piece `index` of a cut, checked against the signed root; None if no store has it.

        A store that does not answer is not asked again. A file that is not the piece is noted, and
        the next store is asked.
        """
        found = self._find(cut, index)
        self._found[cut.root, index] = found is not None
        return found

    def first(self, cut: SignedCut, indices: Iterable[int], count: int) -> list[Piece]:
        """Return the first `count` pieces of a cut, or all that the stores have."""
        found: list[Piece] = []
        for index in indices:
            if len(found) == count:
                break
            piece = self.find(cut, index)
            if piece is not None:
                found.append(piece)
        return found

    def rebuilt(self, cut: SignedCut, code: PieceCode) -> tuple[Layout, list[bytes]]:
        """Return the layout and the objects of a cut, rebuilt from the first pieces that are there.

        Raises:
            TooFewPiecesError: The stores have fewer pieces than are needed.
            WrongPiecesError: The pieces prove a wrong encoding.
        """
        pieces = self.first(cut, range(code.pieces), code.needed)
        if len(pieces) < code.needed:
            there = ", ".join(code.sites[each.index] for each in pieces) or "none"
            raise TooFewPiecesError(
                f"{cut.name}: {code.needed} pieces are needed, {len(pieces)} are there ({there})"
            )
        check_content(cut, pieces)
        try:
            objects = rebuild(pieces, bytes.fromhex(cut.root), code.needed)
        except WrongEncodingError as error:
            raise WrongPiecesError(cut, str(error), pieces) from None
        return pieces[0].layout, objects

    def _find(self, cut: SignedCut, index: int) -> Piece | None:
        if not cut.root:
            return None
        path = piece_path(cut.root, index)
        most = min(cut.size + _SLACK, bounded_reads.memory_limit())
        for place in self._places:
            if place.url in self.dead:
                continue
            try:
                piece = Piece.from_bytes(place.get(path, most))
                piece.check(bytes.fromhex(cut.root))
                if piece.index != index:
                    raise BadPieceError(f"piece {piece.index} lies in the place of piece {index}")
            except (MissingError, DeniedError):
                continue
            except (BadPieceError, bounded_reads.TooLargeError) as error:
                self._note(place, cut, index, str(error))
            except RecordError as error:
                if place.is_local:  # one file of the folder, such as a link or a bad block
                    self._note(place, cut, index, str(error))
                else:
                    self.dead[place.url] = str(error)
            else:
                return piece
        return None

    def _note(self, place: Place, cut: SignedCut, index: int, why: str) -> None:
        line = f"{place.url}: piece {index} of {cut.name}: {why}"
        if line not in self.wrong:
            self.wrong.append(line)


def check_content(cut: SignedCut, pieces: Sequence[Piece]) -> None:
    """Raise `WrongPiecesError` unless the first piece is one of the payloads that count."""
    if not begins_with((digest for digest, _ in pieces[0].layout.objects), cut.content):
        why = f"the pieces under root {cut.root[:12]}… are of other payloads than those that count"
        raise WrongPiecesError(cut, why, pieces)
