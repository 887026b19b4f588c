"""Devices and links of sites, from options of `dilocox plan`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dilocox.errors import ConfigError

if TYPE_CHECKING:
    from dilocox.tools.planner.hardware_table import GpuPlacement, HardwareTable, Link


def at_sites(
    options: argparse.Namespace,
    table: HardwareTable,
    gpus: Sequence[str],
    links: Sequence[str],
    count: int,
) -> tuple[list[GpuPlacement], list[Link]]:
    """Return the devices and the link of each of `count` sites, as the options say.

    `gpus` and `links`: in the form of `--gpu` and `--link`, one or `count` of each. Raises
    `ConfigError` for a value that cannot be used, or another number of them.
    """
    from dilocox.tools.planner.hardware_table import GIB, LONGEST_MS

    for name, given in (("--gpu", gpus), ("--link", links), ("--rent", options.rent)):
        if len(given) not in (0, 1, count):
            raise ConfigError(
                f"{name} is given {len(given)} times: give it once, or once for each of the "
                f"{count} sites"
            )
    share = options.utilisation
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"--utilisation {share:g}: give a share above 0 and up to 1")
    rents = [("--rent", usd) for usd in options.rent]
    egress = [("--egress", options.egress), ("--compare", options.compare)]
    for name, value in (("--rtt", options.rtt), *egress, *rents):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name} {value:g}: give a number of at least 0")
    if options.rtt is not None and options.rtt > LONGEST_MS:
        raise ConfigError(
            f"--rtt {options.rtt:g}: a round trip is at most a day; give milliseconds"
        )
    memory = options.host_memory
    # The product is checked: a finite number of GiB may be an infinite number of bytes.
    if memory is not None and not (memory > 0 and math.isfinite(memory * GIB)):
        raise ConfigError(f"--host-memory {memory:g}: give a number of GiB above 0, such as 256")
    rtt = None if options.rtt is None else options.rtt / 1000
    size = None if memory is None else int(memory * GIB)
    places = [table.place(text, share, size) for text in gpus]
    every = [table.link(text, rtt, options.egress) for text in links or ["1gbit"]]
    return (
        places * (count if len(places) == 1 else 1),
        every * (count if len(every) == 1 else 1),
    )
