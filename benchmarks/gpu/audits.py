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
    """Measure three rows of one run. The site `CHEAT` trains with other learning rates than it
    signs."""
    try:
        folder = _run(context)
    except Exception as error:
        text = " ".join(f"the run failed: {type(error).__name__}: {error}".split())[:300]
        for name in context.wanted:
            context.check(name, lambda: Outcome(False, text))
        return
    with ThreadPoolExecutor(2) as pool:
        cheat = pool.submit(_audit, folder, CHEAT, 1)
        # The honest audits run one after the other, so that the second finds compiled code.
        context.check(
            "audit of an honest site", lambda: _judged(_audit(folder, "north", 1), "EXACT")
        )
        context.check("audit of a tampered site", lambda: _judged(cheat.result(), "MISMATCH"))
        context.check("the same audit again", lambda: _judged(_audit(folder, "north", 2), "EXACT"))


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


def _audit(folder: Path, site: str, number: int) -> dict[str, Any]:
    """Run `dilocox audit` for one round. Returns its verdict, or its last line if it has none."""
    log = folder.with_name(f"audit-{site}-{number}.log")
    began = time.monotonic()
    words = ("audit", folder, "--round", str(ROUND), "--site", site, "--json")
    done = runs.command(*words, log=log)
    took = time.monotonic() - began
    try:
        (found,) = json.loads(done.stdout)["verdicts"]
    except ValueError:
        found = {"verdict": "", "reason": runs.last_line(done)}
    return {**found, "seconds": took}


def _judged(found: dict[str, Any], expected: str) -> Outcome:
    said = ": ".join(filter(None, (found["verdict"], found["reason"])))[:300]
    return Outcome(found["verdict"] == expected, said, {"audit_seconds": found["seconds"]})
