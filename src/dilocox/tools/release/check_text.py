"""Writes `CHECK.md` of a published run: the files of its folder, and how to check them. Pure."""

from __future__ import annotations

from dilocox.record.verify.verify import Report
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.page import Page

CHECK = "CHECK.md"
_FILES = (
    ("report.html", "the run's page; it needs no network"),
    ("run.toml", "the run file that all sites agreed on, without folders, addresses and devices"),
    ("metrics.jsonl, summary.json, ledger.json", "what happened, and who was given what text"),
    ("record/", "the signed log, audits, and in `store/` every payload that the replay needs"),
    ("model/", "the weights, as a Hugging Face folder"),
    ("data/croissant.json", "what the text was: sources, licences, SHA-256 of every file"),
)


def check_text(page: Page, report: Report, files: RunFiles) -> str:
    """Return the text of `CHECK.md`. `report`: verdicts of the publisher's own verification."""
    manifest = files.record.course.manifest if files.record else {}
    versions = manifest.get("versions")
    version = str(versions.get("dilocox", "")) if isinstance(versions, dict) else ""
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in _FILES)
    verdicts = "\n".join(
        f"| {each.claim.name} | {each.verdict} | {_cell(each.claim.proves)} |"
        for each in report.findings
    )
    return f"""\
# How to check this run

This folder is a run of dilocox: several sites trained one model, and exchanged compressed
updates. With it anybody can repeat every outer step, from the start to these weights, bit for bit,
on a machine without a GPU.

| file | what it is |
|---|---|
{rows}

## Commands

The run was made with dilocox {version or "of an unknown version"} (digest of its code:
`{manifest.get("code", "unknown")}`). Get that version from its authors. In this folder:

```
dilocox verify .
```

Of a copy on a web server, without downloading it first:

```
dilocox verify https://HOST/FOLDER
```

Exit code 0 means that all required claims PASS. The command says of each claim what it proves and
what it does not. Whoever has the token files can add `--data FOLDER`, and ask which documents the
model has seen: `dilocox data show . --data FOLDER`.

**Compare the log's key** with what the run's owner tells you some other way than this file:

```
dilocox verify . --key '{report.log}'
```

**Keep the log's checkpoint** in a file, and see later that the log has only grown:
`dilocox verify . --seen FILE`.

```
{report.checkpoint.strip()}
```

## What the publisher's machine found

These verdicts are the publisher's word. The commands above give yours.

| claim | verdict | what it proves |
|---|---|---|
{verdicts}

The run's id is `{report.run}`; the page was made {page.made}. What happened inside a site is
proved by audits alone. An audit also needs the text, and the states of rounds, which are not in
this folder.
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
