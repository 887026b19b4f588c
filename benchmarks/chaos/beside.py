"""A run with a standby and a witness beside its coordinator, which die and hang one after another.

The faults, in this order; between two of them all sites complete rounds together:

- `witness-kill`: the witness is killed and comes back; each checkpoint of the log goes to it;
- `standby-stop`: the standby hangs (SIGSTOP) until it is given up, and then catches up;
- `standby-kill`: the standby is killed and comes back;
- `take-over`: the coordinator is killed for good, and the standby takes over.

At the end the witness must have cosigned the log of the coordinator that took over, as the
continuation of the first one's.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.chaos import command
from benchmarks.chaos import rows as chaos_rows
from benchmarks.chaos import run as chaos_run
from benchmarks.chaos.rows import Blow
from benchmarks.chaos.run import HEARTBEAT, HUB, RATE, SITES, HangError, Record, Run
from dilocox.config.run_config import load_run
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import read_log
from dilocox.record.verify.witness_claims import Witnesses, judge_witnesses
from dilocox.tools.testbed import LabError, Network, verify_links, watchdog
from dilocox.tools.testbed.netns import inside
from dilocox.tools.witness.asking import WitnessAddress, ask
from dilocox.tools.witness.folder import create

SPARE = "spare"
"""The host of the standby and the witness."""
ROUNDS = 90
PORT, WITNESS_PORT = 7777, 8643
KEYS = ("authority.pem", "server.pem", "operator.json", "token-secret", "record-key")


class GuardedRun(Run):
    """A run whose coordinator has a standby, and whose log a witness cosigns."""

    def __init__(self, network: Network, root: Path, name: str, rounds: int) -> None:
        self.spare = network.address(SPARE)
        self.witness_folder = root / "witness"
        key = create(self.witness_folder, "witness.example/1").key
        self.witness = WitnessAddress(key, f"http://{self.spare}:{WITNESS_PORT}")
        super().__init__(network, root, name, rounds)

    def prepared(self) -> None:
        """Start the standby and the witness."""
        first, second = self.config.folder, self.root / SPARE / self.config.run.name
        (second / "coordinator").mkdir(parents=True, mode=0o700)
        for name in KEYS:
            shutil.copy2(first / "coordinator" / name, second / "coordinator" / name)
        self.first_address = self.address
        self.address = f"{self.address},{self.spare}:{PORT}"
        key = self.until(lambda: _text(first / "record" / "log.pub"), "the log's key")
        self._run_here("trust", str(self.witness_folder), key.strip())
        self.start_witness()
        self.start_standby()

    def start_coordinator(self) -> None:
        """Start the first coordinator."""
        folder = self.config.folder
        ask_ = [sys.executable, "-m", "dilocox", "witness", "ask", str(folder), "--witness",
                str(self.witness.key), self.witness.url]  # fmt: skip
        self._start(
            HUB, "coordinator", str(self.file), "--set", self._host,
            "--set", f"network.port={PORT}", "--set", f"record.anchor={json.dumps(ask_)}",
        )  # fmt: skip

    def start_standby(self, *words: str) -> None:
        """Start the process on the spare host; by default it follows."""
        place = f"run.folder={self.root / SPARE}/{{name}}"
        self._start(
            SPARE, "coordinator", str(self.file), "--set", f"network.host={self.spare}",
            "--set", f"network.port={PORT}", "--set", place,
            *(words or ("--standby-of", self.first_address)),
        )  # fmt: skip

    def start_witness(self) -> None:
        """Start the witness on the spare host."""
        self._start_as("witness", SPARE, "witness", "serve", str(self.witness_folder),
                       "--host", self.spare, "--port", str(WITNESS_PORT))  # fmt: skip

    def signal(self, name: str, number: int) -> None:
        """Send a signal to all processes of the standby or the witness."""
        chaos_run.kill(chaos_run.tree(self._processes[name].pid), number)

    def taken_over(self) -> None:
        """Let the spare host's folder be that of the run from now on."""
        place = f"run.folder={self.root / SPARE}/{{name}}"
        self.config = load_run(self.file, [self._host, place])
        self._seen, self._read = [], 0
        del self._processes[HUB]

    def judge(self) -> str:
        """Have the log's end cosigned, and return what the claim `witnesses` says of it."""
        with inside(self.network.namespace(SPARE)):
            (answer,) = ask(self.config.folder, [self.witness])
        if answer.trouble:
            raise HangError(f"the witness does not cosign: {answer.trouble}")
        record = self.config.folder / "record"
        content = read_log(record)
        asked = Witnesses((self.witness.key,), 1)
        return judge_witnesses(asked, record, NoteKey.parse(content.public), content.entries)

    def finish(self) -> Record:
        """Wait for the end of the run, which the witness outlives."""
        witness = self._processes.pop("witness")
        try:
            return super().finish()
        finally:
            self._processes["witness"] = witness

    def _start(self, host: str, *arguments: str) -> None:
        """Start a process; the run has a record, which the other runs here do without."""
        recorded = ("--set", "record.enabled=true") if arguments[0] != "witness" else ()
        super()._start(host, *arguments, *recorded)

    def _run_here(self, *words: str) -> None:
        self._start_as("once", SPARE, "witness", *words)
        self._processes.pop("once").wait()

    def _start_as(self, name: str, host: str, *arguments: str) -> None:
        """Start a process on a host under another name."""
        before = self._processes.pop(host, None)
        self._start(host, *arguments)
        self._processes[name] = self._processes.pop(host)
        if before is not None:
            self._processes[host] = before


