"""Cutting and rebuilding: any k of n, every flipped bit, too few pieces, wrong encodings."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.merkle import inclusion_proof, root_of
from dilocox.record.pieces import erasure
from dilocox.record.pieces.chance import pass_chance
from dilocox.record.pieces.cut import Cut, cut
from dilocox.record.pieces.errors import BadPieceError, TooFewPiecesError, WrongEncodingError
from dilocox.record.pieces.layout import Layout
from dilocox.record.pieces.piece import Piece
from dilocox.record.pieces.rebuild import rebuild

CONTENT = [b"a payload", b"", b"another payload of a site", bytes(40)]
codes = st.integers(2, 9).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
contents = st.lists(st.binary(max_size=200), max_size=5)


@settings(max_examples=80, deadline=None)
@given(contents, codes, st.randoms(use_true_random=False))
def test_any_k_pieces_rebuild_the_objects(
    objects: list[bytes], code: tuple[int, int], draw: random.Random
) -> None:
    k, n = code
    found = cut(objects, k, n)
    chosen = draw.sample(list(found.pieces.values()), k)
    files = [each.to_bytes() for each in chosen]
    assert rebuild([Piece.from_bytes(each) for each in files], found.root, k) == objects


def test_every_choice_of_pieces_of_a_content_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasure, "SLICE", 7)
    found = cut(CONTENT, 3, 6)
    for chosen in itertools.combinations(found.pieces.values(), 3):
        assert rebuild(chosen, found.root, 3) == CONTENT


def test_slices_do_not_change_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a site that wants its own piece alone has the same root and the same piece."""
    whole = cut(CONTENT, 3, 6)
    monkeypatch.setattr(erasure, "SLICE", 5)
    own = cut(CONTENT, 3, 6, [4])
    assert own.root == whole.root
    assert own.pieces == {4: whole.pieces[4]}


def test_the_first_k_pieces_are_the_bytes_themselves() -> None:
    found = cut([b"abcdefgh"], 2, 4)
    assert (found.pieces[0].data, found.pieces[1].data) == (b"abcd", b"efgh")


@settings(max_examples=120, deadline=None)
@given(contents, codes, st.randoms(use_true_random=False))
def test_any_flipped_bit_is_found_and_named(
    objects: list[bytes], code: tuple[int, int], draw: random.Random
) -> None:
    k, n = code
    found = cut(objects, k, n)
    chosen = draw.sample(sorted(found.pieces), k)
    files = {index: bytearray(found.pieces[index].to_bytes()) for index in chosen}
    bad = draw.choice(chosen)
    place = draw.randrange(len(files[bad]))
    files[bad][place] ^= 1 << draw.randrange(8)
    try:
        piece = Piece.from_bytes(bytes(files[bad]))
    except BadPieceError:
        return
    if piece == found.pieces[piece.index]:
        return  # Pieces with equal data, such as none, differ by their numbers alone.
    others = [found.pieces[index] for index in chosen if index != bad]
    with pytest.raises(BadPieceError, match=rf"piece {piece.index} "):
        rebuild([*others, piece], found.root, k)


@settings(max_examples=40, deadline=None)
@given(contents, codes, st.randoms(use_true_random=False))
def test_one_piece_fewer_fails_by_name(
    objects: list[bytes], code: tuple[int, int], draw: random.Random
) -> None:
    k, n = code
    found = cut(objects, k, n)
    chosen = draw.sample(list(found.pieces.values()), k - 1)
    twice = [*chosen, *chosen]
    with pytest.raises(TooFewPiecesError, match=rf"{k} pieces are needed, {k - 1} are there"):
        rebuild(twice, found.root, k)


def forged(found: Cut, changes: dict[int, bytes], layouts: dict[int, Layout]) -> Cut:
    """Sign a tree over other pieces, as a dishonest encoder would."""
    plain = [
        Piece(layouts.get(n, each.layout), n, changes.get(n, each.data), ())
        for n, each in sorted(found.pieces.items())
    ]
    leaves = [each.leaf for each in plain]
    pieces = {
        n: Piece(each.layout, n, each.data, tuple(inclusion_proof(leaves, n)))
        for n, each in enumerate(plain)
    }
    return Cut(found.layout, tuple(leaves), root_of(leaves), pieces)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=4),
       st.integers(2, 7).flatmap(lambda n: st.tuples(st.integers(1, n - 1), st.just(n))),
       st.randoms(use_true_random=False))  # fmt: skip
