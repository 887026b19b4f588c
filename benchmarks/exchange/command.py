"""Measures the share of a shaped link that exchanges use, between two, four and eight sites.

The engine's own exchange (coordinator, votes, groups, codecs, payloads) runs between network
namespaces without a model. Every site contributes random numbers, and computes nothing between
exchanges (`benchmarks.exchange.engine`). `tc` shapes the links, which are measured first; if a link
is off by more than 5 %, nothing is reported.

Figures are medians over rounds. `efficiency` is the payload bits on the busiest link over its
capacity while payloads travelled. `whole` is the same over the whole exchange, from the boundary to
the average, votes and codecs included. The burst that the shaper lets through after a pause (10 ms)
counts as capacity. Headers of Ethernet, IP and TCP take 4.4 %. `payloads` is the number of payloads
that a site sends: D - 1 with `gather`, 2(D - 1)/D with `reduce`. Several fragments are contributed
together, as on a fully used link. Stages share a site's link: `first_stage` is the share of the
exchange after which the first stage has its averages at all sites; it is 100 % if the stages end
together.

All cases take some ten minutes, --quick four.

Needs root and iproute2; without them it prints one line and exits with code 3.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.exchange.engine import HUB, Case, Turn, run_case
from dilocox.compression import Geometry, compressor, frame_bytes
from dilocox.tools.testbed import LabError, Network, unsupported_reason, verify_links, watchdog
from dilocox.tools.testbed.link_spec import Line, Links
from dilocox.utils import chrome_trace

BURST_SECONDS = 0.010
"""Seconds of data that the shapers of dilocox.tools.testbed let through at once after a pause."""
MBIT = 1e6
EVEN = "cubic"
"""Congestion control that shares links evenly; the machine's own is measured too."""
INT4 = 4 / 8 + 2 / 128
"""Bytes per value of int4."""


@dataclass(frozen=True)
class Setting:
    """A case and its links, in Mbit/s. `slow` is the rate of the last site's line; None: as the
    others."""

    sites: int
    mode: str
    codec: str
    megabytes: float
    """Payload of one fragment, in MB."""
    up: float
    down: float
    fragments: int = 1
    stages: int = 1
    slow: float | None = None
    congestion: str | None = None

    def case(self, rounds: int) -> Case:
        """Return the case that the engine runs."""
        values = int(self.megabytes * 1e6 / (4.0 if self.codec == "none" else INT4)) // 128 * 128
        return Case(
            tuple(f"site{number}" for number in range(self.sites)),
            self.mode,
            self.codec,
            values,
            self.fragments,
            self.stages,
            rounds,
            self.congestion,
        )

    def lines(self) -> dict[str, Line]:
        """Return the access line of each site, in bits per second."""
        names = [f"site{number}" for number in range(self.sites)]
        found = {name: Line(self.up * MBIT, self.down * MBIT) for name in names}
        if self.slow is not None:
            found[names[-1]] = Line(self.slow * MBIT, self.slow * MBIT)
        return found

    @property
    def link(self) -> str:
        """Text for the table: `50`, `20/100` (up/down), `100, one 20`."""
        text = f"{self.up:g}" if self.up == self.down else f"{self.up:g}/{self.down:g}"
        return text if self.slow is None else f"{text}, one {self.slow:g}"


def settings(quick: bool, default: str) -> list[Setting]:
    """Return the settings to measure. `default`: the machine's congestion control."""
    chosen = [None] if default == EVEN else [None, EVEN]
    two = [
        Setting(2, "gather", codec, size, 100, 100, fragments=fragments, congestion=each)
        for codec, size, fragments in (("none", 4.0, 1), ("int4", 2.0, 1), ("int4", 1.2, 4))
        for each in chosen
    ]
    four = [
        Setting(4, mode, codec, size, 50, 50, fragments=fragments, congestion=each)
        for mode in ("gather", "reduce")
        for codec, size, fragments in (("none", 4.0, 1), ("int4", 2.0, 4))
        for each in chosen
    ]
    if quick:
        return [*two, *four]
    return [
        *two,
        *(
            Setting(2, mode, "none", size, up, down, congestion=each)
            for mode, size, up, down in (
                ("gather", 8.0, 200, 200),
                ("reduce", 4.0, 100, 100),
                ("gather", 2.0, 20, 100),
            )
            for each in chosen
        ),
        *(
            Setting(2, "gather", "int4", 1.2, 50, 50, fragments=2, stages=stages, congestion=each)
            for stages in (2, 4)
            for each in chosen
        ),
        Setting(4, "gather", "int4", 1.2, 50, 50, stages=2, congestion=EVEN),
        *four,
        Setting(4, "gather", "none", 4.0, 100, 100, congestion=EVEN),
        Setting(4, "gather", "none", 2.0, 20, 100, congestion=EVEN),
        Setting(4, "gather", "none", 2.0, 100, 100, slow=20, congestion=EVEN),
        Setting(4, "reduce", "none", 4.0, 100, 100, slow=20, congestion=EVEN),
        *(
            Setting(8, mode, "none", size, 30, 30, congestion=each)
            for mode, size in (("gather", 1.2), ("reduce", 4.0))
            for each in chosen
        ),
    ]


def least_seconds(sent: Mapping[str, int], received: Mapping[str, int],
                  lines: Mapping[str, Line], pauses: int) -> float:  # fmt: skip
    """Return the seconds that the busiest line needs for payload bytes alone.

    `sent` and `received` are bytes by site. The shaper's burst after each of `pauses` is
    subtracted.
    """
    longest = 0.0
    for site, line in lines.items():
        for count, rate in ((sent[site], line.up), (received[site], line.down)):
            assert rate is not None
            longest = max(longest, count * 8 / rate - pauses * BURST_SECONDS)
    return longest


