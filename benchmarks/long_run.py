"""Measures a long run's cost for its coordinator (memory, disk, restart) and for `verify`.

The real coordinator, recorder, notary and log on disk go through the rounds of 8 sites of 8 ranks,
without training and without a network. A site has 2 stages x 4 shards, with 4 fragments a stage. So
a round has 8 exchanges and 520 signed statements. All sites are simulated in the coordinator's
process, so `seconds` and `memory_mb` of the rows include their part. A checkpoint is written every
50 rounds. Afterwards, each in a new process, the coordinator is restarted on the run folder, and
the record is read and judged as `dilocox verify` does before it opens payloads. `disk_seconds` is
the time in which the coordinator's thread waited for the disk: syncs of the record, and events that
must survive a power cut. `disk_longest_ms` is the longest such wait.

`--rounds N` sets the number of rounds (default 200, with --quick 20). A round takes about 0.4 s of
one core.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.identity import new_request
from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.coordinator.server.event_log import _SOFT, EventLog
from dilocox.coordinator.server.refusals import Caller
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.service import Coordinator
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance, OwnFacts, digest_of_entry
from dilocox.record.writer.exchange_statements import commitment, contribution
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.version import __version__

SITES = tuple("abcdefgh")
STAGES, SHARDS, FRAGMENTS = 2, 4, 4
PLACES = [(i, j) for i in range(STAGES) for j in range(SHARDS)]
CHECKPOINT_EVERY = 50
ROWS = 10
"""Number of rows of the run, at even distances."""
LOOK = 0.2
"""Seconds between two readings of the children's memory."""


def run_config(folder: Path, rounds: int) -> RunConfig:
    """Return the run file of the simulated run, whose run folder is `folder`."""
    return resolve_run(
        {
            "run": {"name": "long", "folder": str(folder)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"stages": STAGES, "shards": SHARDS, "batch_size": 8, "micro_batch_size": 1},
            "outer": {"rounds": rounds, "inner_steps": 4, "fragments": FRAGMENTS},
            "control": {"adapt": "off"},
            "sites": {name: {} for name in SITES},
        }
    )


def opened(config: RunConfig) -> tuple[Coordinator, TransparencyLogSink, RunMetrics]:
    """Open the coordinator, its record and its metrics, as `dilocox coordinator` does."""
    config.folder.mkdir(parents=True, exist_ok=True)
    folder = config.folder / "coordinator"
    recorder = RunMetrics(config, config.folder, lambda record: None)
    notary = TransparencyLogSink.open(config, folder, recorder.message)
    notary.writer.before_sync = recorder.sync
    core = Coordinator(
        config,
        folder,
        listener=RunListener(
            on_report=recorder.report,
            on_message=recorder.happened,
            on_plan=lambda plan: recorder.plan(plan.model_dump(mode="json")),
        ),
        notary=notary,
        now=lambda: 0.0,
    )
    return core, notary, recorder


