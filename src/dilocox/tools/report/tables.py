"""Builds the tables of a run's page: sites, events, data, digests. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dilocox.coordinator.protocol.task_figures import comparison, moment
from dilocox.data.manifest import held_out_whole, source_names
from dilocox.tools.report.curves import seconds
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.history import Admission, Event, History, Round, SiteRound, admission
from dilocox.utils.formatting import number, size

SHOWN = 40
"""Most rows of one table. A longer table shows its last rows."""
MOMENTS = 6
"""Most evaluations on tasks in the table of tasks."""
NamedBy = Literal["content", "options", "order"]
"""Part of the token files' manifest that gives the name of a source. The digest covers `content`,
and not `options`. `order`: no part does, so the source has a number."""


@dataclass(frozen=True)
class Table:
    """A table with a caption. The first cell of a row is the row's heading."""

    id: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    """Columns of numbers, which are aligned to the right."""
    code: tuple[int, ...] = ()
    """Columns of digests and names, where a line may break anywhere."""
    left_out: int = 0
    """Number of earlier rows that are not shown."""
    note: str = ""
    """Addition to the caption, about what is not shown otherwise."""


@dataclass(frozen=True)
class SiteRow:
    """Figures of one site."""

    name: str
    share: float
    """The site's share of all tokens, 0 to 1."""
    cells: tuple[tuple[str, str], ...]
    """(name, value) in a fixed order."""


@dataclass
class Source:
    """A source of training text."""

    name: str
    named_by: NamedBy
    licence: str
    """Empty if no licence was stated."""
    cells: list[tuple[str, str]] = field(default_factory=list)


def sites(history: History, files: RunFiles) -> list[SiteRow]:
    """Return the figures of each site, sites of the run file first."""
    named = files.config.get("sites")
    names = [*(named if isinstance(named, dict) else {}), *history.sites]
    total = sum(each.tokens for row in history.rounds for each in row.sites)
    enrolments: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for each in files.record.course.enrolments if files.record else []:
        enrolments[str(each.get("site"))] += 1
        keys[str(each.get("site"))] = str(each.get("key"))
    rows = []
    for name in dict.fromkeys(names):
        own = history.of(name)
        tokens, spent = sum(r.tokens for r in own), sum(r.seconds for r in own)
        waited = sum(r.wait_seconds for r in own)
        cells = [
            ("tokens", f"{tokens:,.0f}"),
            ("rounds", f"{sum(1 for r in own if r.tokens)} of {len(history.rounds)}"),
            ("speed", f"{number(tokens / spent)} tokens/s" if spent else "none"),
            ("waited", f"{waited / spent:.1%} ({seconds(waited)})" if spent else "none"),
            ("payloads", size(sum(r.payload_bytes for r in own))),
            ("last loss", next((f"{r.loss:.3f}" for r in reversed(own) if r.loss is not None),
                               "none")),
        ]  # fmt: skip
        cells += _devices(own)
        if files.record:
            cells.append(("joined", _times(enrolments[name])))
            cells.append(("key", keys.get(name, "none")[:16]))
        rows.append(SiteRow(name, tokens / total if total else 0.0, tuple(cells)))
    return rows


def _devices(own: Sequence[SiteRound]) -> list[tuple[str, str]]:
    """Return MFU and memory of a site's devices, as far as the site has reported them."""
    timed = [(r.mfu, r.seconds) for r in own if r.mfu is not None and r.seconds]
    cells = []
    if timed:
        spent = sum(each for _, each in timed)
        cells.append(("MFU", f"{sum(mfu * each for mfu, each in timed) / spent:.1%}"))
    for name, values in (
        ("peak memory of a rank", [r.memory for r in own if r.memory is not None]),
        ("peak held by the allocator", [r.reserved for r in own if r.reserved is not None]),
    ):
        if values:
            cells.append((name, size(max(values))))
    retries = sum(r.retries or 0.0 for r in own)
    if retries:
        cells.append(("allocator retries", f"{retries:,.0f}"))
    return cells


def _times(count: int) -> str:
    return "once" if count == 1 else "never" if not count else f"{count} times"


def membership(history: History) -> tuple[Event, ...]:
    """Return the events of sites that joined or left."""
    return tuple(event for event in history.events if event.about == "members")


def notes(history: History) -> tuple[Event, ...]:
    """Return all other events: plans and messages."""
    return tuple(event for event in history.events if event.about != "members")


