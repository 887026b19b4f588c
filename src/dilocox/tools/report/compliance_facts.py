"""Collects the facts of a run that a compliance report may state, with their sources. Pure.

Every fact is read from the files of the run's folder. A fact that is not there is kept as absent,
with the reason. No path of a machine, no text of a corpus and no message of the run is a fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dilocox.coordinator.metrics.privacy import words
from dilocox.data.manifest import held_out_whole
from dilocox.tools.report import tables
from dilocox.tools.report.curves import seconds
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.history import History
from dilocox.tools.report.page import model_name
from dilocox.tools.report.settings import realised, setup
from dilocox.utils.formatting import size

RECORD, METRICS, RUN_FILE = "record", "metrics.jsonl", "run.toml"
MANIFEST, MODEL, SUMMARY = "token files' manifest", "model/", "summary.json"


@dataclass(frozen=True)
class Fact:
    """One statement about a run."""

    name: str
    value: str
    """Empty if the folder does not say it."""
    source: str
    """File of the run's folder that says it; if the fact is absent, the reason."""
    claims: tuple[str, ...] = ()
    """Claims of `dilocox verify` that cover the fact. Empty: no claim does."""


def absent(name: str, reason: str) -> Fact:
    """Return a fact that the folder does not hold."""
    return Fact(name, "", reason)


def collect(files: RunFiles, history: History) -> dict[str, list[Fact]]:
    """Return all facts by the name of their group, the groups of `GROUPS`."""
    return {name: group(files, history) for name, group in GROUPS.items()}


def _identity(files: RunFiles, history: History) -> list[Fact]:
    if files.record is None:
        return [absent("record", "the folder has no record that can be read")]
    course = files.record.course
    return [
        Fact("run", course.run, RECORD, ("log", "signatures")),
        Fact("log key", course.log, RECORD, ("log",)),
        Fact("signed statements", f"{len(files.record.entries):,}", RECORD, ("log",)),
        Fact("run file's digest", str(course.manifest.get("config_digest", "")), RECORD,
             ("signatures", "run-file")),
    ]  # fmt: skip


def _software(files: RunFiles, history: History) -> list[Fact]:
    if files.record is None:
        return [absent("versions", "the folder has no record that can be read")]
    code = str(files.record.course.manifest.get("code", ""))
    return [
        Fact("digest of dilocox's code", code, RECORD, ("signatures", "code")),
        *(Fact(f"version of {name}", version, RECORD, ("signatures",))
          for name, version in tables.versions(files)),
    ]  # fmt: skip


def _architecture(files: RunFiles, history: History) -> list[Fact]:
    name, config = model_name(files.config), _section(files, "model")
    facts = [
        Fact("architecture", name, RUN_FILE, ("run-file",))
        if name
        else absent("architecture", "the run file names no model")
    ]
    shape = config.get("architecture")
    for key, value in shape.items() if isinstance(shape, Mapping) else ():
        if isinstance(value, bool | int | float):
            facts.append(Fact(f"model.architecture.{key}", str(value), RUN_FILE, ("run-file",)))
    count = "parameters of the adapters" if files.adapters else "parameters"
    facts.append(
        absent(count, "the folder has no published model that states it")
        if files.parameters is None
        else Fact(count, f"{files.parameters:,}", MODEL, ("model",))
    )
    if files.adapters:
        facts.append(absent("parameters of the base model", "the folder holds adapters alone"))
    return facts


def _base(files: RunFiles, history: History) -> list[Fact]:
    config = _section(files, "model")
    adapter = _section(files, "adapter")
    if config.get("own"):
        first = "weights of the site that began the run (model.own)"
        return [Fact("start of training", first, RUN_FILE, ("run-file",))]
    if not adapter and not (config.get("pretrained", True) and config.get("path")):
        own = "initial weights made by the run's seed, no other model"
        return [Fact("start of training", own, RUN_FILE, ("run-file", "start"))]
    facts = [Fact("model that training started from", model_name(files.config), RUN_FILE,
                  ("run-file", "base" if adapter else "start"))]  # fmt: skip
    facts += [Fact(f"adapter.{key}", str(value), RUN_FILE, ("run-file",))
              for key, value in adapter.items() if isinstance(value, int | float)]  # fmt: skip
    if adapter.get("path"):
        facts += [
            Fact("adapters that training started from", "trained before, named in adapter.path",
                 RUN_FILE, ("run-file", "start")),
            absent("where these adapters come from", "the run file names their folder alone"),
        ]  # fmt: skip
    for handed, parts in (
        (adapter.get("handover"), "adapters and outer momentum"),
        (config.get("handover"), "weights and outer momentum"),
    ):
        if handed:
            facts += [
                Fact("what training went on from", f"{parts} of an earlier run, from its handover",
                     RUN_FILE, ("run-file", "start")),
                absent("the earlier run", "the run file names the folder of its handover alone"),
            ]  # fmt: skip
    course = files.record.course if files.record else None
    digests = {str(each["base"]) for each in course.enrolments if "base" in each} if course else ()
    facts += [Fact("digest of the base model that sites signed", digest, RECORD,
                   ("signatures", "base")) for digest in sorted(digests)]  # fmt: skip
    return facts


