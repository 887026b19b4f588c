"""Audits on the machine that trained: an honest round twice, and a round of a site that cheats."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

CHEAT = "south"
ROUND = 1


def run(context: Context) -> None:
    """Three rows of one run, whose site `CHEAT` trains with other learning rates than it signs."""
    try:
        folder = _run(context)
    except Exception as error:
        text = " ".join(f"the run failed: {type(error).__name__}: {error}".split())[:300]
        for name in context.wanted:
            context.check(name, lambda: Outcome(False, text))
        return
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_audit, folder, None)
        second = pool.submit(_audit, folder, "north")
        both, again = first.result(), second.result()
    context.check("audit of an honest site", lambda: _judged(both, "north", "EXACT"))
    context.check("the same audit again", lambda: _judged(again, "north", "EXACT"))
    context.check("audit of a tampered site", lambda: _judged(both, CHEAT, "MISMATCH"))


def _run(context: Context) -> Path:
    path = sizes.run_file(
        context.folder, "audited", sizes.SITE[context.scale], context.shared, context.scale,
        outer={"rounds": 2, "inner_steps": 4, "slots": 4, "fragments": 2},
        record={"states_every": 1}, **runs.FIXED,
    )  # fmt: skip
    product.prepare(path, context.shared)
    with product.slower_learning(CHEAT):
        runs.train(path)
    return path.parent / "audited"


def _audit(folder: Path, site: str | None) -> dict[str, Any]:
    """`dilocox audit` of one round: its verdicts, or what it said instead."""
    words: list[str | Path] = ["audit", folder, "--round", str(ROUND), "--json"]
    began = time.monotonic()
    log = folder.with_name(f"audit-{site or 'all'}.log")
    done = runs.command(*words, *(["--site", site] if site else []), log=log)
    took = time.monotonic() - began
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"verdicts": [], "said": runs.last_line(done), "seconds": took}
    return {**found, "said": "", "seconds": took}


def _judged(found: dict[str, Any], site: str, expected: str) -> Outcome:
    verdict = next((v for v in found["verdicts"] if v["site"] == site), None)
    if verdict is None:
        return Outcome(False, found["said"] or f"no verdict about {site}")
    said = f"{verdict['verdict']}: {verdict['reason']}"[:300]
    return Outcome(verdict["verdict"] == expected, said, {"audit_seconds": found["seconds"]})
