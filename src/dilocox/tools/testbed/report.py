"""Describes a lab and a run in it, as lines of text and as plain values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dilocox.tools.testbed.link_spec import show_rate
from dilocox.tools.testbed.results import RunResult
from dilocox.tools.testbed.testbed import Checked, Lab
from dilocox.utils.formatting import number, size

LITTLE = 0.9
"""Least share of its CPU quota that a site must get in the check before a run."""


def describe_lab(lab: Lab, checked: Checked) -> list[str]:
    """Return lines about quotas, links and round trips, as they were measured."""
    cores = len(os.sched_getaffinity(0))
    got = ", ".join(f"{site} {share:.2f}" for site, share in checked.cores.items())
    lines = [
        f"lab               {len(lab.sites)} sites with {lab.quota:.3g} of {cores} CPU cores each "
        f"(a busy loop got: {got}); the coordinator has a host of its own without limits"
    ]
    short = [site for site, share in checked.cores.items() if share < LITTLE * lab.quota]
    if short:
        lines.append(
            f"attention         {', '.join(short)} got less than {LITTLE:.0%} of the quota: "
            "something else is running on this machine, figures will be too low"
        )
    lines += link_lines(checked)
    lines.append(f"round trip        {round_trip(checked)}{_how_delayed(lab)}")
    return lines


def link_lines(checked: Checked) -> list[str]:
    """Return one line per shaped link, with its requested and its measured rate."""
    if not checked.links:
        return ["links             not shaped"]
    lines = ["link                            asked for      measured"]
    for link in checked.links:
        asked, found = link.asked_bits_per_second, link.bits_per_second
        lines.append(
            f"  {link.link:<26} {show_rate(asked):>12}  {show_rate(found):>12}  {link.off_by:+.1%}"
        )
    return lines


def _how_delayed(lab: Lab) -> str:
    if lab.delay is None:
        return ""
    how = "a relay in user space" if lab.delay.relayed else "netem"
    return f"; {lab.delay.seconds * 1e3:g} ms each way by {how}"


def round_trip(checked: Checked) -> str:
    """Return the round trip as text, such as `0.05 ms`, with its range over pairs of sites."""
    every = list(checked.round_trips.values())
    if not every:
        return "none, there is one site"
    text = f"{checked.round_trip * 1e3:.2f} ms between sites, links idle"
    if len(every) > 1:
        text += f" ({min(every) * 1e3:.2f} to {max(every) * 1e3:.2f})"
    return text


def describe_run(result: RunResult, checked: Checked) -> list[str]:
    """Return the lines of a table about speed and bytes of a run."""
    window = result.window
    lines = [
        f"speed             {number(result.tokens_per_second)} tokens/s over rounds "
        f"{window.first} to {window.last} ({window.seconds:.1f} s), "
        f"round trip {checked.round_trip * 1e3:.2f} ms",
        "                    whole run                           per measured round",
        "  site               payload  wire sent  received  payload      wire  tokens/s  waited",
    ]
    for name, site in result.sites.items():
        lines.append(
            f"  {name:<16} {size(site.payload_bytes):>9}  {size(site.wire_sent_bytes):>9} "
            f"{size(site.wire_received_bytes):>9} {size(site.payload_per_round):>8} "
            f"{size(site.wire_per_round):>9} {number(site.tokens_per_second):>9} "
            f"{site.wait_share:>7.1%}"
        )
    exchange, control = size(result.exchange_wire_bytes), size(result.control_bytes)
    beyond = f", {result.overhead:.1%} more" if result.payload_bytes else ""
    lines.append(
        f"between sites     {size(result.payload_bytes)} of payload, {exchange} on the wire{beyond}"
    )
    lines.append(
        f"with coordinator  {control} on the wire, both ways; "
        f"{size(result.control_per_round)} of what a site sends in a measured round"
    )
    return lines


def plain(lab: Lab, checked: Checked, result: RunResult, changes: Sequence[str]) -> dict[str, Any]:
    """Return everything that is printed as plain values, in bits, bytes and seconds.

    `changes`: texts about links that were changed during the run.
    """
    return {
        "run": result.name,
        "method": result.method,
        "sites": {name: vars(site) for name, site in result.sites.items()},
        "tokens_per_second": result.tokens_per_second,
        "rounds_measured": [result.window.first + 1, result.window.last + 1],
        "seconds_measured": result.window.seconds,
        "payload_bytes": result.payload_bytes,
        "exchange_wire_bytes": result.exchange_wire_bytes,
        "control_bytes": result.control_bytes,
        "control_per_round": result.control_per_round,
        "quota_cores": lab.quota,
        "quota_measured_cores": checked.cores,
        "links": [{**vars(link), "off_by": link.off_by} for link in checked.links],
        "link_changes": list(changes),
        "round_trip_seconds": {"-".join(pair): s for pair, s in checked.round_trips.items()},
        "delay_seconds": lab.delay.seconds if lab.delay else 0.0,
        "delay_by": None if lab.delay is None else "relay" if lab.delay.relayed else "netem",
        "summary": result.summary,
    }