def anomalies(history: History, files: RunFiles) -> Table:
    """Return the anomalies of all rounds: dropped, repeated or missing contributions."""
    rows: list[tuple[str, str, str]] = []
    for row in history.rounds:
        where = f"round {row.number}"
        for each in row.sites:
            if each.dropped:
                rows.append(
                    (
                        where,
                        each.site,
                        f"{each.dropped} was not finite; its contribution was dropped",
                    )
                )
            if each.repeated:
                rows.append((where, each.site, f"{_plural(each.repeated, 'exchange')} repeated"))
        rows += _left_out(where, row)
        if row.loss is None:
            rows.append((where, "all", "no finite training loss"))
    rows += _verdicts(history, files)
    rows += [(f"round {round_}", "all", "the run was resumed here") for round_ in
             history.resumes]  # fmt: skip
    shown, left = _latest(rows)
    return Table("anomalies", "Anomalies", ("when", "site", "what"), shown,
                 left_out=left)  # fmt: skip


def _left_out(where: str, row: Round) -> list[tuple[str, str, str]]:
    """Return a row per incomplete contribution set; its second cell names the reporting sites."""
    saw: dict[tuple[int, int], list[str]] = {}
    for each in row.sites:
        if each.contributors < each.members:
            saw.setdefault((each.contributors, each.members), []).append(each.site)
    return [
        (where, "all" if len(names) == len(row.sites) else ", ".join(names),
         f"only {counted} of {members} sites counted in a contribution set")
        for (counted, members), names in saw.items()
    ]  # fmt: skip


def _verdicts(history: History, files: RunFiles) -> list[tuple[str, str, str]]:
    """Return contributions that were refused or flagged, one row per round and site."""
    found: dict[tuple[int, str], Counter[str]] = {}
    for each in history.admissions or _decided(files):
        if each.idle:
            continue
        words = [] if each.code in ("", "admitted") else [f"not admitted: {each.code}"]
        words += [f"flagged: {flag}" for flag in each.flags]
        if words:
            found.setdefault((each.round, each.site), Counter()).update(words)
    return [
        (f"round {round_}", site,
         ", ".join(f"{word} ({_plural(count, 'exchange')})" for word, count in words.items()))
        for (round_, site), words in sorted(found.items())
    ]  # fmt: skip


def _decided(files: RunFiles) -> list[Admission]:
    """Return the admission verdicts that the record's outer steps contain."""
    found = []
    for step in files.record.course.steps.values() if files.record else ():
        verdicts = step.said.get("verdicts")
        for site, said in verdicts.items() if isinstance(verdicts, dict) else ():
            if isinstance(said, dict):
                found.append(admission(step.key.round, str(site), said))
    return found


def tasks(history: History) -> Table:
    """Return the figures of tasks: a row for each task and metric, a column for each evaluation.

    The first evaluation and the latest ones are shown.
    """
    rows = history.tasks
    shown = rows[:1] + rows[1:][-(MOMENTS - 1) :]
    columns = {moment(each.after_round): each.figures for each in shown}
    table = comparison(columns)
    head = (table[0][0], table[0][1], table[0][2], *columns)
    left = len(rows) - len(shown)
    return Table("tasks", "Figures of tasks, as a site reports them; a record does not prove them",
                 head, tuple(map(tuple, table[1:])), numeric=tuple(range(2, len(head))),
                 note=f"{left} evaluations in between are not shown" if left else "")  # fmt: skip


def scores(history: History) -> Table:
    """Return the scores of each site's contributions, as means over the exchanges."""
    rows = []
    for site in dict.fromkeys(each.site for each in history.admissions):
        own = [each for each in history.admissions if each.site == site]
        refused = sum(1 for each in own if each.code != "admitted" and not each.idle)
        rows.append(
            (site, f"{len(own):,}", f"{refused:,}",
             _mean([e.norm for e in own], "{:.2f}"), _mean([e.cosine for e in own], "{:.2f}"),
             _mean([e.gain for e in own], "{:.4f}"))
        )  # fmt: skip
    head = ("site", "judged", "did not count", "norm over the median", "cosine to the others",
            "gain in held-out loss")  # fmt: skip
    return Table("scores", "Scores of contributions, means over the exchanges", head, tuple(rows),
                 numeric=(1, 2, 3, 4, 5))  # fmt: skip


def _mean(values: Sequence[float | None], form: str) -> str:
    found = [value for value in values if value is not None]
    return form.format(sum(found) / len(found)) if found else ""


def audits(files: RunFiles) -> Table:
    """Return the audits that auditors have signed."""
    rows = []
    for signed in files.audits:
        each, first = signed.verdict, signed.verdict.first_bad_step
        rows.append((each.site, str(each.round), each.verdict, _word(first), each.reason,
                     signed.auditor[:16]))  # fmt: skip
    shown, left = _latest(rows)
    return Table("audits", "Rounds that auditors have replayed",
                 ("site", "round", "verdict", "first bad step", "reason", "auditor's key"),
                 shown, numeric=(1, 3), code=(5,), left_out=left)  # fmt: skip


