"""Rebuilds objects from any k of their pieces, and finds a wrong encoding.

Pieces that are all under one root and yet are no code word are evidence: whoever signed the root
has encoded wrongly. Anybody can repeat the check with these pieces and the signed root alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.record.log.digests import sha256
from dilocox.record.pieces.cut import cut
from dilocox.record.pieces.erasure import decoded
from dilocox.record.pieces.errors import TooFewPiecesError, WrongEncodingError
from dilocox.record.pieces.layout import Layout
from dilocox.record.pieces.piece import Piece, check_all


def rebuild(pieces: Sequence[Piece], root: bytes, need: int) -> list[bytes]:
    """Return the objects behind `root`, in their order, from the first `need` distinct pieces.

    The result is encoded again and must give `root`.

    Args:
        pieces: Pieces in any order; further pieces than `need` are compared by their layout only.
        root: The signed root, 32 bytes.
        need: The code's k, by the run file.

    Raises:
        BadPieceError: A piece is not under the root; the message names it.
        TooFewPiecesError: There are fewer than `need` distinct pieces.
        WrongEncodingError: The pieces are under the root, but they are no code word.
    """
    check_all(pieces, root)
    by_index = {each.index: each for each in pieces}
    if len(by_index) < need:
        there = ", ".join(map(str, sorted(by_index))) or "none"
        raise TooFewPiecesError(
            f"{need} pieces are needed, {len(by_index)} are there ({there}), under root "
            f"{root.hex()[:12]}…"
        )
    layout = _one_layout(list(by_index.values()), root)
    if layout.k != need:
        raise WrongEncodingError(
            f"pieces under root {root.hex()[:12]}… say that {layout.k} of them suffice, the run "
            f"file says {need}"
        )
    used = sorted(by_index)[:need]
    blocks = {index: by_index[index].data for index in used}
    data = decoded(blocks, layout.k, layout.n, layout.size)
    objects, start = [], 0
    for digest, size in layout.objects:
        objects.append(data[start : start + size])
        start += size
        if sha256(objects[-1]) != digest:
            raise _wrong(used, root, f"object {digest[:12]}… of their layout is not in them")
    again = cut(objects, layout.k, layout.n, ()).root
    if again != root:
        raise _wrong(used, root, f"their content encodes to root {again.hex()[:12]}…")
    return objects


def _one_layout(pieces: Sequence[Piece], root: bytes) -> Layout:
    first = pieces[0]
    for each in pieces[1:]:
        if each.layout != first.layout:
            raise _wrong([first.index, each.index], root, "they have different layouts")
    return first.layout


def _wrong(indices: Sequence[int], root: bytes, why: str) -> WrongEncodingError:
    named = " and ".join(map(str, indices))
    return WrongEncodingError(
        f"wrong encoding, shown by pieces {named} under root {root.hex()[:12]}…: {why}"
    )