def _method(files: RunFiles, history: History) -> list[Fact]:
    if not files.config:
        return [absent("settings", "the folder has no run file that can be read")]
    chosen = {".".join(key) for key in realised(files)}
    return [
        Fact(name, value, METRICS if name in chosen else RUN_FILE,
             () if name in chosen else ("run-file",))
        for name, value in setup(files)
    ]  # fmt: skip


def _compute(files: RunFiles, history: History) -> list[Fact]:
    if not history.rounds:
        return [absent("tokens, training time", f"{METRICS} has no whole round"), _energy()]
    tokens = sum(row.tokens for row in history.rounds)
    facts = [
        Fact("sites that trained", f"{len(history.sites):,}", METRICS, ("metrics",)),
        Fact("rounds", f"{len(history.rounds):,}", METRICS, ("metrics",)),
        Fact("tokens trained on", f"{tokens:,.0f}", METRICS, ("metrics",)),
        Fact("training time, sum over rounds", seconds(sum(r.seconds for r in history.rounds)),
             METRICS),
    ]  # fmt: skip
    if files.adapters or _section(files, "adapter"):
        facts.append(absent("computation", "the rule 6 x parameters x tokens is not for adapters"))
    elif files.parameters is None:
        facts.append(absent("computation", "the number of parameters is not known"))
    else:
        floating = 6 * files.parameters * tokens
        facts.append(
            Fact("computation, estimated as 6 x parameters x tokens", f"{floating:.3g} FLOP",
                 f"{METRICS}, {MODEL}", ("metrics", "model"))
        )  # fmt: skip
    peaks = [each.memory for row in history.rounds for each in row.sites if each.memory]
    if peaks:
        facts.append(Fact("peak memory of a rank", size(max(peaks)), METRICS))
    return [*facts, _energy()]


def _energy() -> Fact:
    return absent("energy", "dilocox measures no energy")


def _data(files: RunFiles, history: History) -> list[Fact]:
    if files.data is None:
        return [absent("training data", "the manifest of the token files was not found (--data)")]
    facts: list[Fact] = []
    for number, source in enumerate(tables.sources(files), 1):
        label = f"source {number}"
        if source.named_by == "content":
            facts.append(Fact(f"{label}, name", source.name, MANIFEST, ("data",)))
        elif source.named_by == "options":
            # The digest, which sites have signed, does not cover how the files were prepared.
            facts.append(Fact(f"{label}, name as whoever prepared it states", source.name,
                              MANIFEST))  # fmt: skip
        facts += [Fact(f"{label}, {name}", value, MANIFEST, ("data",))
                  for name, value in source.cells if value != "not stated"]  # fmt: skip
        if dict(source.cells).get("revision") == "not stated":
            facts.append(absent(f"{label}, revision", "nobody has stated one"))
        facts.append(
            Fact(f"{label}, licence as stated", source.licence, MANIFEST, ("data",))
            if source.licence
            else absent(f"{label}, licence", "nobody has stated one")
        )
    facts += [Fact(name, value, MANIFEST, ("data",)) for name, value in tables.data_facts(files)]
    whole = sum(held_out_whole(files.data["content"]))
    share = files.data["content"].get("validation_fraction")
    if share is not None and not whole:
        facts.append(Fact("share held out for evaluation", f"{share}", MANIFEST, ("data",)))
    filters = [each["filter"] for each in files.data["content"]["sources"] if "filter" in each]
    facts.append(
        Fact("sources of which records were chosen by a filter", f"{len(filters)}", MANIFEST,
             ("data",))
    )  # fmt: skip
    return facts


def _evaluation(files: RunFiles, history: History) -> list[Fact]:
    facts = []
    if history.evaluations:
        first, last = history.evaluations[0], history.evaluations[-1]
        if last is not first:
            facts.append(Fact("held-out loss, first", f"{first.loss:.4f}", METRICS, ("metrics",)))
        facts.append(Fact("held-out loss, last", f"{last.loss:.4f}", METRICS, ("metrics",)))
        facts += [Fact(f"held-out loss, last, {name}", f"{loss:.4f}", METRICS, ("metrics",))
                  for name, loss in sorted(last.by_source.items())]  # fmt: skip
    else:
        facts.append(absent("held-out loss", f"{METRICS} has no evaluation"))
    table = tables.tasks(history)
    facts += [Fact(f"task {row[0]}, {row[1]}, last", row[-1], METRICS, ("metrics",))
              for row in table.rows if len(row) > 2]  # fmt: skip
    if not table.rows:
        facts.append(absent("figures of tasks", f"{METRICS} has none"))
    return facts


