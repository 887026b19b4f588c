"""Builds the contents of a run's page (`Page`) from the files of its folder. Pure functions."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.metrics.privacy import words
from dilocox.tools.report import curves, tables
from dilocox.tools.report.charts import Chart
from dilocox.tools.report.curves import seconds
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.history import Event, History, read_history
from dilocox.utils.formatting import number, size
from dilocox.version import __version__

AT_THE_END = ("summary.json: not there", "model: not published")
"""Beginnings of `RunFiles.missing` lines that are normal while a run goes on."""
TONES = {"finished": "good", "failed": "bad", "stopped": "warn"}
"""CSS class by the phase in which a run ended."""


@dataclass(frozen=True)
class Tile:
    """One large figure at the top of the page."""

    label: str
    value: str
    note: str


@dataclass
class Page:
    """Contents of the page, as the templates use them."""

    name: str
    phase: str
    tone: str
    lead: str
    reason: str
    done: float | None
    """Share of the inner steps that are done, 0 to 1. None if the run has finished, no round has
    ended, or the run file does not give the number of steps."""
    tiles: list[Tile]
    learning: list[Chart]
    tasks: tables.Table
    traffic: list[Chart]
    times: list[Chart]
    totals: list[tuple[str, str]]
    sites: list[tables.SiteRow]
    membership: tuple[Event, ...]
    notes: tuple[Event, ...]
    anomalies: tables.Table
    scores: tables.Table
    sources: list[tables.Source]
    data_facts: list[tuple[str, str]]
    states: tables.Table
    anchors: tables.Table
    checkpoints: tables.Table
    model: tables.Table
    audits: tables.Table
    identity: list[tuple[str, str]]
    log_checkpoint: str
    claims: list[Mapping[str, Any]]
    """Claims of `dilocox verify --json`. Empty if it was not run."""
    commands: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    config_text: str
    missing: list[str]
    made: str
    made_by: str = f"dilocox {__version__}"
    began: float = 0.0
    looks: Mapping[str, str] = field(default_factory=dict)
    """CSS class of each site's colour, by name."""


def build(
    files: RunFiles, now: float, claims: Mapping[str, Any] | None = None, *, live: bool = False
) -> Page:
    """Return the contents of the page of a run.

    Args:
        files: Files of the run's folder.
        now: Unix time, in seconds.
        claims: Output of `dilocox verify --json`. None: it was not run.
        live: Whether the run may still go on.
    """
    history = read_history(files.metrics)
    phase = _phase(files, history, live)
    missing = [line for line in files.missing if not (live and line.startswith(AT_THE_END))]
    if files.bad_lines:
        missing.append(f"metrics.jsonl: {files.bad_lines} lines cannot be read")
    if not history.rounds:
        missing.append("curves: no round has ended yet")
    total = _steps_planned(files)
    done = None
    if total and history.rounds and phase != "finished":
        done = min(1.0, history.rounds[-1].step / total)
    said = files.config.get("sites")
    names = list(dict.fromkeys([*(said if isinstance(said, dict) else {}), *history.sites]))
    return Page(
        name=_name(files),
        phase=phase,
        tone=TONES.get(phase, "busy"),
        lead=_lead(files),
        reason=str(files.summary.get("reason") or ""),
        done=done,
        tiles=_tiles(files, history),
        learning=curves.learning(history, names),
        tasks=tables.tasks(history),
        traffic=curves.traffic(history),
        times=curves.times(history),
        totals=_totals(files, history),
        sites=tables.sites(history, files),
        membership=tables.membership(history),
        notes=tables.notes(history),
        anomalies=tables.anomalies(history, files),
        scores=tables.scores(history),
        sources=tables.sources(files),
        data_facts=tables.data_facts(files),
        states=tables.states(files),
        anchors=tables.anchors(history),
        checkpoints=tables.checkpoints(files),
        model=tables.model(files),
        audits=tables.audits(files),
        identity=_identity(files),
        log_checkpoint=files.record.checkpoint if files.record else "",
        claims=list(claims["claims"]) if claims else [],
        commands=_commands(files),
        versions=tables.versions(files),
        config_text=files.config_text,
        missing=missing,
        made=when(now),
        began=history.began or 0.0,
        looks={site: f"look-{n % curves.LOOKS}" for n, site in enumerate(names)},
    )


