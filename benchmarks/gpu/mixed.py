"""One run of a site on the GPU and a site on the CPUs, as two machines would join it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

SITES = {"north": "cuda", "south": "cpu"}
"""Device of each site. Without a GPU both compute on the CPU."""


def run(context: Context) -> None:
    """Measure two rows: a run with one site on the GPU and one on the CPU, and its verification."""
    path = sizes.run_file(
        context.folder, "mixed", sizes.MIXED[context.scale], context.shared, context.scale,
        device="auto", outer={"rounds": 3, "inner_steps": 4, "slots": 4, "fragments": 2},
        **runs.FIXED,
    )  # fmt: skip
    product.prepare(path, context.shared)
    context.check("mixed sites", lambda: _train(context, path))
    context.check(
        "mixed sites, verify",
        lambda: runs.verified(runs.there(path, "mixed", lambda: _train(context, path))),
    )


def _train(context: Context, path: Path) -> Outcome:
    folder = path.parent / "mixed"
    started: list[subprocess.Popen[Any]] = []
    try:
        hub = runs.begin("coordinator", path, log=context.folder / "coordinator.log")
        started.append(hub)
        endpoint = folder / "coordinator" / "endpoint.json"
        tokens = folder / "coordinator" / "tokens"
        runs.until(lambda: endpoint.exists() and tokens.exists(), hub, 60.0)
        url = json.loads(endpoint.read_text(encoding="utf-8"))["url"]
        for site, device in SITES.items():
            env = dict(os.environ)
            if device == "cpu":
                env["CUDA_VISIBLE_DEVICES"] = ""
            log = context.folder / f"{site}.log"
            started.append(
                runs.begin(
                    "join", url.removeprefix("https://"), "--site", site, "--run-file", path,
                    "--token-file", tokens / site, log=log, env=env,
                )
            )  # fmt: skip
        codes = [each.wait(runs.LONGEST) for each in reversed(started)]
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            each.wait()
    found = {f"{site}_tokens_per_second": _speed(folder, site) for site in SITES}
    where = "GPU and CPUs" if context.cuda else "both on the CPU: no GPU is here"
    said = where if not any(codes) else f"{where}; exit codes {codes}"
    return Outcome(not any(codes), said, found)


def _speed(folder: Path, site: str) -> float:
    return float(max(each["tokens_per_second"] for each in runs.rounds(folder, site)))