def _audits(files: RunFiles, history: History) -> list[Fact]:
    # Several auditors may have judged the same round of a site.
    judged = {(each.verdict.verdict, each.verdict.round, each.verdict.site)
              for each in files.standing}  # fmt: skip
    if not judged:
        return [absent("audits", "the folder has no verdict of an auditor that still counts")]
    auditors = len({each.auditor for each in files.standing})
    found = Counter(verdict for verdict, _, _ in judged)
    return [
        Fact("auditors' keys", f"{auditors:,}", "record/audits", ("audits",)),
        *(Fact(f"audited rounds of sites with verdict {verdict}", f"{count:,}", "record/audits",
               ("audits",)) for verdict, count in sorted(found.items())),
    ]  # fmt: skip


def _changes(files: RunFiles, history: History) -> list[Fact]:
    facts = []
    if files.record is not None:
        joined = Counter(str(each.get("site")) for each in files.record.course.enrolments)
        facts += [Fact(f"times that site {site} joined", f"{count}", RECORD, ("signatures",))
                  for site, count in sorted(joined.items())]  # fmt: skip
        back = len(files.record.course.resumes)
        facts.append(Fact("resumes from a checkpoint", f"{back}", RECORD, ("log", "complete")))
    odd = tables.anomalies(history, files)
    facts.append(
        Fact("anomalies that the run's page lists", f"{len(odd.rows) + odd.left_out}", METRICS)
        if history.rounds
        else absent("anomalies", f"{METRICS} has no whole round")
    )
    phase = str(files.summary.get("phase") or "")
    facts.append(
        Fact("how the run ended", phase, SUMMARY)
        if phase
        else absent("how the run ended", f"{SUMMARY} does not say it")
    )
    return facts


def _privacy(files: RunFiles, history: History) -> list[Fact]:
    if not files.config:
        return [absent("sites with text of their own", "no run file that can be read")]
    said = files.config.get("sites")
    sites = said if isinstance(said, Mapping) else {}
    own = [str(name) for name, its in sites.items() if isinstance(its, Mapping) and "data" in its]
    facts = [Fact("sites with text of their own", ", ".join(own) or "none", RUN_FILE,
                  ("run-file",))]  # fmt: skip
    facts += [Fact(f"privacy.{key}", str(value), RUN_FILE, ("run-file",))
              for key, value in _section(files, "privacy").items()
              if isinstance(value, int | float)]  # fmt: skip
    account = files.summary.get("privacy")
    bounds = account if isinstance(account, Mapping) else {}
    facts += [Fact(f"privacy of the text of {name}", words(each), SUMMARY)
              for name, each in bounds.items()]  # fmt: skip
    if own and not bounds:
        facts.append(absent("bound of differential privacy", "the run states no epsilon"))
    stored = _section(files, "record").get("states_every")
    if isinstance(stored, int):
        facts.append(Fact("record.states_every", str(stored), RUN_FILE, ("run-file",)))
    return facts


def _integrity(files: RunFiles, history: History) -> list[Fact]:
    if files.record is None:
        return [absent("record", "the folder has no record that can be read")]
    keys = {str(each.get("key")) for each in files.record.course.enrolments}
    states = Counter(each.kind for each in files.record.course.states)
    return [
        Fact("keys of sites that were admitted", f"{len(keys):,}", RECORD, ("signatures",)),
        Fact("signed final states", f"{states['final']:,}", RECORD, ("replay", "model")),
        Fact("signed outer steps", f"{len(files.record.course.steps):,}", RECORD,
             ("complete", "replay")),
    ]  # fmt: skip


def _release(files: RunFiles, history: History) -> list[Fact]:
    names = {name for name, _ in files.model}
    if not names:
        return [absent("published model", "the folder has no model (--model)")]
    facts = [Fact("files of the published model", f"{len(names):,}", MODEL, ("model",)),
             Fact("bytes of the published model", size(sum(count for _, count in files.model)),
                  MODEL, ("model",))]  # fmt: skip
    facts.append(
        Fact("signature of the released folder", "model.sig", MODEL, ("release",))
        if "model.sig" in names
        else absent("signature of the released folder", "the folder is not signed")
    )
    return facts


def _section(files: RunFiles, name: str) -> Mapping[str, Any]:
    found = files.config.get(name)
    return found if isinstance(found, Mapping) else {}


GROUPS: Mapping[str, Callable[[RunFiles, History], list[Fact]]] = {
    "identity": _identity, "software": _software, "architecture": _architecture, "base": _base,
    "method": _method, "compute": _compute, "data": _data, "evaluation": _evaluation,
    "audits": _audits, "changes": _changes, "privacy": _privacy, "integrity": _integrity,
    "release": _release,
}  # fmt: skip
"""Groups of facts, by name."""