class Sites:
    """Sends the calls of all ranks to a coordinator, one after the other."""

    def __init__(self, core: Coordinator, run: str) -> None:
        self.core, self.run = core, run
        self.signers = {n: s.Signer.from_hex(f"{i:02x}" * 32) for i, n in enumerate(SITES, 1)}
        self.ranks = {
            site: [
                m.RankId(site=site, stage=i, shard=j) for i in range(STAGES) for j in range(SHARDS)
            ]
            for site in SITES
        }

    def start(self) -> None:
        """Enrol all sites, and report all ranks as ready."""
        versions = m.Versions(dilocox=__version__, torch="2.13.0", python="3.12.1")
        _, csr = new_request("anyone")
        issues = self.core.state.token_issues
        for site in SITES:
            self.core.enrol(
                m.EnrolRequest(
                    site=site, token=str(self.core.tokens.of(site, issues[site])),
                    run_digest=self.core.config.digest(), versions=versions, stages=STAGES,
                    shards=SHARDS, csr=csr, record_key=self.signers[site].public,
                )
            )  # fmt: skip
            self.accept(site, versions)
        for rank in (rank for ranks in self.ranks.values() for rank in ranks):
            self.core.ready(m.ReadyRequest(rank=rank))

    def accept(self, site: str, versions: m.Versions) -> None:
        """Sign the run's manifest for a site."""
        signer, entry = self.signers[site], self.core.witness.manifest
        facts = OwnFacts(None, None, "1" * 64, versions.named())
        said = Acceptance(site, 1, signer.public, digest_of_entry(entry), facts, 0)
        text = signer.sign(said.statement(self.run))
        self.core.witness.state(m.StateRequest(rank=self.ranks[site][0], statement=text))

    def round(self, number: int) -> None:
        """Play one round: its plan, exchanges, reports, and a checkpoint if one is due."""
        plan = self.core.plan(number, Caller(SITES[0], 1)).plan
        assert plan is not None, number
        keys = [
            ExchangeKey.outer(number, i, f) for i in range(STAGES) for f in range(plan.fragments)
        ]
        for key in keys:
            self.exchange(key)
        for site in SITES:
            for rank in self.ranks[site]:
                self.core.round_done(m.RoundDoneRequest(rank=rank, round=number))
            self.core.report(m.ReportRequest(rank=self.ranks[site][0], round=number,
                                             metrics=metrics(number)))  # fmt: skip
        if number % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            for rank in (rank for ranks in self.ranks.values() for rank in ranks):
                said = m.CheckpointRequest(
                    rank=rank, tick=plan.first_tick + 2, round=number, slot=2,
                    digests={"files.json": "0" * 64},
                )  # fmt: skip
                self.core.saves.wrote(said)
        self.core.expire()

    def exchange(self, key: ExchangeKey) -> None:
        """Send the commitments of all ranks of a stage to one exchange, then their votes."""
        ranks = [r for ranks in self.ranks.values() for r in ranks if r.stage == key.stage]
        digests = {
            (r.site, r.shard): hashlib.sha256(f"{key.text} {r.site} {r.shard}".encode()).hexdigest()
            for r in ranks
        }
        for rank in ranks:
            digest = digests[rank.site, rank.shard]
            text = self.signers[rank.site].sign(commitment(self.run, rank, key, digest, digest))
            self.core.begin(m.BeginRequest(key=key.text, rank=rank, commitment=text))
        for rank in ranks:
            digest = digests[rank.site, rank.shard]
            signed = self.signers[rank.site].sign(contribution(self.run, rank, key, 1, digest))
            self.core.vote(
                m.VoteRequest(
                    key=key.text, rank=rank, attempt=1, wait=0.0, held=list(SITES),
                    digests={rank.site: digest}, statement=signed,
                    opinions={n: RankOpinion(norm=1000, cosine=500) for n in SITES},
                )
            )  # fmt: skip


def metrics(number: int) -> dict[str, Any]:
    """Return the metrics that a site reports of a round."""
    return {
        "step": 4 * number + 4, "tokens": 16384, "seconds": 1.5, "tokens_per_second": 10922.7,
        "wait_share": 0.01, "payload_bytes": 10**6, "allreduce_bytes": 10**8,
        "ratio_per_transfer": 100.0, "members": len(SITES), "loss": 3.5,
        "anchor_digest": hashlib.sha256(str(number).encode()).hexdigest(),
        "waited_for": {}, "peak_memory_bytes": 10**9,
    }  # fmt: skip


def memory_mb() -> float:
    """Return the resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def disk_mb(folder: Path) -> dict[str, float]:
    """Return the size of the run's files on the disk in MB, by kind of file."""
    sizes = {"log_mb": 0.0, "events_mb": 0.0, "metrics_mb": 0.0}
    for name, key in (
        ("record/statements.jsonl", "log_mb"),
        ("coordinator/coordinator.sqlite", "events_mb"),
        ("metrics.jsonl", "metrics_mb"),
    ):
        path = folder / name
        sizes[key] = round(path.stat().st_size / 1e6, 2) if path.exists() else 0.0
    return sizes


class Disk:
    """Time that the coordinator's thread waits for the disk."""

    def __init__(self) -> None:
        self.calls, self.seconds, self.longest = 0, 0.0, 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, changed so that its time counts if the main thread calls it."""

        def noted(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                if threading.current_thread() is threading.main_thread():
                    took = time.perf_counter() - began
                    self.calls, self.seconds = self.calls + 1, self.seconds + took
                    self.longest = max(self.longest, took)

        return noted

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Count all writes in this block that have to survive a power cut."""
        append, hard, sync = EventLog.append, self.timed(EventLog.append), os.fsync

        def appended(log: EventLog, event: Any) -> None:
            (append if isinstance(event, _SOFT) else hard)(log, event)

        EventLog.append, os.fsync = appended, self.timed(sync)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            EventLog.append, os.fsync = append, sync  # type: ignore[method-assign]

    def row(self) -> common.Row:
        """Return the counts so far."""
        return {
            "disk_calls": self.calls, "disk_seconds": round(self.seconds, 2),
            "disk_longest_ms": round(self.longest * 1000, 1),
        }  # fmt: skip


