"""Evaluates the measurements of the WAN benchmark: rows with intervals, table, verdicts.

Shares are paired: a method's tokens/s over those of the same sites without exchange in the same
block. A method of the engine is compared with the engine's own steps, a peer with the plain loop
that all peers train in. Speed-ups are over the median of the engine's `allreduce` on the same link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.wan.grid import (
    ALONE,
    BY_NAME,
    NONE,
    RATIO,
    SEQUENCE_LENGTH,
    SEQUENCES,
    SYNCHRONOUS,
    synchronous_bits,
)
from dilocox.tools.testbed.link_spec import show_rate

Row = dict[str, Any]
Place = tuple[int, int]
"""A link: number of sites, and ratio."""
MOST_OF_ALLREDUCE = 0.003
"""Largest share that synchronous training may keep at the link where `dilocox` is judged."""
LEAST_SHARE, LEAST_LOW, AIM_SHARE = 0.97, 0.95, 0.99
LEAST_SPEEDUP, AIM_SPEEDUP = 323.0, 357.0
TOKENS = SEQUENCES * SEQUENCE_LENGTH
"""Tokens per step, of all sites together."""


def places(runs: Sequence[Row]) -> list[Place]:
    """Return the links in the order of their measurement."""
    return list(dict.fromkeys((run["sites"], run["ratio"]) for run in runs))


def rows(runs: Sequence[Row], parameters: int) -> list[Row]:
    """Return one row per method and link, from one measurement per block, in the grid's order.

    A link without a measurement of no exchange has no rows.
    """
    found = []
    for place in places(runs):
        inside = [run for run in runs if (run["sites"], run["ratio"]) == place]
        names = [NONE, ALONE, *BY_NAME]
        methods = sorted({run["method"] for run in inside}, key=names.index)
        if NONE in methods:
            found += [_row(inside, method, parameters) for method in methods]
    return found


def _row(inside: Sequence[Row], method: str, parameters: int) -> Row:
    """Return the row of a method at one link."""
    own = [run for run in inside if run["method"] == method]
    first, speed = own[0], [run["tokens_per_second"] for run in own]
    sites, link = first["sites"], statistics.median(run["link_bits_per_second"] for run in inside)
    computing = TOKENS / median_speed([run for run in inside if run["method"] == NONE])
    found = {
        "method": method,
        "link": show_rate(first["link_asked_bits_per_second"]),
        "sites": sites,
        "tokens_per_second": round(statistics.median(speed), 2),
        **interval("share_of_no_network", shares(inside, own), 5),
        **interval("speedup_vs_allreduce", _speedups(inside, speed), 2),
        "payload_bytes": _median(own, "payload_bytes", 0),
        "wire_bytes": _median(own, "wire_bytes", 0),
        "efficiency": _median(_with_efficiency(inside, own), "efficiency", 3),
        "comm_to_compute": round(synchronous_bits(parameters, sites) / link / computing, 1),
        "inner_steps": _median(own, "inner_steps", 1),
        "wait_share": _median(own, "wait_share", 4),
        "work_share": _median(own, "work_share", 4),
        "step_ms": round(1000 * computing, 2),
        "round_trip_ms": _median(own, "round_trip_ms", 2),
        "congestion": _all(own, "congestion"),
        "dates": _all(own, "date"),
        "commits": _all(own, "commit"),
        "ratio": first["ratio"],
        "blocks": len(own),
        "plan": own[-1].get("plan"),
        "reason": own[-1].get("reason"),
    }
    return found


def shares(inside: Sequence[Row], own: Sequence[Row]) -> list[float]:
    """Return the speed of each measurement of `own` over the speed without exchange.

    Empty if nothing was measured without exchange.
    """
    speeds = reference_speeds(inside, own)
    return [run["tokens_per_second"] / speed for run, speed in zip(own, speeds, strict=False)]


def reference_speeds(inside: Sequence[Row], own: Sequence[Row]) -> list[float]:
    """Return the tokens/s without exchange for each measurement of `own`.

    A measurement is compared with the reference in its block, or else with the median of all
    blocks. Empty if nothing was measured without exchange.
    """
    without = reference(own[0]["method"])
    by_block = {r["block"]: r["tokens_per_second"] for r in inside if r["method"] == without}
    if not by_block:
        return []
    middle = statistics.median(by_block.values())
    return [by_block.get(run["block"], middle) for run in own]


def _with_efficiency(inside: Sequence[Row], own: Sequence[Row]) -> Sequence[Row]:
    """Return the measurements of `own` with their efficiency.

    The engine measures the time of its payloads. A peer's payloads are assumed to travel in the
    time beyond its steps, by the loop of the peers. A peer that exchanges beside its steps has
    none.
    """
    method = BY_NAME.get(own[0]["method"])
    if method is None or method.kind == "engine":
        return own
    speeds = [] if method.overlaps else reference_speeds(inside, own)
    return [
        {**run, "efficiency": peer_efficiency(run, TOKENS / speed)}
        for run, speed in zip(own, speeds, strict=False)
    ]


def peer_efficiency(run: Row, step_seconds: float) -> float | None:
    """Return payload bits over the capacity of the link in the time beyond the steps.

    A step takes `step_seconds`. None if there is no such time.
    """
    exchanging = run["seconds"] - run["steps"] * step_seconds
    payload = run["payload_bytes"] * run["steps"] / run["inner_steps"]
    return payload * 8 / (run["link_bits_per_second"] * exchanging) if exchanging > 0 else None


def reference(method: str) -> str:
    """Return the reference whose speed a method's speed is compared with."""
    if method in BY_NAME:
        return ALONE if BY_NAME[method].kind == "peer" else NONE
    return method


