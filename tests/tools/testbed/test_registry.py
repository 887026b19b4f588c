"""The list of labs that are going on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.lab_needs import needs_linux

from dilocox.tools.testbed import registry
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Line, Links

pytestmark = [pytest.mark.alone, needs_linux]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "labs")
    return tmp_path / "labs"


def test_an_entry_is_found_until_it_is_forgotten(folder: Path) -> None:
    own = os.getpid()
    registry.enter(["paris", "hub"], ["paris"])
    assert registry.owners() == [own]
    assert registry.is_alive(own)
    assert registry.read(own).hosts == ["paris", "hub"]
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(LabError, match="has a lab already"):
        registry.enter(["lyon"], ["lyon"])
    registry.forget(own)
    assert registry.owners() == []
    with pytest.raises(LabError, match=f"process {own} has no lab"):
        registry.read(own)
    assert [entry.name for entry in folder.iterdir()] == []


def test_what_is_changed_is_written_once_it_is_whole() -> None:
    own = os.getpid()
    registry.enter(["paris"], ["paris"])
    with registry.changing(own) as entry:
        entry.links = Links({"paris": Line(1e6, 2e6)}, {("lyon", "paris"): 5e5})
        entry.changes.append((12.5, "paris=1mbit"))
    found = registry.read(own)
    assert found.links.line("paris") == Line(1e6, 2e6)
    assert found.changes == [(12.5, "paris=1mbit")]
    with pytest.raises(LabError, match="tc refused"):
        _change_in_vain(own)
    assert registry.read(own).changes == [(12.5, "paris=1mbit")]


def _change_in_vain(owner: int) -> None:
    with registry.changing(owner) as entry:
        entry.changes.append((13.0, "lost"))
        raise LabError("tc refused")


def test_a_change_is_made_of_the_links_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands at a time: the second knows what the first has changed meanwhile."""
    own, sites = os.getpid(), ["lyon", "paris"]
    monkeypatch.setattr(registry, "apply", lambda *_: None)
    registry.enter(sites, sites)
    for setting in ("paris=1mbit", "lyon=2mbit"):
        registry.change_links(own, lambda links, s=setting: links.changed([s], sites), setting)
    found = registry.read(own)
    assert (found.links.line("paris").up, found.links.line("lyon").up) == (1e6, 2e6)
    assert [what for _, what in found.changes] == ["paris=1mbit", "lyon=2mbit"]


def test_a_change_that_fails_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some links may have changed: what was known of them counts no longer."""

    def refused(*_: object) -> None:
        raise LabError("tc refused")

    own = os.getpid()
    registry.enter(["paris"], ["paris"])
    monkeypatch.setattr(registry, "apply", refused)
    with pytest.raises(LabError, match="tc refused"):
        registry.change_links(own, lambda _: Links({"paris": Line(1e6, 1e6)}), "paris=1mbit")
    found = registry.read(own)
    assert not found.links.shaped
    assert [what for _, what in found.changes] == ["paris=1mbit (failed)"]
    with pytest.raises(LabError, match="no such site"):
        registry.change_links(own, _refuse, "x=1mbit")
    assert len(registry.read(own).changes) == 1


def _refuse(_: Links) -> Links:
    raise LabError("no such site")


def test_a_process_number_that_is_used_again_is_another_process() -> None:
    own = os.getpid()
    registry.enter(["paris"], ["paris"])
    with registry.changing(own) as entry:
        entry.born -= 1
    assert not registry.is_alive(own)


def test_a_process_without_an_entry_is_alive_while_it_is_there() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not registry.is_alive(child)
    assert registry.is_alive(os.getpid())
