"""Payloads that `verify` takes from pieces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError, Store, Stores, piece_path
from dilocox.record.log.digests import sha256
from dilocox.record.pieces import erasure
from dilocox.record.verify import rebuilt_payloads as module
from dilocox.record.verify.rebuilt_payloads import rebuilt_payloads
from dilocox.record.verify.run_history import RunHistory
from tests.support.dispersed import NEXT, Town, payload
from tests.support.record_scene import KEY, Scene, own_digest


@pytest.fixture
def town(tmp_path: Path) -> Town:
    """Two exchanges, one with a basis beside its payloads; stores have pieces alone."""
    town = Town(tmp_path)
    for key, more in ((KEY, [b"basis"]), (NEXT, [])):
        town.scene.exchange(key)
        for site in town.sites.values():
            site.keep(key, more=more)
    town.wait()
    for site in "abc":
        shutil.rmtree(town.root / site / "sha256")
    return town


def stores(town: Town, course: RunHistory, sites: str) -> Stores:
    places = town.stores(sites)
    found = Stores([Store(each) for each in places])
    found.besides = rebuilt_payloads(course, places)
    return found


def test_every_payload_is_there_and_the_basis_after_one_of_them(town: Town) -> None:
    found = stores(town, town.scene.course(), "ac")
    assert not found.has(sha256(b"basis")), "its exchange is not known yet"
    for key in (KEY, NEXT):
        for site in "abc":
            assert found.has(own_digest(site, key))
            assert found.get(own_digest(site, key)) == payload(site, key)
    assert found.get(sha256(b"basis")) == b"basis"


def test_few_cuts_stay_in_memory(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", 1)
    found = stores(town, town.scene.course(), "ab")
    for _ in range(2):
        for key in (KEY, NEXT):
            assert found.get(own_digest("a", key)) == payload("a", key)
    assert isinstance(found.besides, module.RebuiltPayloads)
    assert len(found.besides._cached) == 1


def test_too_few_pieces_are_missing_payloads(town: Town) -> None:
    found = stores(town, town.scene.course(), "b")
    assert not found.has(own_digest("a"))
    with pytest.raises(MissingError, match=r"2 pieces are needed, 1 are there \(b\)"):
        found.get(own_digest("a"))
    with pytest.raises(MissingError, match=r"in none of [^;]*$"):
        found.get("0" * 64)


def test_without_the_package_payloads_are_missing(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stores(town, town.scene.course(), "abc")
    monkeypatch.setattr(erasure, "is_installed", lambda: False)
    with pytest.raises(MissingError, match="pip install"):
        found.get(own_digest("a"))


def test_pieces_of_other_payloads_are_a_fail_that_names_the_signers(town: Town) -> None:
    course = town.scene.course()
    ((named, sites),) = course.custody.signed[f"{KEY.text}#0"].items()
    ((other, _),) = course.custody.signed[f"{NEXT.text}#0"].items()
    content, wrong = named.split(" ")[0], other.split(" ")[1]
    course.custody.signed[f"{KEY.text}#0"] = {f"{content} {wrong}": sites}
    with pytest.raises(RecordError, match=r"of other payloads.*signed by a, b, c") as raised:
        stores(town, course, "abc").get(own_digest("a"))
    assert not isinstance(raised.value, MissingError)


def test_a_root_that_one_site_alone_has_signed_makes_nothing_fail(town: Town) -> None:
    course = town.scene.course()
    ((named, _),) = course.custody.signed[f"{KEY.text}#0"].items()
    ((other, _),) = course.custody.signed[f"{NEXT.text}#0"].items()
    content, wrong = named.split(" ")[0], other.split(" ")[1]
    course.custody.signed[f"{KEY.text}#0"] = {f"{content} {wrong}": ["b"]}
    with pytest.raises(MissingError, match="signed by b"):
        stores(town, course, "abc").get(own_digest("a"))


def test_a_wrong_piece_of_one_store_is_replaced_by_another(town: Town) -> None:
    course = town.scene.course()
    root = town.scene.notary.memory.custody.certified(KEY.text, 0, 2)
    assert root is not None
    path = town.root / "a" / piece_path(root, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert stores(town, course, "abc").get(own_digest("c")) == payload("c", KEY)


def test_a_run_without_pieces_has_nothing_beside_its_stores(scene: Scene) -> None:
    assert rebuilt_payloads(scene.course(), []) is None
