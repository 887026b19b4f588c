"""Measures tokens/s of methods and peers over slow links, against sites without a network.

Sites are hosts of a lab (`dilocox.tools.testbed`): network namespaces joined by a bridge, each with
a shaped uplink and downlink and a hard CPU quota. All quotas together are 90 % of the machine, also
in the runs without exchange. Links, round trips and quotas are measured before anything else;
nothing is reported if a link is off by more than 5 %. The coordinator (and torchft's Lighthouse)
has a host of its own.

Links are made for the speed of the machine. The time of a step is measured first. A link's ratio is
the time in which fp32 gradients cross it, over the time of a step. Ratios are 400, 40 and 4,000. At
400, `allreduce` keeps a quarter per cent of the speed. The rows have the real ratio of each
measurement.

- Methods of the engine are real runs. `dilocox` has its defaults; `dilocox-work-0.005` may spend
  half a per cent of the processor on exchanges instead of three. The first half of a run, in which
  the controller measures the link, does not count, nor does a last round that is cut to the
  remaining steps.
- Peers are PyTorch DDP, DDP with the PowerSGD hook, torchft's DiLoCo and Streaming DiLoCo. Each is
  a script that is started once per site, with the same model, tokens per step, links and quota.
- Without a network, each site of the engine trains in a run of its own, all at the same time. The
  runs have the same quotas, an outer step every 200 inner steps, and no codec. For the peers it is
  their training loop by itself. A share thus includes all costs of sending: waiting, CPU time of
  codecs and protocols, and control traffic.

Measurements are made in blocks of some minutes, every second one in reverse order. Shares are taken
within blocks: each block has the runs without exchange and `dilocox`, and some of the others.
Figures are medians with bootstrap intervals. Bytes are per site and round. The engine counts its
payloads; for peers the collective's algorithm defines them. The site's interface counts wire bytes,
control traffic included. Efficiency is payload bits over the link's capacity
while payloads cross it. Loss is not compared here, but in `benchmarks.quality`.

A full run (no options) takes 2.5 hours with steps of 60 ms. Every measurement is written when it is
done. Started again on the same machine, the benchmark continues with the missing measurements.
--minutes N begins no measurement that would end after N minutes, so a full run can be made in
parts. --quick takes nine and a half minutes. --docs writes tables into documents that have marks
for them (`benchmarks.wan.docs`), also when nothing is left to measure.

A measurement needs Linux, root, iproute2 and control groups; without them the benchmark prints one
line and exits with code 3. The peers of torchft need `pip install -c constraints.txt -e
'.[peers]'`, and are left out without it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.wan import docs as wan_docs
from benchmarks.wan import peer_runs as wan_peers
from benchmarks.wan import plot as wan_plot
from benchmarks.wan import rows as wan_rows
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import (
    ALONE,
    BY_NAME,
    CONGESTION,
    FULL,
    MODEL,
    NONE,
    PROBE_ROUNDS,
    PROBE_STEPS,
    RATIOS,
    SEQUENCE_LENGTH,
    SHORT,
    SHORT_MINUTES,
    SITES,
    VOCABULARY,
    Case,
    Extent,
    batch,
    cases,
    duration,
    link_of,
)
from benchmarks.wan.rows import TOKENS
from dilocox.errors import DilocoxError
from dilocox.models import count_parameters, load_model_config
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.testbed import unsupported_reason

Row = dict[str, Any]
RESULTS = common.RESULTS / "wan-cpu.json"
PATIENCE, START_LIMIT = 5.0, 300.0
"""A run of the engine is aborted after `PATIENCE` times its expected time plus `START_LIMIT`
seconds."""


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = common.parser(__doc__ or "")
    made.add_argument("--folder", type=Path, metavar="DIR", help="work there, keep logs")
    made.add_argument("--only", nargs="+", metavar="NAME", help="methods and peers, beside none")
    made.add_argument("--ratio", nargs="+", type=int, choices=RATIOS, help="links")
    made.add_argument("--sites", nargs="+", type=int, choices=(2, 4))
    made.add_argument("--docs", nargs="+", type=Path, metavar="FILE", help="fill in their tables")
    made.add_argument("--minutes", type=float, metavar="N", help="begin nothing that lasts longer")
    return made


def main() -> int:
    """Measure what is missing, print and write.

    Returns 1 if a measurement failed, 2 if the options are wrong.
    """
    options = arguments().parse_args()
    common.end_on_signals()
    extent = SHORT if options.quick else FULL
    if options.json is None and not options.quick:
        options.json = RESULTS
    if options.minutes is None and options.quick:
        options.minutes = SHORT_MINUTES
    wanted = [case for case in cases(extent) if chosen(case, options)]
    if (problem := _problem(options, wanted)) is not None:
        common.say(f"wan: {problem}")
        return 2
    missing = lacking(read_runs(runs_file(options.json), extent), wanted)
    if missing and common.cannot("wan", unsupported_reason()):
        return common.CANNOT
    with tempfile.TemporaryDirectory(prefix="dilocox-wan-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options.json, extent, options.minutes)
        try:
            bench.measure(wanted)
        except DilocoxError as error:
            common.say(f"wan: {error}")
            return 1
        finally:
            reported = bench.report(options.docs or ())
    return reported


def _problem(options: argparse.Namespace, wanted: Sequence[Case]) -> str | None:
    """Return in one line what is wrong with the options. `wanted`: the measurements they select."""
    methods = {case.method for case in wanted}
    for name in sorted(set(options.only or ())):
        if name not in BY_NAME:
            return f"--only {name!r}: no such method; there are {', '.join(BY_NAME)}"
        if wanted and name not in methods:
            return f"--only {name!r}: is not measured with the other options; leave it or them out"
    for page in options.docs or ():
        if not page.is_file():
            return f"--docs {page}: there is no such file"
    return None if wanted else "these options leave nothing to measure"


def chosen(case: Case, options: argparse.Namespace) -> bool:
    """Return whether the options include this measurement."""
    if options.ratio and case.ratio not in options.ratio:
        return False
    if options.sites and case.sites not in options.sites:
        return False
    return not options.only or case.method in (NONE, ALONE, *options.only)


class Bench:
    """One call of the benchmark: the measurements so far, and the files for them.

    The file `results` gets the rows, `NAME-runs.json` beside it the single measurements. None: rows
    are only printed.
    """

    def __init__(
        self, folder: Path, results: Path | None, extent: Extent, minutes: float | None = None
    ) -> None:
        """`minutes`: a measurement that would end later than this from now is left out."""
        self._folder = folder
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._results = results
        self._extent = extent
        self._on = common.machine()
        self._runs_file = runs_file(results)
        self._runs = read_runs(self._runs_file, extent)
        self._failures = 0
        config = wan_run.configuration(folder, 2, {}, 1)
        self._parameters = int(count_parameters(load_model_config(config.model, VOCABULARY)))

    def measure(self, wanted: Sequence[Case]) -> None:
        """Make the missing measurements, one lab after the other."""
        missing = lacking(self._runs, wanted)
        if missing and self._runs_file is not None:
            common.claim(self._runs_file)
        if missing and self._runs:
            common.refuse_other_machine(self._runs_file, self._on)
        for sites in dict.fromkeys(case.sites for case in missing):
            inside = [case for case in missing if case.sites == sites]
            with Lab(list(SITES[:sites])) as lab:
                if sites > 2:
                    lab.network.congest(CONGESTION)
                step = self._step(lab)
                lasts = sum(duration(case, self._extent, step) for case in inside) / 60
                common.say(f"{sites} sites: {len(inside)} measurements, some {lasts:.0f} minutes")
                for ratio in dict.fromkeys(case.ratio for case in inside):
                    lab.shape(f"{self._link(sites, ratio, step) / 1e3:.3f}kbit")
                    for case in inside:
                        if case.ratio == ratio:
                            self._take(lab, case, duration(case, self._extent, step))

    def _step(self, lab: Lab) -> float:
        """Return the seconds of a step without exchange, from an earlier measurement or a new
        one."""
        known = [r for r in self._runs if r["sites"] == len(lab.sites) and r["method"] == NONE]
        if known:
            return TOKENS / wan_rows.median_speed(known)
        common.say(f"{len(lab.sites)} sites: measuring the time of a step")
        lab.shape()
        found = wan_run.measure_none(lab, self._folder, PROBE_ROUNDS, PROBE_STEPS)
        return TOKENS / float(found["tokens_per_second"])

    def _link(self, sites: int, ratio: int, step: float) -> float:
        """Return the link in bits per second: that of earlier measurements, or one for the step's
        time."""
        for run in self._runs:
            if (run["sites"], run["ratio"]) == (sites, ratio):
                return float(run["link_asked_bits_per_second"])
        return link_of(ratio, self._parameters, sites, step)

    def _take(self, lab: Lab, case: Case, lasts: float) -> None:
        """Make one measurement of about `lasts` seconds, and print a line about it.

        A failure counts, and does not affect the other measurements.
        """
        began = time.monotonic()
        name = f"{case.sites} sites, {case.ratio}x, {case.method}, block {case.block}"
        lacking = wan_peers.missing(BY_NAME[case.method]) if case.method in BY_NAME else None
        if lacking is not None:
            common.say(f"{name}: left out, {lacking}")
            return
        if began + lasts > self._end:
            common.say(f"{name}: left out, it takes some {lasts:.0f} s and the time is over")
            return
        try:
            found = self._measured(lab, case, PATIENCE * lasts + START_LIMIT)
            checked = lab.verify()
        except DilocoxError as error:
            common.say(f"{name}: {error}")
            self._failures += 1
            return
        links = [link.bits_per_second for link in checked.links]
        run = {
            **case.key,
            "link_asked_bits_per_second": checked.links[0].asked_bits_per_second,
            "link_bits_per_second": round(sum(links) / len(links)),
            "round_trip_ms": round(1000 * checked.round_trip, 2),
            "congestion": CONGESTION if case.sites > 2 else common.congestion(),
            **found,
            "commit": common.commit(),
            "date": common.today(),
            "took": round(time.monotonic() - began, 1),
        }
        self._runs.append(run)
        self._write()
        common.say(f"{name}: {run['tokens_per_second']:,.1f} tokens/s; {run['took']:.0f} s")

    def _measured(self, lab: Lab, case: Case, limit: float) -> Row:
        if case.method == NONE:
            return wan_run.measure_none(lab, self._folder)
        if case.method == ALONE:
            return wan_peers.measure_alone(lab, self._folder, self._extent)
        method = BY_NAME[case.method]
        if method.kind == "engine":
            return wan_run.measure_engine(
                lab, self._folder, method, case.ratio, self._extent, limit=limit
            )
        step = self._step(lab)
        return wan_peers.measure_peer(lab, self._folder, method, case.ratio, self._extent, step)

    def _write(self) -> None:
        """Write the files of the single measurements and of the rows."""
        if self._results is None or self._runs_file is None:
            return
        for path, name, rows in (
            (self._runs_file, "wan-runs", self._runs),
            (self._results, "wan", wan_rows.rows(self._runs, self._parameters)),
        ):
            common.write_json(path, name, self._on, self._settings(), rows)

    def _settings(self) -> dict[str, Any]:
        return {
            "model": dict(MODEL),
            "parameters": self._parameters,
            "vocabulary": VOCABULARY,
            "sequence_length": SEQUENCE_LENGTH,
            "tokens_per_step": TOKENS,
            "sequences_per_step_and_site": {str(count): batch(count) for count in (2, 4)},
            "threads_per_site": 1,
            "quota_of_machine": 0.9,
            "extent": {k: v for k, v in vars(self._extent).items() if isinstance(v, int)},
            "peers": {name: installed(name) for name in ("torch", "torchft")},
        }

    def report(self, documents: Sequence[Path] = ()) -> int:
        """Print table and verdicts, write the picture and the tables of `documents`.

        Returns 1 if a measurement failed.
        """
        known = wan_rows.rows(self._runs, self._parameters)
        print(wan_rows.table(known))
        for line in wan_rows.verdicts(known):
            print(f"- {line}")
        if self._results is not None and known:
            picture = wan_plot.picture(known)
            self._results.with_suffix(".svg").write_text(picture, encoding="utf-8")
        for page in documents:
            filled = wan_docs.filled(page.read_text(encoding="utf-8"), known)
            page.write_text(filled, encoding="utf-8")
        return 1 if self._failures else 0


def runs_file(results: Path | None) -> Path | None:
    """Return the file of the single measurements beside the file `results`."""
    return None if results is None else results.with_name(f"{results.stem}-runs.json")


def lacking(runs: Sequence[Row], wanted: Sequence[Case]) -> list[Case]:
    """Return the measurements of `wanted` that are not among `runs`."""
    known = [tuple(run[key] for key in wanted[0].key) for run in runs] if wanted else []
    return [case for case in wanted if tuple(case.key.values()) not in known]


def read_runs(path: Path | None, extent: Extent) -> list[Row]:
    """Return earlier measurements of the same model and extent. Ends the program for another
    file."""
    if path is None or not path.exists():
        return []
    found = common.read_results(path, "wan-runs")
    settings = found.get("settings", {})
    same = settings.get("model") == MODEL and settings.get("tokens_per_step") == TOKENS
    steps = settings.get("extent", {}).get("ours_steps")
    if not same or steps != extent.ours_steps:
        common.say(f"{path}: holds results of another model or extent; name another")
        sys.exit(2)
    return list(found["rows"])


def installed(package: str) -> str | None:
    """Return the version of an installed package."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None