def test_any_k_pieces_prove_a_parity_piece_that_is_not_of_the_code(
    objects: list[bytes], code: tuple[int, int], draw: random.Random
) -> None:
    k, n = code
    honest = cut(objects, k, n)
    bad = draw.randrange(k, n)
    data = bytearray(honest.pieces[bad].data)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    dishonest = forged(honest, {bad: bytes(data)}, {})
    for chosen in itertools.combinations(dishonest.pieces.values(), k):
        for each in chosen:
            each.check(dishonest.root)  # every single piece looks right
        with pytest.raises(WrongEncodingError, match="wrong encoding, shown by pieces"):
            rebuild(chosen, dishonest.root, k)


def test_pieces_of_two_layouts_prove_a_wrong_encoding() -> None:
    honest = cut(CONTENT, 2, 4)
    other = Layout(2, 4, honest.layout.objects[::-1])
    dishonest = forged(honest, {}, {1: other})
    with pytest.raises(WrongEncodingError, match=r"pieces 0 and 1 .* different layouts"):
        rebuild([dishonest.pieces[0], dishonest.pieces[1]], dishonest.root, 2)


def test_bytes_in_the_padding_prove_a_wrong_encoding() -> None:
    """Objects of 3 bytes in two pieces of 2: the last byte is padding, and must be zero."""
    honest = cut([b"abc"], 2, 3)
    layout = honest.layout
    code = cut([b"abcX"], 2, 3)  # a true code word, but not of the three bytes
    dishonest = forged(code, {}, dict.fromkeys(range(3), layout))
    with pytest.raises(WrongEncodingError, match="encodes to root"):
        rebuild([dishonest.pieces[1], dishonest.pieces[2]], dishonest.root, 2)


def test_another_code_than_the_run_files_is_a_wrong_encoding() -> None:
    found = cut(CONTENT, 1, 4)
    with pytest.raises(WrongEncodingError, match="1 of them suffice, the run file says 2"):
        rebuild([found.pieces[0], found.pieces[3]], found.root, 2)


@pytest.mark.parametrize(("k", "n"), [(0, 4), (5, 4), (2, 257), (True, 4)])
def test_sizes_without_a_code_are_refused(k: int, n: int) -> None:
    with pytest.raises(RecordError, match="there is no such code"):
        cut(CONTENT, k, n)


def test_another_machine_gives_the_same_root() -> None:
    """The format is fixed: runs that were recorded before a change must still be read."""
    assert cut([b"payload of paris", b"payload of lyon"], 2, 4).root.hex() == ROOT


ROOT = "5e48ad82297bc3a2dcc9081e495c863143db9ad3443c789788d3559708186c53"


@pytest.mark.parametrize("file", [b"", b"{}\n", b"[]\nabc", b'{"index":0}\n', b"\xff" * 20])
def test_what_is_no_piece_is_named_so(file: bytes) -> None:
    with pytest.raises(BadPieceError, match="is not a piece"):
        Piece.from_bytes(file)


def test_thirty_samples_at_half_rate_leave_a_chance_of_a_billionth() -> None:
    """With k - 1 of 2 k pieces there, less than half of all samples can be answered."""
    for k in range(1, 65):
        assert pass_chance(30, k, 2 * k) < 2**-30
    assert pass_chance(30, 2, 4) == 4.0**-30
    assert pass_chance(0, 2, 4) == 1.0
    assert pass_chance(10, 2, 4, share=0.0) == 1.0


@pytest.mark.parametrize(("k", "n", "share"), [(2, 4, 1.0), (8, 12, 1.0), (2, 4, 0.5)])
def test_the_chance_is_that_of_drawing_pieces(k: int, n: int, share: float) -> None:
    """Counted over every draw of two samples from two cuts, of which a share has k - 1 pieces."""
    cuts = 2
    lost = round(cuts * share)
    there = [index < k - 1 or number >= lost for number in range(cuts) for index in range(n)]
    passed = sum(first and second for first in there for second in there)
    exact = Fraction(passed, len(there) ** 2)
    assert pass_chance(2, k, n, share) == pytest.approx(float(exact))


@pytest.mark.parametrize("wrong", [(-1, 2, 4, 1.0), (1, 0, 4, 1.0), (1, 5, 4, 1.0), (1, 2, 4, 1.5)])
def test_chances_of_impossible_numbers_are_refused(wrong: tuple[int, int, int, float]) -> None:
    with pytest.raises(ValueError, match="pieces"):
        pass_chance(*wrong)