def when(time: float) -> str:
    """Return a Unix time as text in UTC, such as `2026-05-01 12:00 UTC`."""
    try:
        at = datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"
    return at.strftime("%Y-%m-%d %H:%M UTC")


def after(time: float, began: float) -> str:
    """Return the time since `began` as hours, minutes and seconds: `+0:03:20`."""
    spent = max(0, round(time - began)) if 0 < began <= time else 0
    return f"+{spent // 3600}:{spent % 3600 // 60:02d}:{spent % 60:02d}"


def _phase(files: RunFiles, history: History, live: bool) -> str:
    found = files.summary.get("phase")
    if isinstance(found, str) and found:
        return found
    if live:
        return "running" if history.rounds else "starting"
    return "not finished"


def _name(files: RunFiles) -> str:
    found = _at(files.config, "run", "name") or files.summary.get("name")
    return str(found or files.folder.resolve().name)


def _lead(files: RunFiles) -> str:
    """Return one or two sentences about the model, the sites and the method."""
    config = files.config
    if not config:
        return ""
    model = model_name(config)
    sites, stages = config.get("sites"), _at(config, "site", "stages")
    shards = _at(config, "site", "shards")
    parts = [str(model or "a model")]
    if isinstance(config.get("adapter"), dict):
        parts = [f"LoRA adapters for {model or 'a model'},"]
    if files.parameters:
        parts.append(f"of {number(files.parameters)} parameters")
    if isinstance(sites, dict):
        inside = f", {stages} stages each" if isinstance(stages, int) and stages > 1 else ""
        inside += f", {shards} shards a stage" if isinstance(shards, int) and shards > 1 else ""
        parts.append(f"on {len(sites)} site{'s' if len(sites) != 1 else ''}{inside}")
    text = " ".join(parts)
    method = _at(config, "outer", "method")
    return f"{text}. Method {method}, {_rounds(files)}." if method else f"{text}."


