"""Writes the page that a public run owes: what was trained, by whom, on what, for how much.

All figures come from the run that was fetched and verified, from the chain's account of it, and
from commands that the page names.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WATTS, PER_KWH = 65.0, 0.30
"""Of one machine, in watts; US dollars for one kWh. Put yours here."""
ETHER = 10**18


def write_pages(kept: Path, public: Path, facts: dict[str, Any]) -> Path:
    """Write `index.md` into `public`, and return its path.

    Args:
        kept: the run's folder, as `dilocox verify --keep` has left it.
        public: folder of the pages. It holds `report.html` already.
        facts: what the program has found: verdicts, account, claims, costs.
    """
    summary = json.loads((kept / "summary.json").read_text(encoding="utf-8"))
    records = [
        json.loads(line)
        for line in (kept / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    run = tomllib.loads((kept / "run.toml").read_text(encoding="utf-8"))
    parts = [
        head(summary, facts),
        verdicts(facts["verdicts"]),
        convergence(records),
        data(kept),
        members(facts, records),
        audits(kept),
        payments(facts),
        costs(summary, run, facts),
    ]
    (public / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    page = public / "index.md"
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return page


def table(heads: list[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def head(summary: dict[str, Any], facts: dict[str, Any]) -> str:
    """What the run was, and how to check it."""
    files, options = "[report](report.html), [run file](run.toml)", ""
    if not facts["small"]:
        files += ", [terms](terms.toml), [chain.json](chain.json), [policy for machines](tee.toml)"
        options = " --chain chain.json --rpc URL --tee tee.toml"
    trained = (
        f"{summary['tokens']:,} tokens at {summary['sites']} sites, {summary['rounds']} rounds"
    )
    losses = f"{summary['val_loss_first']:.4f} before, {summary['val_loss_last']:.4f} after"
    return f"""# The run {summary["name"]}

{trained}. Held-out loss {losses}.
Files: {files}. Check it yourself:

```sh
dilocox verify {shlex.quote(facts["url"])} --key '{facts["log_key"]}'{options}
```"""


def verdicts(found: dict[str, Any]) -> str:
    """The verdict on each claim."""
    rows = ((each["name"], each["verdict"], each["reason"]) for each in found["claims"])
    text = table(["claim", "verdict", "reason"], rows)
    return f"## Verdicts\n\nAs `dilocox verify` found them from the storage alone.\n\n{text}"


def convergence(records: list[dict[str, Any]]) -> str:
    """Losses and digests of checkpoints, by round."""
    evaluations = (each for each in records if each["kind"] == "evaluation")
    loss = {each["after_round"]: each["val_loss"] for each in evaluations}
    rows = [
        (
            each["round"], each["step"], f"{each['tokens']:,}", f"{each['loss']:.4f}",
            f"{loss[each['round']]:.4f}" if each["round"] in loss else "",
            f"`{each['anchor_digest'][:16]}`",
        )
        for each in records
        if each["kind"] == "round" and "site" not in each
    ]  # fmt: skip
    last = max(loss)
    if last not in (row[0] for row in rows):
        rows.append(("end", "", "", "", f"{loss[last]:.4f}", ""))
    heads = ["round", "step", "tokens", "loss", "held-out loss", "digest of the shared model"]
    return f"## Convergence and checkpoints\n\n{table(heads, rows)}"


def data(kept: Path) -> str:
    """Sources and licences of the text."""
    described = json.loads((kept / "data" / "croissant.json").read_text(encoding="utf-8"))
    rows = [
        ("name", described.get("name", "")),
        ("licence", ", ".join(described.get("license") or ["not stated"])),
    ]
    files = [each for each in described.get("distribution", []) if "sha256" in each]
    rows.append(("files with SHA-256", f"{len(files)}, in `data/croissant.json`"))
    return f"## Text\n\n{table(['', ''], rows)}"


def members(facts: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """The sites, and what each has trained."""
    rows = []
    for name in facts["sites"]:
        own = [r for r in records if r["kind"] == "round" and r.get("site") == name]
        tokens = sum(each["tokens"] for each in own)
        rows.append((name, len(own), own[0]["round"] if own else "", f"{tokens:,}"))
    text = table(["site", "rounds", "first round", "tokens that it reports"], rows)
    return f"## Members\n\n{text}"


def audits(kept: Path) -> str:
    """Verdicts of auditors, by site."""
    found: dict[tuple[str, str], int] = {}
    for file in sorted((kept / "record" / "audits").glob("*.json")):
        said = signed(file)
        who = (said["site"], said["verdict"])
        found[who] = found.get(who, 0) + 1
    rows = ((site, verdict, count) for (site, verdict), count in sorted(found.items()))
    return f"## Audits\n\n{table(['site', 'verdict', 'rounds'], rows)}"


def signed(file: Path) -> dict[str, Any]:
    """Return what a verdict's file says."""
    import base64

    envelope = json.loads(file.read_text(encoding="utf-8"))
    said: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
    return said


def payments(facts: dict[str, Any]) -> str:
    """What each site was paid for, as everybody can recount."""
    if "account" not in facts:
        return ""
    rows = [
        (each["site"], f"{float(each['tokens']):,.0f}", f"{int(each['wei']) / ETHER:.9f}",
         len(each["withheld"]))
        for each in facts["account"]["sites"]
    ]  # fmt: skip
    text = table(["site", "tokens that count", "coins", "rounds not paid"], rows)
    lines = ((name, "; ".join(text.splitlines())) for name, text in facts["claims"].items())
    said = "\n".join(f"- {name}: {text}" for name, text in lines)
    return f"## Payments\n\n{text}\n\n{said}\n- the lazy site: {facts['dispute']}"


def costs(summary: dict[str, Any], run: dict[str, Any], facts: dict[str, Any]) -> str:
    """Electricity of this run, and the comparison with a cluster for a large one."""
    hours, machines = summary["seconds"] / 3600.0, len(run["sites"])
    dollars = hours * machines * WATTS / 1000.0 * PER_KWH
    product = f"{hours:.3f} hours x {machines} machines x {WATTS:g} W x ${PER_KWH:g} a kWh"
    return f"""## Costs

- Electricity: {product} = ${dollars:.6f}.
- "95 % cheaper" is a computation. Repeat it with your own prices, here for a larger run:
  `{facts["costs_command"]}`
  {facts["costs"]}"""
