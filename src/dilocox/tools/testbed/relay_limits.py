"""What the relay of `dilocox.tools.testbed.delay` can carry, and links that ask for more; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Links, least, show_rate

FASTEST = 100e6
"""Bits per second that the relay carries of one site."""
FASTEST_IN_ALL = 200e6
"""The same of all sites together. It takes a sixth of a core per 100 Mbit/s."""


def sends(links: Links, site: str, sites: Sequence[str]) -> float | None:
    """Bits per second that `site` can send to all other `sites`; none if nothing limits it."""
    paths = [links.path(site, other) for other in sites if other != site]
    limited = [rate for rate in paths if rate is not None]
    together = sum(limited) if len(limited) == len(paths) else None
    return least(links.line(site).up, together)


def check_relayed(links: Links, sites: Sequence[str]) -> None:
    """Raise `LabError` for links on which sites can send more than the relay carries, or that it
    cannot fill while they are measured.

    The coordinator's host, which nothing limits, sends next to nothing.
    """
    up = [math.inf if (rate := sends(links, site, sites)) is None else rate for site in sites]
    down = [rate for site in sites if (rate := links.line(site).down) is not None]
    if max([*up, *down]) > FASTEST or sum(up) > FASTEST_IN_ALL:
        raise LabError(
            f"delay: this kernel has no netem, and the relay carries {show_rate(FASTEST)} per site "
            f"and {show_rate(FASTEST_IN_ALL)} in all; choose slower links (--link, --links) or no "
            "delay"
        )