def model_name(config: Mapping[str, Any]) -> str:
    """Return the model's name: its name on a hub, or the last part of its folder's path.

    The rest of a folder's path is private to the machine.
    """
    path = _at(config, "model", "path")
    if not path:
        return str(_at(config, "model", "architecture", "model_type") or "")
    text = str(path)
    return text if is_hub_name(text) else text.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def is_hub_name(path: str) -> bool:
    """Return whether `path` looks like a model of a hub, `OWNER/NAME` or `NAME`.

    A relative path of a folder may look the same.
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None


def _rounds(files: RunFiles) -> str:
    """Describe codec and inner steps of the rounds: if the controller chose them, the first and the
    last ones."""
    plans = [
        f"{record['codec']} and {record['inner_steps']}"
        for record in files.metrics
        if record.get("kind") == "plan" and record.get("slots")
    ]
    if _at(files.config, "control", "adapt") in (None, "off") or not plans:
        codec = _at(files.config, "compression", "codec")
        inner = _at(files.config, "outer", "inner_steps")
        return f"codec {codec}, rounds of {inner} inner steps"
    if len(set(plans)) == 1:
        return f"codec and inner steps of each round chosen for the link: {plans[0]}"
    return (
        f"codec and inner steps of each round chosen for the link: first {plans[0]}, "
        f"last {plans[-1]}"
    )


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _steps_planned(files: RunFiles) -> int:
    steps = _at(files.config, "outer", "steps")
    if isinstance(steps, int):
        return steps
    rounds, inner = _at(files.config, "outer", "rounds"), _at(files.config, "outer", "inner_steps")
    return rounds * inner if isinstance(rounds, int) and isinstance(inner, int) else 0


def _tiles(files: RunFiles, history: History) -> list[Tile]:
    """Return the large figures: loss, tokens, speed, waiting and traffic."""
    tiles = []
    if history.evaluations:
        first, last = history.evaluations[0], history.evaluations[-1]
        came = f"from {first.loss:.4f} before training" if last is not first else "before training"
        tiles.append(Tile("Held-out loss", f"{last.loss:.4f}", came))
    rows = history.rounds
    if not rows:
        return tiles
    tokens, spent = sum(row.tokens for row in rows), sum(row.seconds for row in rows)
    sent = sum(row.payload_bytes for row in rows) + history.flush_bytes
    dense = sum(row.allreduce_bytes for row in rows)
    tiles.append(Tile("Tokens", number(tokens), f"{rows[-1].step:,} inner steps per site"))
    if spent:
        tiles.append(Tile("Tokens per second", number(tokens / spent), f"over {seconds(spent)}"))
        waited = sum(row.wait_share * row.seconds for row in rows) / spent
        tiles.append(Tile("Waited", f"{waited:.1%}", "of the time, for the network"))
    measured = [(row.mfu, row.seconds) for row in rows if row.mfu is not None and row.seconds]
    if measured:
        mfu = sum(share * each for share, each in measured) / sum(each for _, each in measured)
        tiles.append(Tile("MFU", f"{mfu:.1%}", "of the GPUs' peak, waiting included"))
    if sent:
        tiles.append(Tile("Sent", size(sent), "between the sites"))
    if sent and dense:
        tiles.append(
            Tile("Synchronous", f"{dense / sent:,.0f}x", f"as much traffic: {size(dense)}")
        )
    return tiles


def _totals(files: RunFiles, history: History) -> list[tuple[str, str]]:
    """Return (name, text) of sums over the run."""
    rows = history.rounds
    each = [one for row in rows for one in row.sites]
    if not rows:
        return []
    facts = [("rounds", f"{len(rows):,}")]
    if each:
        busiest = max(history.sites, key=lambda s: sum(r.wait_seconds for r in history.of(s)))
        facts += [
            ("training time, sum over rounds", seconds(sum(row.seconds for row in rows))),
            ("waited for the network, at the site that waited longest",
             f"{seconds(sum(r.wait_seconds for r in history.of(busiest)))} ({busiest})"),
            ("time of exchanges in the background, mean per round and site",
             seconds(sum(one.exchange_seconds for one in each) / len(each))),
        ]  # fmt: skip
    facts.append(("payloads of the rounds", size(sum(row.payload_bytes for row in rows))))
    if history.flush_bytes:
        facts.append(("payloads of the final flush", size(history.flush_bytes)))
    for name, text in (("committed", "trained on"), ("doubled", "trained on twice"),
                       ("missing", "lost"), ("waiting", "returned, not trained on")):  # fmt: skip
        count = files.summary.get(f"sequences_{name}")
        if isinstance(count, int) and (count or name == "committed"):
            facts.append((f"sequences {text}", f"{count:,}"))
    said = files.summary.get("privacy")
    for name, figures in (said if isinstance(said, dict) else {}).items():
        facts.append((f"privacy of the text of {name}", words(figures)))
    return facts


def _identity(files: RunFiles) -> list[tuple[str, str]]:
    """Return (name, value) of what identifies the run: its id, key, run file and code."""
    if files.record is None:
        return []
    course = files.record.course
    return [
        ("run", course.run),
        ("log key", course.log),
        ("statements", f"{len(files.record.entries):,}"),
        ("run file", str(course.manifest.get("config_digest", ""))),
        ("code", str(course.manifest.get("code", ""))),
    ]


def _commands(files: RunFiles) -> list[tuple[str, str]]:
    """Return (explanation, command) of the commands that check the run."""
    if files.record is None:
        return []
    commands = [
        (f"Get dilocox {_version(files)} from its authors; check that it is this version",
         "dilocox --version"),
        ("Get the folder that `dilocox publish` has written; then replay every outer step up to "
         "the published model", "dilocox verify RUN"),
        ("The same for programs", "dilocox verify RUN --json"),
        ("Check against the log's key, if you got the key from another source",
         f"dilocox verify RUN --key {files.record.course.log}"),
        ("Save the log's checkpoint below to a file; check later that the log has only grown since",
         "dilocox verify RUN --seen FILE"),
    ]  # fmt: skip
    if files.data is not None:
        commands.append(("Hash the token files again", "dilocox data show RUN/data --verify"))
    return commands


def _version(files: RunFiles) -> str:
    found = files.record.course.manifest.get("versions") if files.record else None
    return str(found.get("dilocox", "")) if isinstance(found, Mapping) else ""
