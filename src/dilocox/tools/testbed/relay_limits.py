"""Limits of the relay of `dilocox.tools.testbed.delay`, and a check of links against them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Links, least, show_rate

FASTEST = 100e6
"""Bits per second that the relay can carry for one site."""
FASTEST_IN_ALL = 200e6
"""Bits per second that the relay can carry for all sites together. The relay takes a sixth of a
core per 100 Mbit/s."""


def sends(links: Links, site: str, sites: Sequence[str]) -> float | None:
    """Return the bits per second that `site` can send to all other `sites`. None: unlimited."""
    paths = [links.path(site, other) for other in sites if other != site]
    limited = [rate for rate in paths if rate is not None]
    together = sum(limited) if len(limited) == len(paths) else None
    return least(links.line(site).up, together)


def check_relayed(links: Links, sites: Sequence[str]) -> None:
    """Raise `LabError` if `links` allow more traffic than the relay can carry.

    The limits hold for what each site can send, for every downlink, and for all sites together.
    The coordinator's host is unlimited, but sends hardly anything.
    """
    up = [math.inf if (rate := sends(links, site, sites)) is None else rate for site in sites]
    down = [rate for site in sites if (rate := links.line(site).down) is not None]
    if max([*up, *down]) > FASTEST or sum(up) > FASTEST_IN_ALL:
        raise LabError(
            f"delay: this kernel has no netem, and the relay carries {show_rate(FASTEST)} per site "
            f"and {show_rate(FASTEST_IN_ALL)} in total; choose slower links (--link, --links) or "
            "no delay"
        )