def covered(intervals: Iterable[tuple[float, float]]) -> tuple[float, int]:
    """Return the seconds that the intervals cover together, and the number of separate pieces."""
    total, until, pieces = 0.0, float("-inf"), 0
    for start, end in sorted(intervals):
        pieces += start > until
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total, pieces


@dataclass(frozen=True)
class Round:
    """One round of all sites."""

    seconds: float
    swaps: list[tuple[float, float]]
    """(start, end) of each swap of payloads at a rank, in seconds."""
    sent: dict[str, int]
    received: dict[str, int]
    first_stage: float
    """Seconds until the first stage had its averages at all sites."""


def rounds_of(turns: Sequence[Turn], trace: Mapping[str, Any]) -> list[Round]:
    """Return the measured rounds, without the first one, in which groups are formed."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {
        event["pid"]: event["args"]["name"].split()[0]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    begun = {
        number: min(turn.began for turn in turns if turn.round == number)
        for number in {turn.round for turn in turns}
    }
    zero = trace["otherData"]["zero_unix_us"] / 1e6 - (time.time() - time.monotonic())

    def round_of(moment: float) -> int:
        return max((n for n, start in begun.items() if start <= moment), default=0)

    swaps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    moved: dict[tuple[int, str, str], int] = defaultdict(int)
    for event in events:
        start = zero + event["ts"] / 1e6
        end = start + event["dur"] / 1e6
        if event["name"] == "swap":
            swaps[round_of(start)].append((start, end))
        elif event["name"] in ("send", "receive"):
            moved[round_of(start), names[event["pid"]], event["name"]] += event["args"]["bytes"]
    found = []
    for number in sorted(begun)[1:]:
        own = [turn for turn in turns if turn.round == number]
        sites = {turn.site for turn in own}
        found.append(
            Round(
                max(turn.ended for turn in own) - begun[number],
                swaps[number],
                {site: moved[number, site, "send"] for site in sites},
                {site: moved[number, site, "receive"] for site in sites},
                first_through(own) - begun[number],
            )
        )
    return found


def first_through(turns: Sequence[Turn]) -> float:
    """Return the moment at which the first stage had its averages at all sites."""
    through: dict[int, float] = {}
    for turn in turns:
        through[turn.stage] = max(turn.ended, through.get(turn.stage, turn.ended))
    return min(through.values())


def row(setting: Setting, rounds: Sequence[Round]) -> common.Row:
    """Return the row with medians over the rounds."""
    case = setting.case(1)
    whole = compressor(case.codec, Geometry(((case.values,),), (0,), case.values))
    payload = frame_bytes(whole.part(0, case.values, 0))
    exchanges = setting.fragments * setting.stages
    travelled = []
    for each in rounds:
        seconds, pieces = covered(each.swaps)
        least = least_seconds(each.sent, each.received, setting.lines(), pieces)
        alone = least_seconds(each.sent, each.received, setting.lines(), 1)
        travelled.append((seconds, least / seconds, alone / each.seconds))
    sent = statistics.median(max(each.sent.values()) for each in rounds) / exchanges
    return {
        "sites": setting.sites,
        "mode": setting.mode,
        "codec": setting.codec,
        "stages": setting.stages,
        "fragments": setting.fragments,
        "link": setting.link,
        "congestion": setting.congestion or "machine",
        "payload_bytes": payload,
        "sent_bytes": round(sent),
        "payloads": round(sent / payload, 4),
        "seconds": round(statistics.median(each.seconds for each in rounds), 4),
        "transfer_seconds": round(statistics.median(t[0] for t in travelled), 4),
        "efficiency": round(statistics.median(t[1] for t in travelled), 4),
        "whole": round(statistics.median(t[2] for t in travelled), 4),
        "first_stage": round(statistics.median(e.first_stage / e.seconds for e in rounds), 4),
        "rounds": len(rounds),
    }


def measure(setting: Setting, rounds: int, root: Path) -> common.Row:
    """Measure one setting, and return the row. Raises `LabError` if a link does not have its
    rate."""
    case = setting.case(rounds)
    with Network([HUB, *case.sites]) as network:
        network.shape(Links(setting.lines()))
        verify_links(network)
        turns, folder = run_case(network, case, root)
    path = chrome_trace.merge_run(folder)
    assert path is not None
    return row(setting, rounds_of(turns, json.loads(path.read_text(encoding="utf-8"))))


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    if common.cannot("exchange", unsupported_reason()):
        return common.CANNOT
    on, default = common.machine(), common.congestion()
    root = Path(tempfile.mkdtemp(prefix="dilocox-exchange-"))
    rows, code = [], 0
    try:
        with watchdog.watched():
            for setting in settings(options.quick, default):
                rows.append(measure(setting, 4 if options.quick else 8, root))
                common.say(common.table(rows[-1:], COLUMNS).splitlines()[1])
    except LabError as error:
        # Results measured before the failure are kept.
        print(f"exchange: {error}", file=sys.stderr)
        code = 1
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
    if rows:
        print(common.table(rows, COLUMNS))
        print(f"links in Mbit/s; the machine's congestion control is {default}")
    if options.json and rows:
        about = {"machine_congestion": default}
        common.write_json(options.json, "exchange", on, about, rows)
    return code


COLUMNS: dict[str, Any] = {
    "mode": "s",
    "sites": "d",
    "stages": "d",
    "codec": "s",
    "fragments": "d",
    "payload_bytes": ",d",
    "payloads": ".3f",
    "link": "s",
    "congestion": "s",
    "seconds": ".3f",
    "transfer_seconds": ".3f",
    "efficiency": ".1%",
    "whole": ".1%",
    "first_stage": ".1%",
}
