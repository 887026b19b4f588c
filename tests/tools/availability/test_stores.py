"""Sampling and rebuilding from stores that are whole, dead, silent, lying or incomplete."""

from __future__ import annotations

import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.record.pieces.test_pieces import forged
from tests.support.dispersed import NEXT, Town, payload
from tests.support.record_scene import KEY, own_digest

from dilocox.errors import RecordError
from dilocox.record.bundles.place import Place
from dilocox.record.log.blob_store import Store, piece_path
from dilocox.record.pieces.cut import cut
from dilocox.record.pieces.piece import Piece
from dilocox.record.verify.piece_stores import PieceStores
from dilocox.record.verify.signed_cuts import SignedCut, SignedCuts, read_cuts
from dilocox.tools.availability.restore import EVIDENCE, restore
from dilocox.tools.availability.sampling import Sampled, sample

DRAW = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Town, SignedCuts]:
    """Two exchanges, cut and signed by all three sites; stores without whole payloads."""
    town = Town(tmp_path_factory.mktemp("town"))
    town.exchange(KEY, NEXT)
    for site in "abc":
        shutil.rmtree(town.root / site / "sha256")
    return town, read_cuts(town.folder())


@pytest.fixture
def stores(made: tuple[Town, SignedCuts], tmp_path: Path) -> dict[str, Path]:
    """A copy of each site's store."""
    town, _ = made
    return {site: shutil.copytree(town.root / site, tmp_path / site) for site in "abc"}


@pytest.fixture
def signed(made: tuple[Town, SignedCuts]) -> SignedCuts:
    return made[1]


def asked(signed: SignedCuts, *places: object, samples: int = 30, seconds: float = 5.0) -> Sampled:
    found = PieceStores([str(each) for each in places], seconds)
    return sample(signed, found, samples, random.Random(DRAW))


def change(store: Path, signed: SignedCuts, index: int, at: int = -1) -> None:
    """Flip a bit in a store's piece of the first cut."""
    path = store / piece_path(signed.cuts[0].root, index)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_log_says_who_has_signed_what(signed: SignedCuts) -> None:
    assert [each.exchange for each in signed.cuts] == [KEY.text, NEXT.text]
    assert all(each.certified and set(each.sites) == set("abc") for each in signed.cuts)


def test_a_run_in_progress_is_read_up_to_its_newest_checkpoint(
    made: tuple[Town, SignedCuts], signed: SignedCuts, tmp_path: Path
) -> None:
    folder = shutil.copytree(made[0].scene.config.folder, tmp_path / "run")
    with (folder / "record/statements.jsonl").open("a") as file:
        file.write("a statement that no checkpoint covers yet")
    assert read_cuts(folder) == signed


def test_a_changed_log_is_refused(made: tuple[Town, SignedCuts], tmp_path: Path) -> None:
    folder = shutil.copytree(made[0].scene.config.folder, tmp_path / "run")
    path = folder / "record/statements.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n")
    with pytest.raises(RecordError, match="a statement was changed or moved"):
        read_cuts(folder)


def test_whole_stores_answer_every_sample(signed: SignedCuts, stores: dict[str, Path]) -> None:
    found = asked(signed, *stores.values())
    assert found.passed
    assert found.answered == found.asked
    assert sum(found.asked.values()) == 30
    assert found.chance() < 2**-30


def test_a_dead_site_is_counted_and_the_run_is_still_there(
    signed: SignedCuts, stores: dict[str, Path]
) -> None:
    found = asked(signed, stores["a"], stores["c"])
    assert found.passed
    assert found.answered["b"] == 0 < found.asked["b"]


def test_one_store_fewer_than_needed_fails_and_names_the_cut(
    signed: SignedCuts, stores: dict[str, Path]
) -> None:
    found = asked(signed, stores["b"])
    assert not found.passed
    assert sorted(found.lost) == [
        f"{key.text}: 2 pieces are needed, 1 are there (b); no store has those of a, c"
        for key in (KEY, NEXT)
    ]


def test_a_store_that_lies_fails_and_is_named(signed: SignedCuts, stores: dict[str, Path]) -> None:
    change(stores["b"], signed, 1)
    found = asked(signed, *stores.values())
    assert not found.passed
    assert not found.lost
    (line,) = found.wrong
    assert line.startswith(f"{stores['b']}: piece 1 of {KEY.text}: ")


