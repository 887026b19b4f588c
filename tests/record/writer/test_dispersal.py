"""A site's part: it cuts beside training, signs once a round, and survives what fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dilocox.coordinator.client.errors import CoordinatorUnreachableError
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import piece_path
from dilocox.record.log.custody import Custody
from dilocox.record.log.digests import sha256
from dilocox.record.pieces.piece import Piece
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

    def custody(self, statement: str, asked: Sequence[str]) -> Mapping[str, str]:
        assert self.free.wait(PATIENCE)
        if self.fails:
            raise CoordinatorUnreachableError("the coordinator does not answer")
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


def test_an_exchange_without_payloads_is_not_cut(town: Town) -> None:
    site = town.sites["a"]
    site.dispersal.stored(KEY, 0, [])
    site.dispersal.wait(PATIENCE)
    assert not book(site).statements
