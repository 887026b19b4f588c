"""The labs that are going on: one small file each, so that other commands find and change them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from dilocox.tools.testbed.addressing import Layout
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Links
from dilocox.tools.testbed.relay_limits import check_relayed
from dilocox.tools.testbed.shaping import apply

FOLDER = Path("/run/dilocox-lab")
"""Owner's only; goes with the machine's next start, like the namespaces."""


@dataclass
class Entry:
    """What is known about a lab that is going on."""

    owner: int
    born: int
    """When its process started, in the kernel's ticks: process numbers are used again."""
    hosts: list[str]
    sites: list[str]
    """Those of the hosts whose links may be changed."""
    relayed: bool = False
    """A relay delays packets, which cannot carry any rate."""
    links: Links = field(default_factory=Links)
    changes: list[tuple[float, str]] = field(default_factory=list)
    """When (seconds since 1970) links were changed while the lab went on, and to what."""

    @property
    def layout(self) -> Layout:
        """Names and addresses of its parts."""
        return Layout(self.owner, tuple(self.hosts))


def enter(hosts: list[str], sites: list[str]) -> None:
    """This process has a lab from now on. Raises `LabError` if it has one already."""
    own = os.getpid()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    part = FOLDER / f".{own}.part"
    part.write_text(_to_text(Entry(own, _born(own), hosts, sites)), encoding="utf-8")
    try:
        # Others see the whole entry or none.
        os.link(part, _file(own))
    except FileExistsError:
        raise LabError(f"process {own} has a lab already; leave it first") from None
    finally:
        part.unlink()


def forget(owner: int) -> None:
    """Process `owner` has no lab any more."""
    _file(owner).unlink(missing_ok=True)


def owners() -> list[int]:
    """Process numbers with an entry, of living and dead processes."""
    if not FOLDER.is_dir():
        return []
    return sorted(int(file.stem) for file in FOLDER.glob("*.json") if file.stem.isdigit())


def is_alive(owner: int) -> bool:
    """The process that made something under this number is still there."""
    with contextlib.suppress(LabError, FileNotFoundError):
        return _born(owner) == read(owner).born
    return Path("/proc", str(owner)).exists()


def read(owner: int) -> Entry:
    """The entry of process `owner`. Raises `LabError` if there is none."""
    with _opened(owner, "r", fcntl.LOCK_SH) as file:
        return _from_text(file.read())


@contextlib.contextmanager
def changing(owner: int) -> Iterator[Entry]:
    """The entry of process `owner`, alone; what was changed in it is written at the end.

    Raises `LabError` if there is none.
    """
    with _opened(owner, "r+", fcntl.LOCK_EX) as file:
        before = file.read()
        entry = _from_text(before)
        yield entry
        file.seek(0)
        # In one go, with spaces over what was longer: a process that is killed leaves valid JSON.
        file.write(_to_text(entry).ljust(len(before)))


def change_links(owner: int, change: Callable[[Links], Links], what: str) -> Entry:
    """Give the lab of process `owner` what `change` makes of its links; its entry after that.

    The change is noted as `what`. Raises `LabError`, and what `change` raises, with everything as
    before, also for links that are faster than the relay of a delay. If the kernel refuses a part,
    or the caller is interrupted, some links may have changed: that is noted too, and the lab's own
    next check finds those that have.
    """
    with changing(owner) as entry:
        links = change(entry.links)
        if entry.relayed:
            check_relayed(links, entry.sites)
        failure: BaseException | None = None
        try:
            apply(entry.layout, entry.links, links)
            entry.links = links
        except BaseException as error:
            failure, what = error, f"{what} (failed)"
        entry.changes.append((time.time(), what))
    if failure is not None:
        raise failure
    return entry


@contextlib.contextmanager
def _opened(owner: int, mode: str, lock: int) -> Iterator[TextIO]:
    try:
        file = open(_file(owner), mode, encoding="utf-8")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        raise LabError(f"process {owner} has no lab") from None
    with file:
        fcntl.flock(file, lock)
        yield cast(TextIO, file)


def _file(owner: int) -> Path:
    return FOLDER / f"{owner}.json"


def _born(owner: int) -> int:
    """Field 22 of the process's `stat`, behind its name, which may hold anything."""
    text = Path("/proc", str(owner), "stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _to_text(entry: Entry) -> str:
    return json.dumps({**vars(entry), "links": entry.links.to_json()})


def _from_text(text: str) -> Entry:
    content: dict[str, Any] = json.loads(text)
    content["links"] = Links.from_json(content["links"])
    content["changes"] = [(when, what) for when, what in content["changes"]]
    return Entry(**content)