def sources(files: RunFiles) -> list[Source]:
    """Return the sources of the text. A licence is shown only if it was stated."""
    if files.data is None:
        return []
    content = files.data["content"]
    names = source_names(files.data["made_with"]["options"])
    found, whole = [], held_out_whole(content)
    for order, each in enumerate(content["sources"]):
        # Only the name is shown: the rest of a file's path is private to the machine.
        stated = Path(str(names[order])).name if order < len(names) and names[order] else ""
        own = str(each.get("name") or "")
        name = own or stated or f"source {order + 1}"
        named_by: NamedBy = "content" if own else "options" if stated else "order"
        source = Source(name, named_by, str(each.get("licence") or ""))
        source.cells.append(("revision", str(each.get("revision") or "not stated")))
        if whole[order]:
            source.cells.append(("use", "held out whole, for evaluations"))
        if each.get("kind") == "hub":
            documents = each["documents"]
            source.cells += [
                ("documents", f"{documents['count']:,}, {size(documents['bytes'])}"),
                ("SHA-256", str(documents["sha256"])),
            ]
        else:
            total = sum(file["bytes"] for file in each["files"])
            source.cells.append(("files", f"{len(each['files']):,}, {size(total)}"))
            if each.get("skipped_files"):
                source.cells.append(("skipped", _plural(each["skipped_files"], "file")))
        found.append(source)
    return found


def data_facts(files: RunFiles) -> list[tuple[str, str]]:
    """Return (name, text) about the contents of the token files."""
    if files.data is None:
        return []
    content = files.data["content"]
    facts = []
    for split in ("train", "validation"):
        part = content["splits"][split]
        facts.append(
            (split, f"{part['tokens']:,} tokens in {_plural(part['documents'], 'document')} "
             f"({size(part['bytes'])} of text)")
        )  # fmt: skip
    about = content.get("conversations")
    if about is not None:
        facts.append(("format", f"{about['format']}; learned: {about['loss_on']}"))
    kind = "trained on this text" if content["tokenizer"]["kind"] == "trained" else "loaded"
    facts.append(("tokenizer", f"{content['vocabulary_size']:,} tokens, {kind}"))
    facts.append(("digest", str(files.data["digest"])))
    return facts


def states(files: RunFiles) -> Table:
    """Return the model states that sites have signed: theta_0 and the published model."""
    rows = []
    for each in files.record.course.states if files.record else []:
        name = "theta_0" if each.kind == "initial" else each.kind
        rows.append((f"{name}, stage {each.stage}", each.site, each.root))
    shown, left = _latest(rows)
    return Table("states", "Model states that sites have signed", ("state", "by", "root"), shown,
                 code=(2,), left_out=left)  # fmt: skip


def anchors(history: History) -> Table:
    """Return the digest of the anchor at the end of each round."""
    rows = [(f"round {row.number}", f"{row.step:,}", row.anchor) for row in history.rounds]
    shown, left = _latest(rows)
    return Table("anchors", "Digest of the anchor at each round's end, equal at all sites",
                 ("after", "step", "digest"), shown, numeric=(1,), code=(2,),
                 left_out=left)  # fmt: skip


def checkpoints(files: RunFiles) -> Table:
    """Return the checkpoints in this folder that the run can be resumed from."""
    rows = [
        (f"slot {each.tick:,}", rank, digest)
        for each in files.checkpoints
        for rank, digest in each.ranks
    ]
    shown, left = _latest(rows)
    return Table("checkpoints", "Checkpoints in this folder that the run can resume from",
                 ("after", "rank", "SHA-256 of its list of files"), shown, code=(1, 2),
                 left_out=left)  # fmt: skip


def model(files: RunFiles) -> Table:
    """Return the files of the published model, with the digests that a site has signed."""
    signed: dict[str, str] = {}
    for state in files.record.course.states if files.record else []:
        if state.kind == "final":
            signed |= state.files
    rows = tuple(
        (name, size(count), signed.get(name, "its tensors are part of the final states"
                                       if name.endswith(".safetensors") and signed else ""))
        for name, count in files.model
    )  # fmt: skip
    return Table("model", "The published model", ("file", "size", "signed SHA-256"), rows,
                 numeric=(1,), code=(0, 2))  # fmt: skip


def versions(files: RunFiles) -> list[tuple[str, str]]:
    """Return the versions of software that the record states for the run."""
    if files.record is None:
        return []
    found = files.record.course.manifest.get("versions")
    return [(str(k), str(v)) for k, v in found.items()] if isinstance(found, Mapping) else []


def _latest(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], int]:
    return tuple(rows[-SHOWN:]), max(0, len(rows) - SHOWN)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _word(value: Any) -> str:
    return "" if value is None else str(value)
