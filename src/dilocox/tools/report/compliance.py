"""Writes what a run's record can fill of the documents that rules ask for. Pure functions.

Every figure has its file, and the verdict of `dilocox verify` on the claim that covers it. Without
a verdict the report calls the figure not verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dilocox.tools.report.compliance_facts import Fact, collect
from dilocox.tools.report.compliance_items import RULES, Rule
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.history import read_history
from dilocox.tools.report.markdown import plain, table
from dilocox.tools.report.page import when
from dilocox.version import __version__

NOT_ADVICE = (
    "This is not legal advice, and it is not a finding that anything complies with a rule. It says "
    "which facts the run's folder holds, and which parts people must write."
)
TITLES = {
    "identity": "Identity", "software": "Software of training", "architecture": "Architecture",
    "base": "Start of training", "method": "Method and settings", "compute": "Computing",
    "data": "Training data", "evaluation": "Evaluation", "audits": "Audits",
    "changes": "Course of the run", "privacy": "Text of single sites",
    "integrity": "Integrity of the record", "release": "Published model",
}  # fmt: skip
"""Headings of the groups of facts, in the report's order."""
NO_CLAIM = "no claim covers it"
_PATH = re.compile(
    r"(?:(?<!\w)(?i:file):(?://[\w.-]*)?|(?<![\w/])(?!(?<=:)//))"
    r"(?:~[\w.-]*|\.\.?)?/[^\s,;:()'\"]*[^\s,;:()'\".]"
)
"""A path in a sentence: absolute, a `file:` URL, or begun with `.`, `..` or `~`. Other URLs are
none."""


def compliance_text(files: RunFiles, now: float, claims: Mapping[str, Any] | None) -> str:
    """Return the report of a run as Markdown.

    Args:
        files: Files of the run's folder.
        now: Unix time, in seconds.
        claims: Output of `dilocox verify --json`. None: it was not run.
    """
    facts = collect(files, read_history(files.metrics))
    found = list(claims["claims"]) if claims else []
    verdicts = {str(each["name"]): str(each["verdict"]) for each in found} if claims else None
    parts = [
        f"# Compliance report of {plain(str(_name(files)))}",
        f"Written by dilocox {__version__} on {when(now)}, from the run's folder alone. "
        f"{NOT_ADVICE}",
        "The facts of the run come first. Then each item of a rule has what the rule asks, what "
        "the folder says about it, and what somebody must write. A fact counts as verified only "
        "if every claim of `dilocox verify` that covers it is PASS. The limits of each claim are "
        "in the next section, and hold for every fact that names the claim. Read the rules "
        "themselves: the items are short words of ours.",
        "## Verdicts of dilocox verify",
        _verdicts(found, files) if claims else
        "`dilocox verify` was not run: **nothing below is verified.** Write the report again with "
        "`--verify`.",
        "## Facts of the run",
        *(_group(name, facts[name], verdicts) for name in TITLES),
        *(_rule(rule, facts) for rule in RULES),
    ]  # fmt: skip
    missing = [line for line in files.missing if not line.startswith("checkpoints")]
    if missing:
        lines = "\n".join(f"- {plain(without_paths(line, files))}" for line in missing)
        parts.append(f"## What the folder lacks\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _name(files: RunFiles) -> object:
    section = files.config.get("run")
    name = section.get("name") if isinstance(section, Mapping) else None
    return name or files.summary.get("name") or files.folder.resolve().name


def _verdicts(found: Sequence[Mapping[str, Any]], files: RunFiles) -> str:
    rows = [
        (each["name"], each["verdict"], without_paths(str(each["reason"]), files), each["proves"],
         each["not_proved"])
        for each in found
    ]  # fmt: skip
    said = (
        "These verdicts are the finding of the machine that wrote this report. Whoever has the "
        "run's folder gets verdicts of their own with `dilocox verify RUN`. NOT_RUN is not PASS."
    )
    return f"{said}\n\n" + table(
        ("claim", "verdict", "reason", "what PASS proves", "what it does not prove"), rows
    )


def _group(name: str, facts: Sequence[Fact], verdicts: Mapping[str, str] | None) -> str:
    rows = [(each.name, each.value, each.source, standing(each, verdicts))
            for each in facts if each.value]  # fmt: skip
    lacking = [f"- Absent: {plain(each.name)} ({plain(each.source)})."
               for each in facts if not each.value]  # fmt: skip
    parts = [f"### {TITLES[name]}"]
    if rows:
        parts.append(table(("fact", "value", "from", "verified"), rows))
    if lacking:
        parts.append("\n".join(lacking))
    return "\n\n".join(parts)


def _rule(rule: Rule, facts: Mapping[str, list[Fact]]) -> str:
    lines = [
        "| item | what is asked | what the folder says | what is to be written, and by whom |",
        "|---|---|---|---|",
    ]
    for item in rule.items:
        said = ", ".join(_link(group, facts[group]) for group in item.facts) or "nothing"
        lacking = any(not each.value for group in item.facts for each in facts[group])
        rest = "; ".join([item.missing] * bool(item.missing) + ["what is absent"] * lacking)
        missing = f"{item.writer}: {plain(rest)}" if rest else "nothing"
        lines.append(f"| {plain(item.place)} | {plain(item.asked)} | {said} | {missing} |")
    return f"## {rule.title}\n\n{rule.applies}\n\n" + "\n".join(lines)


def _link(group: str, facts: Sequence[Fact]) -> str:
    lacking = sum(1 for each in facts if not each.value)
    title = TITLES[group]
    link = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    if lacking == len(facts):
        return f"{link}: absent"
    return link + (f" ({lacking} absent)" if lacking else "")


def standing(fact: Fact, verdicts: Mapping[str, str] | None) -> str:
    """Return what the verdicts say of a fact: PASS only if every claim that covers it is PASS."""
    if not fact.claims:
        return NO_CLAIM
    if verdicts is None:
        return "not verified: dilocox verify was not run"
    judged = {name: verdicts.get(name, "not judged for this run") for name in fact.claims}
    bad = [name for name, verdict in judged.items() if verdict == "FAIL"]
    if bad:
        return f"NOT VERIFIED: {', '.join(bad)} FAIL"
    others = [f"{name} {verdict}" for name, verdict in judged.items() if verdict != "PASS"]
    if others:
        return f"not verified: {', '.join(others)}"
    return f"{', '.join(fact.claims)} PASS"


def without_paths(text: str, files: RunFiles) -> str:
    """Return a line with every path of this machine replaced by the path's last part.

    Paths with spaces are replaced where they lie in a folder that the report was told of.
    """
    for folder in (files.data_folder, files.folder):
        if folder is not None:
            for known in (folder.resolve(), folder.absolute()):
                if len(known.parts) > 1:
                    text = text.replace(str(known), known.name)
    return _PATH.sub(lambda found: Path(found.group()).name or "(a folder)", text)