def test_a_store_that_withholds_half_is_found(signed: SignedCuts, stores: dict[str, Path]) -> None:
    for site, index in (("a", 0), ("b", 1)):
        (stores[site] / piece_path(signed.cuts[1].root, index)).unlink()
    found = asked(signed, *stores.values())
    assert [line.split(":")[0] for line in found.lost] == [NEXT.text]


def test_a_piece_in_the_place_of_another_is_no_answer(
    signed: SignedCuts, stores: dict[str, Path]
) -> None:
    """So a store with one piece cannot answer for two sites."""
    root = signed.cuts[0].root
    shutil.copy(stores["a"] / piece_path(root, 0), stores["a"] / piece_path(root, 1))
    found = asked(signed, stores["a"])
    assert any("piece 0 lies in the place of piece 1" in line for line in found.wrong)
    assert any(line.startswith(KEY.text) for line in found.lost)


def test_a_file_that_is_too_long_is_not_read(signed: SignedCuts, stores: dict[str, Path]) -> None:
    path = stores["a"] / piece_path(signed.cuts[0].root, 0)
    with path.open("ab") as file:
        file.truncate(1 << 30)
    found = asked(signed, *stores.values())
    assert any("larger than" in line for line in found.wrong)


def test_stores_behind_urls_answer_like_folders(
    signed: SignedCuts, stores: dict[str, Path]
) -> None:
    with served(stores["a"]) as one, served(stores["b"]) as two:
        found = asked(signed, one, two)
    assert found.passed
    assert not found.dead


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each store."""
    found, get = Counter[str](), Place.get

    def counted(place: Place, path: str, most: int) -> bytes:
        found[place.url] += 1
        return get(place, path, most)

    monkeypatch.setattr(Place, "get", counted)
    return found


def test_a_dead_server_is_asked_once_and_said_once(
    signed: SignedCuts, stores: dict[str, Path], calls: Counter[str]
) -> None:
    with served(stores["a"]) as url:
        pass
    found = asked(signed, url, stores["b"], stores["c"])
    assert found.passed
    assert list(found.dead) == [url]
    assert calls[url] == 1 < calls[str(stores["b"])]


def test_a_server_that_says_nothing_holds_up_one_call(
    signed: SignedCuts, stores: dict[str, Path], calls: Counter[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = asked(signed, url, stores["b"], stores["c"], seconds=0.5)
    assert found.passed
    assert calls[url] == 1
    assert "no answer" in found.dead[url]


def test_only_a_certified_cut_is_sampled(signed: SignedCuts) -> None:
    none = SignedCuts(signed.run, signed.code, ())
    with pytest.raises(RecordError, match="no cut has a certificate: fewer than 2 of 3 sites"):
        asked(none)
    with pytest.raises(RecordError, match="no cut of round 7"):
        sample(signed, PieceStores([]), 3, random.Random(0), round_=7)


@pytest.mark.parametrize("sites", ["ab", "ac", "bc", "cab"])
def test_any_needed_stores_give_the_payloads_back(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path, sites: str
) -> None:
    target = tmp_path / "rebuilt"
    found = restore(signed, PieceStores([str(stores[each]) for each in sites]), target)
    assert found.passed
    assert (found.rebuilt, found.lost, found.wrong) == (2, [], [])
    for key in (KEY, NEXT):
        for site in "abc":
            assert Store(str(target)).get(own_digest(site, key)) == payload(site, key)


def test_one_store_fewer_rebuilds_nothing_and_names_the_cuts(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    found = restore(signed, PieceStores([str(stores["c"])]), tmp_path / "rebuilt")
    assert not found.passed
    assert found.lost == [
        f"{key.text}: 2 pieces are needed, 1 are there (c)" for key in (KEY, NEXT)
    ]


def test_a_rebuild_goes_on_where_it_was_stopped(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "rebuilt"
    shutil.move(stores["b"], tmp_path / "away")
    first = SignedCuts(signed.run, signed.code, signed.cuts[:1])
    restore(first, PieceStores([str(stores["a"]), str(tmp_path / "away")]), target)
    # What is rebuilt needs one piece alone, to say what belongs to it.
    found = restore(signed, PieceStores([str(stores["a"])]), target)
    assert (found.rebuilt, len(found.lost)) == (1, 1)


def test_a_bad_piece_is_replaced_by_another_and_named(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    change(stores["a"], signed, 0)
    found = restore(signed, PieceStores(list(map(str, stores.values()))), tmp_path / "rebuilt")
    assert found.passed
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith(f"{stores['a']}: piece 0 of {KEY.text}")


def dishonest(signed: SignedCuts, tmp_path: Path) -> tuple[SignedCuts, PieceStores]:
    """A cut whose root the sites have signed, but whose parity piece is not of the code."""
    honest = cut([payload(site, KEY) for site in "abc"], 2, 3)
    parity = bytearray(honest.pieces[2].data)
    parity[0] ^= 1
    wrong = forged(honest, {2: bytes(parity)}, {})
    old = signed.cuts[0]
    new = SignedCut(old.exchange, 0, old.content, wrong.root.hex(), ("a", "c"), old.size, True)
    for index, piece in wrong.pieces.items():
        Store(str(tmp_path / "wrong")).put_piece(wrong.root.hex(), index, piece.to_bytes())
    return SignedCuts(signed.run, signed.code, (new,)), PieceStores([str(tmp_path / "wrong")])


def test_a_wrong_encoding_is_proved_by_the_pieces_that_are_left_as_evidence(
    signed: SignedCuts, tmp_path: Path
) -> None:
    target = tmp_path / "rebuilt"
    found = restore(*dishonest(signed, tmp_path), target)
    assert not found.passed
    (line,) = found.wrong
    assert "wrong encoding, shown by pieces 0 and 1" in line
    assert line.endswith("signed by a, c")
    files = sorted(path for path in (target / EVIDENCE).rglob("*") if path.is_file())
    assert [Piece.from_bytes(path.read_bytes()).index for path in files] == [0, 1]


def test_pieces_of_other_payloads_are_a_wrong_encoding(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    """A root that the sites signed for payloads that count, over pieces of others."""
    old, other = signed.cuts
    new = SignedCut(old.exchange, 0, old.content, other.root, ("a", "b"), other.size, True)
    cuts = SignedCuts(signed.run, signed.code, (new,))
    found = restore(cuts, PieceStores(list(map(str, stores.values()))), tmp_path / "rebuilt")
    assert not found.passed
    assert "of other payloads" in found.wrong[0]


def test_pieces_of_no_payloads_at_all_are_not_taken_for_rebuilt_ones(
    signed: SignedCuts, tmp_path: Path
) -> None:
    """A site that was the only one to sign could have signed the root of an empty layout."""
    empty, store = cut([], 2, 3), Store(str(tmp_path / "liar"))
    store.put_piece(empty.root.hex(), 0, empty.pieces[0].to_bytes())
    old = signed.cuts[0]
    said = SignedCut(old.exchange, 0, old.content, empty.root.hex(), ("a",), old.size, False)
    cuts = SignedCuts(signed.run, signed.code, (said,))
    found = restore(cuts, PieceStores([str(tmp_path / "liar")]), tmp_path / "rebuilt")
    assert (found.passed, found.rebuilt) == (False, 0)
    assert "of other payloads" in found.wrong[0]


def test_a_damaged_payload_in_the_target_is_rebuilt(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    target, places = tmp_path / "rebuilt", list(map(str, stores.values()))
    assert restore(signed, PieceStores(places), target).passed
    digest = own_digest("b", NEXT)
    path = Path(Store(str(target)).path(digest))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert not restore(signed, PieceStores(places[:1]), target).passed
    assert restore(signed, PieceStores(places), target).passed
    assert Store(str(target)).get(digest) == payload("b", NEXT)


def test_a_cut_that_nobody_has_signed_names_where_its_payloads_may_be(
    signed: SignedCuts, stores: dict[str, Path], tmp_path: Path
) -> None:
    old = signed.cuts[0]
    said = SignedCut(old.exchange, 0, old.content, "", (), 0, False)
    cuts = SignedCuts(signed.run, signed.code, (said,))
    found = restore(cuts, PieceStores(list(map(str, stores.values()))), tmp_path / "rebuilt")
    assert not found.passed
    assert "no certificate" in found.lost[0]
    assert "dilocox verify --store" in found.lost[0]


def test_a_sample_of_a_round_counts_its_cuts_without_a_certificate(
    signed: SignedCuts, stores: dict[str, Path]
) -> None:
    one, other = signed.cuts
    late = replace(other, certified=False)
    cuts = SignedCuts(signed.run, signed.code, (one, late))
    found = sample(cuts, PieceStores([str(stores["a"])]), 3, random.Random(0), round_=one.round)
    assert (found.cuts, found.uncertified) == (1, 1)
