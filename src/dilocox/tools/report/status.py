"""Computes the current state of a run from the files of its folder.

The folder is the coordinator's (`metrics.jsonl`) or a site's (`site-NAME.jsonl`, which
`dilocox join` writes). Lines are untrusted input: a malformed line is skipped and counted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.config.run_config import load_written
from dilocox.coordinator.protocol.held_out_figures import losses_by_source, pair_figures
from dilocox.coordinator.protocol.site_reports import JOURNALS
from dilocox.coordinator.protocol.task_figures import reported
from dilocox.errors import ConfigError
from dilocox.utils.json_lines import lines_of_text, object_of
from dilocox.utils.processes import may_live

Record = dict[str, Any]
QUIET_LEAST, QUIET_ROUNDS = 60.0, 3.0
"""Least seconds, and least number of the site's rounds, without a report after which a site of a
running run counts as silent. The longer of the two times applies."""
ROUNDING = 1.0
"""Seconds by which the time stamps of files and of lines may differ."""
MESSAGES = 5
"""Most messages of the run that are shown as warnings; the latest ones are shown."""
TOLD = ("round", "flush", "evaluation", "tasks")
"""Kinds of a site's reports in `metrics.jsonl`."""
GOES_ON = ("waits for sites", "training", "joining", "stopping")
STOPPED = ("stopped", "left")


@dataclass
class SiteNow:
    """Latest report of one site."""

    name: str
    role: str = ""
    """Role that the coordinator gives. Empty if the coordinator was not asked."""
    round: int | None = None
    """The last round that the site has reported."""
    step: int | None = None
    last_word: float | None = None
    """Unix time of the site's last report, in seconds."""
    seconds: float | None = None
    """Duration of the site's last round."""
    tokens_per_second: float | None = None
    loss: float | None = None
    wait_share: float | None = None