def _speedups(inside: Sequence[Row], speed: Sequence[float]) -> list[float]:
    if not any(run["method"] == SYNCHRONOUS for run in inside):
        return []
    base = median_speed([run for run in inside if run["method"] == SYNCHRONOUS])
    return [value / base for value in speed]


def interval(name: str, values: Sequence[float], digits: int) -> Row:
    """Return the median, and the interval if there are two or more values."""
    if not values:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    known = common.median_interval(values)
    low, high = (round(end, digits) for end in (known.low, known.high))
    several = len(values) > 1
    return {
        name: round(known.median, digits),
        f"{name}_low": low if several else None,
        f"{name}_high": high if several else None,
    }


def _median(own: Sequence[Row], key: str, digits: int) -> float | int | None:
    values = [run[key] for run in own if run.get(key) is not None]
    if not values:
        return None
    found = round(statistics.median(values), digits)
    return int(found) if digits == 0 else found


def _all(own: Sequence[Row], key: str) -> str:
    """Return the different values of a field. Measurements before 24 November 2026 may lack it."""
    return ", ".join(sorted({str(run.get(key) or "not noted") for run in own}))


def table(known: Sequence[Row]) -> str:
    """Return the rows as text."""
    return common.table(
        known,
        {
            "method": "s",
            "link": "s",
            "sites": "d",
            "round_trip_ms": ".2f",
            "comm_to_compute": ",.1f",
            "inner_steps": ",.0f",
            "tokens_per_second": ",.1f",
            "share_of_no_network": ".2%",
            "share_of_no_network_low": ".2%",
            "share_of_no_network_high": ".2%",
            "speedup_vs_allreduce": ",.1f",
            "payload_bytes": ",d",
            "wire_bytes": ",d",
            "efficiency": ".0%",
            "wait_share": ".1%",
            "work_share": ".1%",
            "blocks": "d",
        },
    )


def verdicts(known: Sequence[Row]) -> list[str]:
    """Return lines with each aim and whether it was reached, and the loss of speed of `dilocox` at
    other links."""
    said = []
    for row in known:
        name = row["method"]
        if name not in BY_NAME or not BY_NAME[name].adapts:
            continue
        where = f"{row['sites']} sites, {row['link']} ({row['comm_to_compute']:,.0f}x)"
        share, low = row["share_of_no_network"], row["share_of_no_network_low"]
        sync = next((r for r in known if _same_link(r, row) and r["method"] == SYNCHRONOUS), None)
        if row["ratio"] == RATIO and sync is not None:
            kept, gain = sync["share_of_no_network"], row["speedup_vs_allreduce"]
            said += [
                f"{where}: {SYNCHRONOUS} keeps {kept:.2%} of the no-network speed, "
                f"{_met(kept <= MOST_OF_ALLREDUCE)} at most {MOST_OF_ALLREDUCE:.1%}",
                f"{where}: {name} keeps {share:.1%}, {_met(share >= LEAST_SHARE)} "
                f"{LEAST_SHARE:.0%} or more (aim {AIM_SHARE:.0%})",
                f"{where}: {name}, the interval's lower bound is "
                + (f"{low:.1%}, {_met(low >= LEAST_LOW)} {LEAST_LOW:.0%}" if low else "not known"),
                f"{where}: {name}, {gain:,.0f} times {SYNCHRONOUS}, {_met(gain >= LEAST_SPEEDUP)} "
                f"{LEAST_SPEEDUP:.0f} (published: {AIM_SPEEDUP:.0f})",
            ]
        else:
            said.append(f"{where}: {name} keeps {share:.1%}")
        said.append(f"{where}: {name}, {row['plan']}: {row['reason']}")
    return said


def _same_link(one: Row, other: Row) -> bool:
    return (one["sites"], one["ratio"]) == (other["sites"], other["ratio"])


def _met(reached: bool) -> str:
    return "which meets" if reached else "which MISSES"


def median_speed(runs: Sequence[Row]) -> float:
    """Return the median of the measurements' tokens/s."""
    return float(statistics.median(run["tokens_per_second"] for run in runs))
