"""A site's part: it cuts beside training, signs once a round, and survives what fails."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dilocox.coordinator.client.errors import CoordinatorUnreachableError
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Store, piece_path
from dilocox.record.log.custody import Custody
from dilocox.record.log.digests import sha256
from dilocox.record.pieces.piece import Piece
from dilocox.record.writer import dispersal
from tests.support.dispersed import NEXT, PATIENCE, Site, Town, payload
from tests.support.record_scene import KEY

LATER = ExchangeKey.outer(1, 0, 0)


class Notebook:
    """A coordinator that notes what is submitted, and fails when told."""

    def __init__(self) -> None:
        self.statements: list[Custody] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()

    def custody(self, statement: str | None, asked: Sequence[str]) -> Mapping[str, str]:
        assert self.free.wait(PATIENCE)
        if self.fails:
            raise CoordinatorUnreachableError("the coordinator does not answer")
        assert statement is not None
        self.statements.append(Custody.of(s.opened(statement)[0]))
        return {}


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path, lambda site: Notebook())


def book(site: Site) -> Notebook:
    assert isinstance(site.coordinator, Notebook)
    return site.coordinator


def test_every_site_signs_the_same_root_and_keeps_its_own_piece(town: Town) -> None:
    town.exchange(KEY)
    said = [book(site).statements[0] for site in town.sites.values()]
    assert [each.index for each in said] == [0, 1, 2]
    assert len({each.held[0].root for each in said}) == 1
    for site, custody in zip(town.sites.values(), said, strict=True):
        held = custody.held[0]
        file = (town.root / site.name / piece_path(held.root, custody.index)).read_bytes()
        piece = Piece.from_bytes(file)
        piece.check(bytes.fromhex(held.root))
        assert (piece.leaf.hex(), len(file)) == (held.leaf, held.size)
        assert not site.lines


def test_one_statement_has_all_exchanges_of_a_round(town: Town) -> None:
    site = town.sites["a"]
    for key in (KEY, NEXT, LATER):
        site.keep(key)
    site.dispersal.wait(PATIENCE)
    held = [[each.exchange for each in said.held] for said in book(site).statements]
    assert held == [[KEY.text, NEXT.text], [LATER.text]]


def test_an_exchange_that_a_resume_repeats_is_signed_anew(town: Town) -> None:
    site = town.sites["a"]
    site.keep(KEY)
    site.keep(KEY, sites="ab")
    site.dispersal.wait(PATIENCE)
    first, second = book(site).statements
    assert first.held[0].content != second.held[0].content


def test_the_basis_of_a_codec_is_cut_with_the_payloads(town: Town) -> None:
    site = town.sites["a"]
    site.keep(KEY, more=[b"basis"])
    site.dispersal.wait(PATIENCE)
    (said,) = book(site).statements
    piece = Piece.from_bytes(
        (town.root / "a" / piece_path(said.held[0].root, said.index)).read_bytes()
    )
    named = [digest for digest, _ in piece.layout.objects]
    assert named == [*(sha256(payload(site, KEY)) for site in "abc"), sha256(b"basis")]


def test_nothing_waits_for_a_coordinator_that_hangs(town: Town) -> None:
    """The caller is the record's thread; its exchanges go on, whatever the queue holds."""
    site = town.sites["a"]
    book(site).free.clear()
    for round_ in range(50):
        site.keep(ExchangeKey.outer(round_, 0, 0))
    assert not book(site).statements
    book(site).free.set()
    site.dispersal.wait(PATIENCE)
    assert sum(len(each.held) for each in book(site).statements) == 50


def test_a_dead_coordinator_is_said_once_and_signed_later(town: Town) -> None:
    site = town.sites["a"]
    book(site).fails = True
    for key in (KEY, NEXT, LATER):
        site.keep(key)
    site.dispersal.wait(PATIENCE)
    site.dispersal.wait(PATIENCE)
    assert len(site.lines) == 1
    assert "the run goes on" in site.lines[0]
    book(site).fails = False
    site.dispersal.wait(PATIENCE)
    held = [each.exchange for said in book(site).statements for each in said.held]
    assert sorted(held) == sorted([KEY.text, NEXT.text, LATER.text])