def drive(config: RunConfig, rounds: int) -> list[common.Row]:
    """Play the rounds. Returns one row per tenth of the rounds."""
    core, notary, _ = opened(config)
    sites, rows, disk = Sites(core, notary.run), [], Disk()
    began, busy = time.perf_counter(), time.process_time()
    sites.start()
    every = max(1, rounds // ROWS)
    for number in range(rounds):
        with disk.noted():
            sites.round(number)
        if (number + 1) % every == 0:
            rows.append(
                {
                    "case": "run", "rounds": number + 1,
                    "seconds": round(time.perf_counter() - began, 1),
                    "processor_seconds": round(time.process_time() - busy, 1),
                    "memory_mb": round(memory_mb(), 1), **disk_mb(config.folder),
                    **disk.row(),
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    # The restart must find no clean end. So only the locks are released, as after a kill.
    notary.writer.release()
    core.close()
    return rows


def restarted(config: RunConfig) -> common.Row:
    """Start the coordinator on an existing run folder, and return time and memory as a row."""
    before, began, busy = memory_mb(), time.perf_counter(), time.process_time()
    core, notary, _ = opened(config)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    row = {
        "case": "restart", "rounds": core.state.next_round, "seconds": round(seconds, 2),
        "processor_seconds": round(busy, 2), "memory_mb": round(memory_mb(), 1),
        "peak_memory_mb": peak_mb(), "memory_before_mb": round(before, 1),
    }  # fmt: skip
    notary.close()
    core.close()
    return row


def verified(config: RunConfig) -> common.Row:
    """Read and judge the record without payloads, and return time and verdicts as a row."""
    from dilocox.record.verify.places import Places
    from dilocox.record.verify.verify import verify

    began, busy = time.perf_counter(), processor_seconds()
    with watched_children() as children:
        report = verify(Places(config.folder), lambda what, share: None)
    seconds, busy = time.perf_counter() - began, processor_seconds() - busy
    verdicts = {each.claim.name: each.verdict for each in report.findings}
    return {
        "case": "verify", "statements": report.statements, "seconds": round(seconds, 2),
        "statements_per_second": round(report.statements / seconds),
        "processor_seconds": round(busy, 2),
        "statements_per_processor_second": round(report.statements / busy),
        "peak_memory_mb": peak_mb(children),
        "log": verdicts["log"], "signatures": verdicts["signatures"],
    }  # fmt: skip


def processor_seconds() -> float:
    """Return CPU seconds of this process and of ended children that it has waited for."""
    return sum(os.times()[:4])


def _high_water(process: int | str) -> int:
    """Return the peak of the resident memory of a process in bytes; 0 if it has ended.

    Not `ru_maxrss`, which also counts the process that has started this one.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


@contextlib.contextmanager
def watched_children() -> Iterator[dict[int, int]]:
    """Collect the peaks of the children's resident memory in bytes, by process id.

    A thread reads them while the children run.
    """
    peaks: dict[int, int] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK):
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    for child in map(int, (task / "children").read_text().split()):
                        # A child that is being started still has this process's memory. So the
                        # last reading counts, not the largest.
                        peaks[child] = _high_water(child) or peaks.get(child, 0)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def peak_mb(children: Mapping[int, int] | None = None) -> float:
    """Return the peak of the resident memory of this process plus those of its children, in MB.

    `children`: bytes by process id, from `watched_children`.
    """
    return round((_high_water("self") + sum((children or {}).values())) / 1e6, 1)


def main() -> int:
    """Run all parts, print and write the rows. Returns the exit code."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--rounds", type=common.positive, metavar="N")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="keep the run there, anew")
    parser.add_argument("--part", choices=("restart", "verify"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = options.rounds or (20 if options.quick else 200)
    if options.part:
        config = run_config(options.folder, rounds)
        row = restarted(config) if options.part == "restart" else verified(config)
        print(json.dumps(row))
        return 0
    if options.folder and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder {options.folder}: is not empty; name a new folder")
    common.end_on_signals()
    with tempfile.TemporaryDirectory() as temporary:
        # The parts are started at the repository's root, where another folder has a short name.
        folder = (options.folder or Path(temporary) / "run").resolve()
        rows = drive(run_config(folder, rounds), rounds)
        for part in ("restart", "verify"):
            command = [
                sys.executable,
                "-m",
                "benchmarks.long_run",
                "--part",
                part,
                "--folder",
                str(folder),
            ]
            said = subprocess.run(
                [*command, "--rounds", str(rounds)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                cwd=common.ROOT,
            )
            rows.append(json.loads(said.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        # Not before the measurement: this imports torch, whose memory would count.
        on = common.machine()
        settings = {"sites": len(SITES), "stages": STAGES, "shards": SHARDS,
                    "fragments": FRAGMENTS, "checkpoint_every": CHECKPOINT_EVERY}  # fmt: skip
        common.write_json(options.json, "long_run", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