@dataclass
class Status:
    """Current state of a run."""

    folder: str
    of: str
    """`coordinator`, or the name of the site whose folder this is."""
    state: str
    """`waits for sites`, `joining`, `training`, `stopping`, `finished`, `stopped`, `left`, `failed`
    or `ended without a word`. The last one: the process has ended without writing how the run
    ended."""
    name: str = ""
    reason: str = ""
    round: int | None = None
    """The last complete round."""
    step: int = 0
    steps: int | None = None
    """Inner steps of the typical site in the whole run."""
    seconds_left: float | None = None
    """Remaining seconds at the speed of the last rounds. None: unknown."""
    loss: float | None = None
    held_out_loss: float | None = None
    held_out_after: int | None = None
    """Round after which `held_out_loss` was measured; -1: before the first round."""
    held_out_first: float | None = None
    """Held-out loss before the first round."""
    held_out_by_source: Record = field(default_factory=dict)
    """Held-out loss of each of several sources, at the latest evaluation."""
    held_out_pairs: Record = field(default_factory=dict)
    """Figures of held-out pairs, at the latest evaluation of preference training."""
    tasks: Record | None = None
    """The latest evaluation on tasks, as in `metrics.jsonl`."""
    plan: Record | None = None
    """The latest plan, as in `metrics.jsonl`."""
    privacy: Record = field(default_factory=dict)
    """Contributions, epsilon and delta by site, of sites with `[privacy]`."""
    coordinator: str = ""
    """Address of the coordinator. Empty if unknown."""
    began: float | None = None
    """Unix time of the first line, in seconds."""
    last: float | None = None
    """Unix time of the newest line, in seconds."""
    sites: list[SiteNow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if the run goes on or has finished, 3 if it was stopped or the site has
        left, 1 otherwise."""
        if self.state == "finished" or self.state in GOES_ON:
            return 0
        return 3 if self.state in STOPPED else 1


def status_of(folder: Path, now: float) -> Status:
    """Return the state of the run in `folder` at Unix time `now`, in seconds.

    Raises `ConfigError` if no run is there.
    """
    metrics, journals = folder / "metrics.jsonl", sorted(folder.glob(JOURNALS))
    if metrics.is_file() or (folder / "coordinator").is_dir():
        found = _of_coordinator(folder, metrics)
    elif journals:
        found = _of_site(folder, max(journals, key=lambda path: path.stat().st_mtime))
    else:
        raise ConfigError(
            f"{folder}: no run is here (no metrics.jsonl, no {JOURNALS}); give the run folder of "
            "the coordinator or of a site, such as runs/quickstart"
        )
    _warn_of_silence(found, now)
    return found


def _of_coordinator(folder: Path, metrics: Path) -> Status:
    records, bad = _lines(metrics)
    found = Status(str(folder), "coordinator", "training")
    try:
        config = load_written(folder / "run.toml")
        found.name, found.steps = config.run.name, config.total_steps
        found.sites = [SiteNow(name) for name in config.sites]
    except ConfigError as error:
        found.warnings.append(f"run file: {error}")
    _take_up(found, records)
    summary = _summary(folder / "summary.json", found.last or 0.0)
    alive = _is_held(folder / "coordinator" / "coordinator.lock")
    if summary and not alive:
        found.state = str(summary.get("phase", "failed"))
        found.reason = str(summary.get("reason", ""))
        found.seconds_left = None
    elif not alive:
        found.state, found.seconds_left = "ended without a word", None
        found.reason = (
            "no coordinator is running on this folder; run the same command again to go on from "
            "here (dilocox train needs --resume, dilocox coordinator does not)"
        )
    elif found.round is None:
        found.state = "waits for sites"
    if bad:
        found.warnings.append(f"metrics.jsonl: {bad} damaged lines were skipped")
    counts = summary.get("admission")
    for site, flags in (counts if isinstance(counts, dict) else {}).items():
        said = ", ".join(f"{what} {times}" for what, times in dict(flags).items())
        found.warnings.append(f"{site}: contributions flagged or not counted: {said}")
    return found


def _of_site(folder: Path, journal: Path) -> Status:
    records, bad = _lines(journal)
    name = journal.stem.removeprefix("site-")
    found = Status(str(folder), name, "joining", sites=[SiteNow(name)])
    process: tuple[str, int] | None = None
    for record in records:
        kind = record.get("kind")
        if kind == "joined":
            found.state, found.reason = "joining", ""
            found.name, found.steps = str(record.get("run", "")), whole(record, "steps")
            found.coordinator = str(record.get("coordinator", ""))
            process = (str(record.get("host", "")), whole(record, "process") or 0)
        elif kind in ("begins", "round"):
            found.state = "training"
        elif kind == "ended":
            code = whole(record, "code")
            found.state = {0: "finished", 130: "left"}.get(1 if code is None else code, "failed")
            found.reason = str(record.get("reason", ""))
    _take_up(found, [{"site": name, **record} for record in records])
    last = found.sites[0]
    found.round, found.loss = last.round, last.loss
    found.step = last.step or 0
    if found.state in GOES_ON and process is not None and not may_live(*process):
        found.state = "ended without a word"
        found.reason = "the process of `dilocox join` has ended; run the same command again"
    if bad:
        found.warnings.append(f"{journal.name}: {bad} damaged lines were skipped")
    return found


def _take_up(found: Status, records: Iterable[Record]) -> None:
    """Fill rounds, losses, plan, sites and messages of `records` into `found`."""
    sites = {site.name: site for site in found.sites}
    rounds: list[Record] = []
    messages: list[tuple[float, str]] = []
    for record in records:
        kind, site, time = record.get("kind"), record.get("site"), real(record, "time")
        if time is not None:
            found.began = time if found.began is None else found.began
            found.last = time
        if isinstance(site, str) and site and kind in TOLD:
            each = sites.setdefault(site, SiteNow(site))
            each.last_word = each.last_word if time is None else time
            if kind == "round":
                each.round, each.step = whole(record, "round"), whole(record, "step")
                each.seconds, each.loss = real(record, "seconds"), real(record, "loss")
                each.tokens_per_second = real(record, "tokens_per_second")
                each.wait_share = real(record, "wait_share")
        if kind == "round" and (not site or found.of == site):
            rounds.append(record)
        elif kind == "evaluation" and real(record, "val_loss") is not None:
            found.held_out_loss = real(record, "val_loss")
            found.held_out_after = whole(record, "after_round")
            found.held_out_by_source = losses_by_source(record)
            found.held_out_pairs = pair_figures(record)
            if found.held_out_after == -1:
                found.held_out_first = found.held_out_loss
        elif kind == "tasks" and reported(record):
            found.tasks = record
        elif kind == "plan":
            found.plan = record
        elif kind == "privacy" and isinstance(record.get("sites"), dict):
            found.privacy = record["sites"]
        elif kind in ("message", "warning") and record.get("about") != "members":
            messages.append((time or 0.0, str(record.get("text", ""))))
        elif kind == "resumed":
            back = whole(record, "round") or 0
            rounds = [row for row in rounds if (whole(row, "round") or 0) < back]
    found.sites = list(sites.values())
    if rounds:
        newest = rounds[-1]
        found.round, found.loss = whole(newest, "round"), real(newest, "loss")
        found.step = whole(newest, "step") or 0
        found.seconds_left = _left(found, rounds[-4:])
    found.warnings += [text for _, text in messages[-MESSAGES:]]


def _left(found: Status, rounds: list[Record]) -> float | None:
    """Return the seconds to the end of the run at the speed of `rounds`. None if unknown."""
    steps, begun = whole(rounds[-1], "step"), whole(rounds[0], "step")
    seconds = sum(real(row, "seconds") or 0.0 for row in rounds[1:])
    if found.steps is None or steps is None or begun is None or steps <= begun:
        return None
    return max(0.0, (found.steps - steps) * seconds / (steps - begun))


def _warn_of_silence(found: Status, now: float) -> None:
    if found.state != "training":
        return
    for site in found.sites:
        limit = max(QUIET_LEAST, QUIET_ROUNDS * (site.seconds or 0.0))
        if site.last_word is None and found.of == "coordinator":
            found.warnings.append(f"{site.name}: no report yet")
        elif site.last_word is not None and now - site.last_word > limit:
            quiet = f"{now - site.last_word:.0f} s"
            found.warnings.append(f"{site.name}: its last report is {quiet} old")


def _summary(path: Path, last: float) -> Mapping[str, Any]:
    """Return the run's summary. Empty if it is missing, damaged or older than the metrics.

    `last`: Unix time of the newest metrics. An older summary belongs to an earlier start of a
    resumed run.
    """
    try:
        if path.stat().st_mtime < last - ROUNDING:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_held(lock: Path) -> bool:
    """Return whether a running coordinator holds the lock."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lines(path: Path) -> tuple[list[Record], int]:
    """Return the records of a file, and the number of damaged lines.

    An incomplete last line does not count, because it may still be being written.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return [], 0
    lines = [object_of(line) for line in lines_of_text(text)]
    found = [record for record in lines if record is not None]
    bad = len(lines) - len(found)
    return found, bad if text.endswith("\n") else max(0, bad - 1)


def real(record: Record, key: str) -> float | None:
    """Return a number of a record. None if the value is not a number."""
    value = record.get(key)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def whole(record: Record, key: str) -> int | None:
    """Return a whole number of a record. None if the value is not a number, or too large."""
    value = real(record, key)
    return None if value is None or value != value or abs(value) > 2**62 else int(value)
