"""Registry of running labs: one file per lab, by which other commands find and change it."""

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
"""Folder of the registry, accessible to its owner only. It vanishes at a reboot, like namespaces.
"""


@dataclass
class Entry:
    """The registry's entry of a running lab."""

    owner: int
    born: int
    """Start time of the owner's process, in kernel ticks, because process ids are reused."""
    hosts: list[str]
    sites: list[str]
    """Hosts whose links may be changed."""
    relayed: bool = False
    """Whether a relay delays packets. The relay limits the rates (`relay_limits`)."""
    links: Links = field(default_factory=Links)
    changes: list[tuple[float, str]] = field(default_factory=list)
    """(Unix time in seconds, new setting) of each change of the links."""

    @property
    def layout(self) -> Layout:
        """Names and addresses of the lab's parts."""
        return Layout(self.owner, tuple(self.hosts))


def enter(hosts: list[str], sites: list[str]) -> None:
    """Register a lab of this process. Raises `LabError` if the process has one already."""
    own = os.getpid()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    part = FOLDER / f".{own}.part"
    part.write_text(_to_text(Entry(own, _born(own), hosts, sites)), encoding="utf-8")
    try:
        # The link is atomic: other processes see the whole entry or none.
        os.link(part, _file(own))
    except FileExistsError:
        raise LabError(f"process {own} has a lab already; leave it first") from None
    finally:
        part.unlink()


def forget(owner: int) -> None:
    """Remove the entry of process `owner`, if there is one."""
    _file(owner).unlink(missing_ok=True)


def owners() -> list[int]:
    """Return the process ids that have an entry, of running and ended processes."""
    if not FOLDER.is_dir():
        return []
    return sorted(int(file.stem) for file in FOLDER.glob("*.json") if file.stem.isdigit())


def is_alive(owner: int) -> bool:
    """Return whether the process that made a lab under the process id `owner` is still running."""
    with contextlib.suppress(LabError, FileNotFoundError):
        return _born(owner) == read(owner).born
    return Path("/proc", str(owner)).exists()


def read(owner: int) -> Entry:
    """Return the entry of process `owner`. Raises `LabError` if there is none."""
    with _opened(owner, "r", fcntl.LOCK_SH) as file:
        return _from_text(file.read())


@contextlib.contextmanager
def changing(owner: int) -> Iterator[Entry]:
    """Yield the entry of process `owner` under an exclusive lock, and write it back at the end.

    Raises `LabError` if there is none.
    """
    with _opened(owner, "r+", fcntl.LOCK_EX) as file:
        before = file.read()
        entry = _from_text(before)
        yield entry
        file.seek(0)
        # One write, padded with spaces to the old length: a killed process leaves valid JSON.
        file.write(_to_text(entry).ljust(len(before)))


def change_links(owner: int, change: Callable[[Links], Links], what: str) -> Entry:
    """Change the links of the lab of process `owner`, and return the new entry.

    `change` returns the new links; `what` describes the change in the entry. Raises the errors of
    `change`, and `LabError` for links that are too fast for a relay; nothing has changed then. If
    the kernel refuses a part, or the caller is interrupted, some links may have changed. The entry
    then notes a failed change, and the lab's next check measures the links again.
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
    """Return the start time of a process: field 22 of its `stat`, counted after its name, which may
    hold any character."""
    text = Path("/proc", str(owner), "stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _to_text(entry: Entry) -> str:
    return json.dumps({**vars(entry), "links": entry.links.to_json()})


def _from_text(text: str) -> Entry:
    content: dict[str, Any] = json.loads(text)
    content["links"] = Links.from_json(content["links"])
    content["changes"] = [(when, what) for when, what in content["changes"]]
    return Entry(**content)
