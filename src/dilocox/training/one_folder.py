"""Sites that write to one run folder: which they are, and which of them writes for all.

`dilocox train` starts all sites in one folder. Sites that join by themselves note it in a journal
of their own in their run folder. So a site that joins beside the coordinator, in the coordinator's
run folder, knows whether other sites do so, too.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dilocox.coordinator.protocol.messages import SiteStatus
from dilocox.coordinator.protocol.site_reports import JOURNALS
from dilocox.utils.json_lines import read_json_lines
from dilocox.utils.processes import may_live


def joined_here(folder: Path, names: Iterable[str], me: str) -> list[str]:
    """Return site `me` and those of the sites `names` that write to the run folder `folder`.

    A site that has left the run may have joined again from elsewhere, so it does not count. A site
    that has finished the run counts.
    """
    return [name for name in names if name == me or _last(folder, name).writes]


def living_beside(folder: Path, names: Iterable[str], me: str) -> list[str]:
    """Return those of the sites `names`, without `me`, that now train on this machine.

    Only sites that have joined from the run folder `folder` are known.
    """
    return [name for name in names if name != me and _last(folder, name).trains_here]


def part_in_the_end(
    sites: Iterable[SiteStatus], members: Iterable[str], me: str
) -> Literal["speaks", "waits", "listens"]:
    """Return the part of site `me` in the end of the run, after the flush.

    "speaks": the site evaluates, and publishes for all sites. This is the first of the members
    that is still active. A site that was overtaken in the flush has to enter again, and is not
    active meanwhile.
    "waits": an earlier member is active, and may be lost before it has finished.
    "listens": an earlier member has finished, or `me` is not active: there is nothing to do.

    Args:
        sites: The sites as the coordinator knows them.
        members: Members of the flush in the order of the plan, with `me`: all, or those that
            write to one run folder.
        me: The site.
    """
    roles = {site.site: site.role for site in sites}
    before = [roles[name] for name in itertools.takewhile(lambda name: name != me, members)]
    if roles[me] != "active" or "finished" in before:
        return "listens"
    return "waits" if "active" in before else "speaks"


@dataclass(frozen=True)
class _Last:
    """What the journal of a site says last of its process."""

    host: str = ""
    """Machine of the process; empty: the journal names no process."""
    process: int = 0
    code: int | None = None
    """Exit code of the process; None: it has not ended, or not by itself."""

    @property
    def trains_here(self) -> bool:
        """Whether the process lives on this machine."""
        here = self.host == socket.gethostname() and self.process > 0
        return here and self.code is None and may_live(self.host, self.process)

    @property
    def writes(self) -> bool:
        """Whether the process writes to the run folder, or has finished the run there."""
        goes_on = self.code is None and self.host != "" and may_live(self.host, self.process)
        return goes_on or self.code == 0


def _last(folder: Path, site: str) -> _Last:
    """Read the journal of `site`. Damaged lines do not count."""
    found = _Last()
    try:
        lines = read_json_lines(folder / JOURNALS.replace("*", site))
    except OSError:
        return found
    for line in lines:
        if '"joined"' not in line and '"ended"' not in line:
            continue  # most lines are those of rounds
        try:
            record = json.loads(line)
            if record["kind"] == "joined":
                found = _Last(str(record["host"]), int(record["process"]))
            elif record["kind"] == "ended":
                found = replace(found, code=int(record["code"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found