def witness_kill(run: GuardedRun) -> None:
    """Kill the witness, and start it again after some rounds."""
    run.kill("witness")
    run.until(lambda: "record.anchor: " in run.said(), "word of a witness that is gone")
    run.start_witness()


def standby_stop(run: GuardedRun) -> None:
    """Stop the standby until it is given up, and let it go on."""
    before = run.said().count("a standby is in step")
    run.signal(SPARE, signal.SIGSTOP)
    run.until(lambda: "the standby did not take event" in run.said(), "word of a dead standby")
    run.signal(SPARE, signal.SIGCONT)
    run.until(lambda: run.said().count("a standby is in step") > before, "a standby in step")


def standby_kill(run: GuardedRun) -> None:
    """Kill the standby, and start it again. It may be back before it is given up."""
    before = run.said().count("standby: follows")
    run.kill(SPARE)
    run.start_standby()
    run.until(lambda: run.said().count("standby: follows") > before, "a standby that follows")
    run.until(lambda: _in_step(run.said()), "a standby in step")


def _in_step(said: str) -> bool:
    return said.rfind("a standby is in step") > said.rfind("the standby did not take event")


def take_over(run: GuardedRun) -> None:
    """Kill the coordinator for good, and let the standby take over."""
    run.kill(HUB)
    run.kill(SPARE)
    run.start_standby("--take-over", "--gone")
    run.taken_over()


KINDS: Sequence[tuple[str, Callable[[GuardedRun], None]]] = (
    ("witness-kill", witness_kill), ("standby-stop", standby_stop),
    ("standby-kill", standby_kill), ("take-over", take_over),
)  # fmt: skip


def torment(run: GuardedRun) -> list[Blow]:
    """Inject all faults, and return them. Raises `HangError` if the run hangs."""
    blows = []
    run.until(lambda: "a standby is in step" in run.said(), "a standby in step")
    for kind, fault in KINDS:
        ready = command.all_contribute(run, run.last_round() + command.BEFORE)
        run.until(ready, "rounds of all sites")
        began, last = time.time(), run.last_round()
        fault(run)
        run.until(command.all_contribute(run, last + 1), f"recovery from {kind}")
        if run.over:
            raise HangError(f"the run ended before {kind}: give more --rounds")
        blows.append(Blow(kind, HUB, began, time.time()))
        common.say(f"{kind}: all contribute again after {time.time() - began:.1f} s")
    return blows


def main(rounds: int, results: Path | None) -> int:
    """Make the run, print and write. Returns the exit code."""
    root = Path(tempfile.mkdtemp(prefix="dilocox-chaos-"))
    on, began = common.machine(), time.monotonic()
    try:
        common.run_dilocox("data", "prepare", str(chaos_run.run_file(root, "data", rounds)))
        with watchdog.watched(), Network([HUB, SPARE, *SITES]) as network:
            network.shape(dict.fromkeys(SITES, RATE))
            verify_links(network)
            run = GuardedRun(network, root, "guarded", rounds)
            try:
                blows = torment(run)
                summary = run.finish()
                told = run.judge()
                ledger, records = run.ledger(), run.records()
            finally:
                run.close()
    except (LabError, HangError, common.CommandError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    faults = chaos_rows.fault_rows(blows, records)
    seconds = round(time.monotonic() - began)
    # There is no run without faults to compare the loss with: its ratio means nothing here.
    row = chaos_rows.part_row(summary, ledger, float(summary["val_loss_last"]), records)
    part = {"part": 0, "seconds": seconds, **row, "loss_ratio": None}
    found = chaos_rows.rows_of([kind for kind, _ in KINDS], faults, [part])
    common.say(f"witness: {told}")
    print(common.table(found, command.COLUMNS))
    if results:
        about = {"rounds": rounds, "heartbeat": HEARTBEAT, "line_mbit": RATE / 1e6, "witness": told}
        common.write_json(results, "chaos-beside", on, about, found)
    return 1 if any(found[-1][key] for key in ("diverged", "tokens_doubled", "tokens_lost")) else 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
