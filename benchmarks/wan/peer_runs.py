"""One measurement of the WAN benchmark: a peer's script, started once per site of a lab."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.wan.grid import (
    ALONE_WARM_UP,
    MODEL,
    SEQUENCE_LENGTH,
    VOCABULARY,
    Extent,
    Method,
    Settings,
    batch,
)
from benchmarks.wan.peers.peer import Outcome, PeerJob
from dilocox.tools.testbed import HUB, Lab, LabError

Row = dict[str, Any]
PEERS = "benchmarks.wan.peers"
LIGHTHOUSE_PORT, STORE_PORT = 29510, 29400
LIGHTHOUSE = ["--min_replicas", "{sites}", "--quorum_tick_ms", "10"]
"""Arguments of torchft's Lighthouse. It looks for a quorum every 10 ms instead of 100, in favour of
torchft."""
START_SECONDS, PATIENCE = 300.0, 10.0
"""A peer is aborted after `PATIENCE` times its expected time plus `START_SECONDS`."""


def missing(method: Method) -> str | None:
    """Return one line about a package that a peer lacks. None if nothing is missing."""
    if method.script.startswith("torchft") and importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install -c constraints.txt -e '.[peers]'"
    return None


def measure_peer(
    lab: Lab, folder: Path, method: Method, ratio: float, extent: Extent, step_seconds: float
) -> Row:
    """Measure a peer at all sites, and return the row. Raises `LabError`.

    The time limit follows from `step_seconds`, the rough time of a step.
    """
    cycles = method.cycles(ratio, extent.least_steps)
    steps = (method.warm_up + cycles) * (method.inner_steps + ratio * method.bits / 32)
    limit = START_SECONDS + PATIENCE * (steps + method.dense_warm_up * ratio) * step_seconds
    told: Settings = {"sync_every": method.inner_steps, **method.settings}
    job = peer_job(lab, warm_up=method.warm_up, cycles=cycles, **told)
    with contextlib.ExitStack() as stack:
        if method.script.startswith("torchft"):
            stack.enter_context(_lighthouse(lab, folder))
        outcomes = _everywhere(lab, method.script, job, folder, limit)
    return peer_row(outcomes)


def measure_alone(lab: Lab, folder: Path, extent: Extent) -> Row:
    """Measure the peers' loop at all sites without exchange. Raises `LabError`."""
    job = peer_job(lab, warm_up=ALONE_WARM_UP, cycles=extent.least_steps)
    return peer_row(_everywhere(lab, "alone", job, folder, limit=10 * START_SECONDS))


def peer_job(lab: Lab, **told: Any) -> PeerJob:
    """Return the job of a peer, with the benchmark's model and tokens per step."""
    sites = len(lab.sites)
    return PeerJob(
        model={**MODEL, "vocab_size": VOCABULARY},
        batch=batch(sites),
        sequence_length=SEQUENCE_LENGTH,
        sites=sites,
        **told,
    )


def peer_row(outcomes: Sequence[Outcome]) -> Row:
    """Return the row of a peer: rates of all sites together, bytes of one site and cycle."""
    first = outcomes[0]
    return {
        "tokens_per_second": sum(each.tokens / each.seconds for each in outcomes),
        "seconds": statistics.fmean(each.seconds for each in outcomes),
        "steps": first.steps,
        "inner_steps": first.steps / first.cycles,
        "payload_bytes": statistics.fmean(each.payload_bytes for each in outcomes) / first.cycles,
        "wire_bytes": statistics.fmean(each.wire_bytes for each in outcomes) / first.cycles,
    }


def _everywhere(lab: Lab, script: str, job: PeerJob, folder: Path, limit: float) -> list[Outcome]:
    """Run a module of `PEERS` at every site at the same time, and return their outcomes."""
    lab.verify()
    file = folder / "peer.json"
    job.save(file)
    logs = [folder / f"peer-{site}.log" for site in lab.sites]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (site, log) in enumerate(zip(lab.sites, logs, strict=True)):
            process = lab.start(
                site,
                [sys.executable, "-m", f"{PEERS}.{script}", "--job", str(file)],
                env=environment(lab, site, rank),
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w", encoding="utf-8")),
            )
            stack.callback(_end, process)
            processes.append(process)
        end = time.monotonic() + limit
        return [
            _outcome(script, site, process, log, end)
            for site, process, log in zip(lab.sites, processes, logs, strict=True)
        ]


def environment(lab: Lab, site: str, rank: int) -> dict[str, str]:
    """Return the environment of a peer: torchrun's variables, addresses, torchft's Lighthouse."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(common.ROOT), os.environ.get("PYTHONPATH")))
        ),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(lab.sites)),
        "MASTER_ADDR": lab.address(lab.sites[0]),
        "MASTER_PORT": str(STORE_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "SITE_ADDRESS": lab.address(site),
        "TORCHFT_LIGHTHOUSE": f"http://{lab.address(HUB)}:{LIGHTHOUSE_PORT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _outcome(
    peer: str, site: str, process: subprocess.Popen[str], log: Path, end: float
) -> Outcome:
    try:
        printed, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise LabError(f"{peer} at {site} has not ended in time") from None
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not lines:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        why = said[0] if said else f"exit code {process.returncode}"
        raise LabError(f"{peer} at {site} has failed: {why}")
    return Outcome(**json.loads(lines[-1]))


@contextlib.contextmanager
def _lighthouse(lab: Lab, folder: Path) -> Iterator[None]:
    """Run torchft's coordinator, on the host that otherwise has the coordinator of dilocox."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    arguments = [argument.format(sites=len(lab.sites)) for argument in LIGHTHOUSE]
    with (folder / "lighthouse.log").open("w", encoding="utf-8") as log:
        process = lab.start(
            HUB,
            [str(program), "--bind", f"0.0.0.0:{LIGHTHOUSE_PORT}", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