def test_a_rank_that_was_killed_signs_what_was_left(town: Town) -> None:
    site = town.sites["a"]
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    book(site).fails = True
    site.keep(NEXT)
    site.dispersal.wait(PATIENCE)
    with (town.root / "custody-a.jsonl").open("a") as file:
        file.write('["+","outer/0')  # killed while it wrote
    book(site).fails = False
    book(site).statements.clear()
    site.begin()
    site.dispersal.wait(PATIENCE)
    assert [each.exchange for said in book(site).statements for each in said.held] == [NEXT.text]
    site.begin()
    site.dispersal.wait(PATIENCE)
    assert len(book(site).statements) == 1  # and nothing twice


def test_a_payload_that_is_gone_is_said_once_and_later_ones_are_cut(town: Town) -> None:
    site = town.sites["a"]
    site.dispersal.stored(KEY, 1, [(sha256(b"gone"), 4)])
    site.dispersal.stored(NEXT, 1, [(sha256(b"gone, too"), 9)])
    site.keep(LATER)
    site.dispersal.wait(PATIENCE)
    assert len(site.lines) == 1
    assert "not in the store" in site.lines[0]
    assert [each.held[0].exchange for each in book(site).statements] == [LATER.text]


def test_a_store_that_was_away_gets_its_pieces_at_the_end(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = town.sites["a"]
    put = site.store.put_piece

    def away(*_: object) -> None:
        raise RecordError("the store is away")

    monkeypatch.setattr(site.store, "put_piece", away)
    site.keep(KEY)
    site.keep(LATER)
    site.dispersal.wait(PATIENCE)
    assert not book(site).statements
    monkeypatch.setattr(site.store, "put_piece", put)
    site.dispersal.wait(PATIENCE)
    held = [each.exchange for said in book(site).statements for each in said.held]
    assert sorted(held) == sorted([KEY.text, LATER.text])
    assert len(site.lines) == 1


def test_a_damaged_payload_is_not_signed(town: Town) -> None:
    site = town.sites["a"]
    site.store.put(b"payload")
    Path(site.store.path(sha256(b"payload"))).write_bytes(b"another")
    site.dispersal.stored(KEY, 1, [(sha256(b"payload"), 7)])
    site.dispersal.wait(PATIENCE)
    assert not book(site).statements
    assert f"payloads of {KEY.text} are damaged" in site.lines[0]


def test_payloads_of_a_window_are_cut_into_the_record_s_own_store(town: Town) -> None:
    """With a bounded `record.keep` a window is removed later, and the pieces stay."""
    site = town.sites["a"]
    window = site.store.window("a/0.0", 3)
    objects = [payload(each, KEY) for each in "abc"]
    for each in objects:
        window.put(each)
    named = [(sha256(each), len(each)) for each in objects]
    site.dispersal.stored(KEY, 3, named, window)
    site.dispersal.wait(PATIENCE)
    site.store.drop_window("a/0.0", 3)
    (said,) = book(site).statements
    assert (town.root / "a" / piece_path(said.held[0].root, 0)).is_file()


def test_a_piece_that_the_store_refused_is_kept_later(town: Town) -> None:
    """The folder of pieces cannot be written for a while, as on a store that is not mounted."""
    site, blocked = town.sites["a"], town.root / "a" / "pieces"
    site.dispersal.wait(PATIENCE)
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_text("in the way")
    site.keep(KEY)
    site.keep(NEXT)
    site.dispersal.wait(PATIENCE)
    assert len(site.lines) == 1
    assert not book(site).statements
    blocked.unlink()
    site.keep(LATER)
    site.dispersal.wait(PATIENCE)
    held = [each.exchange for said in book(site).statements for each in said.held]
    assert sorted(held) == sorted([KEY.text, NEXT.text, LATER.text])
    assert len(site.lines) == 1


def test_a_damaged_piece_is_written_anew_before_it_is_signed(town: Town) -> None:
    site = town.sites["a"]
    book(site).fails = True
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    (path,) = (
        each for each in (town.root / "a" / "pieces").rglob("000") if "sites" not in str(each)
    )
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    book(site).fails = False
    site.begin()
    site.dispersal.wait(PATIENCE)
    assert len(book(site).statements) == 1
    assert path.read_bytes() == good


def test_a_damaged_payload_is_not_in_the_way_of_later_ones(town: Town) -> None:
    site, bad = town.sites["a"], payload("b", KEY)
    site.store.put(b"x" * len(bad), sha256(bad))
    for each in "ac":
        site.store.put(payload(each, KEY))
    site.dispersal.stored(KEY, 1, [(sha256(payload(e, KEY)), len(bad)) for e in "abc"])
    for key in (NEXT, LATER):
        site.keep(key)
    site.dispersal.wait(PATIENCE)
    held = [each.exchange for said in book(site).statements for each in said.held]
    assert held == [NEXT.text, LATER.text]
    assert len(site.lines) == 1
    assert "damaged" in site.lines[0]


def test_an_exchange_without_payloads_is_not_cut(town: Town) -> None:
    site = town.sites["a"]
    site.dispersal.stored(KEY, 0, [])
    site.dispersal.wait(PATIENCE)
    assert not book(site).statements


# --- payloads that are removed ----------------------------------------------------------------


@pytest.fixture
def sparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Town:
    """Sites that remove payloads once their pieces have a certificate."""
    monkeypatch.setattr(dispersal, "ENDS", (0.0,))
    return Town(tmp_path, keep_whole=False)


def whole(site: Site, *keys: ExchangeKey) -> list[bool]:
    """Whether a site's store has each payload of the exchanges."""
    return [
        site.store.has(sha256(payload(other, key))) for key in keys or (KEY,) for other in "abc"
    ]


def test_payloads_are_removed_once_two_thirds_have_signed(sparing: Town) -> None:
    sparing.scene.exchange(KEY)
    first, second, third = sparing.sites.values()
    first.keep(KEY)
    first.dispersal.wait(PATIENCE)
    assert whole(first) == [True] * 3  # its own signature alone is no certificate
    second.keep(KEY)
    second.dispersal.wait(PATIENCE)
    assert whole(second) == [False] * 3
    first.dispersal.wait(PATIENCE)  # asks again
    assert whole(first) == [False] * 3
    third.keep(KEY)
    third.dispersal.wait(PATIENCE)
    assert whole(third) == [False] * 3
    assert not any(site.lines for site in sparing.sites.values())


def test_a_certificate_is_in_the_log_on_disk_before_payloads_are_removed(sparing: Town) -> None:
    sparing.scene.exchange(KEY)
    synced: list[int] = []
    sync = sparing.scene.notary.log.sync
    sparing.scene.notary.log.sync = lambda: (synced.append(1), sync())[1]  # type: ignore[method-assign]
    sparing.sites["a"].keep(KEY)
    sparing.sites["a"].dispersal.wait(PATIENCE)
    assert (synced, whole(sparing.sites["a"])) == ([], [True] * 3)
    sparing.sites["b"].keep(KEY)
    sparing.sites["b"].dispersal.wait(PATIENCE)
    assert synced
    assert whole(sparing.sites["b"]) == [False] * 3


def test_a_site_whose_root_is_not_the_certified_one_removes_nothing(sparing: Town) -> None:
    """It may have cut wrongly, and then its payloads are the only right thing that it has."""
    sparing.scene.exchange(KEY)
    sparing.sites["a"].keep(KEY, more=[b"something else"])
    for name in "bc":
        sparing.sites[name].keep(KEY)
    sparing.wait()
    sparing.wait()
    assert whole(sparing.sites["a"]) == [True] * 3
    assert whole(sparing.sites["b"]) == [False] * 3


def test_a_payload_that_another_cut_needs_stays(sparing: Town) -> None:
    sparing.scene.exchange(KEY)
    site = sparing.sites["a"]
    site.keep(KEY)
    sparing.sites["b"].keep(KEY)
    sparing.sites["b"].dispersal.wait(PATIENCE)
    # A later exchange, not certified yet, has one payload of the first.
    again = payload("c", KEY)
    site.dispersal.stored(NEXT, 1, [(sha256(again), len(again))])
    site.dispersal.wait(PATIENCE)
    assert whole(site) == [False, False, True]


def test_a_store_that_sites_share_keeps_all(sparing: Town) -> None:
    """A slower site still has to cut from it."""
    for site in sparing.sites.values():
        site.store = Store(str(sparing.root / "shared"))
        site.begin()
    sparing.exchange(KEY)
    sparing.wait()
    assert whole(sparing.sites["a"]) == [True] * 3
    assert not any(site.lines for site in sparing.sites.values())


def test_a_store_that_some_sites_share_keeps_all_for_the_slowest(sparing: Town) -> None:
    """b and c have a certificate with their own stores' pieces; c shares the store of a."""
    slow, fast = sparing.sites["a"], sparing.sites["c"]
    for site in (slow, fast):
        site.store = Store(str(sparing.root / "shared"))
        site.begin()
    slow.dispersal.wait(PATIENCE)
    sparing.scene.exchange(KEY)
    for site in (sparing.sites["b"], fast):
        site.keep(KEY)
        site.dispersal.wait(PATIENCE)
    fast.dispersal.wait(PATIENCE)
    assert whole(fast) == [True] * 3
    slow.keep(KEY)
    slow.dispersal.wait(PATIENCE)
    assert not slow.lines


def test_a_rank_killed_while_it_removes_says_nothing_of_lost_pieces(
    sparing: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparing.scene.exchange(KEY)
    site = sparing.sites["a"]
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    sparing.sites["b"].keep(KEY)
    sparing.sites["b"].dispersal.wait(PATIENCE)
    drop, journal = Store.drop, sparing.root / "custody-a.jsonl"
    kept = list[bytes]()

    def noted(self: Store, digest: str) -> None:
        drop(self, digest)
        kept.append(journal.read_bytes())

    monkeypatch.setattr(Store, "drop", noted)
    site.dispersal.wait(PATIENCE)
    assert whole(site) == [False] * 3
    journal.write_bytes(kept[0])  # what the disk has if the process ends after the first removal
    site.begin()
    site.dispersal.wait(PATIENCE)
    assert not site.lines


def test_a_payload_that_cannot_be_removed_is_removed_later(
    sparing: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparing.scene.exchange(KEY)
    site, drop = sparing.sites["a"], Store.drop
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    sparing.sites["b"].keep(KEY)
    sparing.sites["b"].dispersal.wait(PATIENCE)

    def refuse(self: Store, digest: str) -> None:
        raise RecordError("read-only")

    monkeypatch.setattr(Store, "drop", refuse)
    site.dispersal.wait(PATIENCE)
    monkeypatch.setattr(Store, "drop", drop)
    site.dispersal.wait(PATIENCE)
    assert whole(site) == [False] * 3


def test_the_certificate_of_a_repeated_exchange_is_that_of_its_newest_payloads(
    sparing: Town,
) -> None:
    """A resume repeats an exchange, with other sites in its set. Both have a certificate."""
    sparing.scene.exchange(KEY)
    sites = [sparing.sites[name] for name in "abc"]
    for contributors in ("abc", "ab"):
        for site in sites:
            site.keep(KEY, sites=contributors, more=[b"basis " + contributors.encode()])
        sparing.wait()
    sparing.wait()
    for site in sites:
        assert whole(site) == [False] * 3
        assert not site.store.has(sha256(b"basis ab"))


def test_a_killed_rank_removes_what_was_left_to_remove(sparing: Town) -> None:
    sparing.scene.exchange(KEY)
    site = sparing.sites["a"]
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    sparing.sites["b"].keep(KEY)
    sparing.sites["b"].dispersal.wait(PATIENCE)
    site.begin()  # after a kill: nobody told it of the certificate
    site.dispersal.wait(PATIENCE)
    assert whole(site) == [False] * 3
    assert sparing.scene.kinds().count(s.CUSTODY) == 2


def test_a_coordinator_that_dies_at_the_end_costs_no_payload(sparing: Town) -> None:
    sparing.scene.exchange(KEY)
    book = Notebook()
    site = Site(sparing, "c", book, keep_whole=False)
    book.fails = True
    site.keep(KEY)
    site.dispersal.wait(PATIENCE)
    assert whole(site) == [True] * 3
    assert len(site.lines) == 1
