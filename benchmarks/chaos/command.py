"""Measures the cost of faults: a seeded schedule of kills, cuts and full disks at three sites.

Three sites of two stages train together between network namespaces, on links of 20 Mbit/s. They
are started as users start them (`dilocox coordinator`, `dilocox join`). The run is made first
without faults, then with faults, one after another. A fault is injected when all sites
contribute; the next one when all contribute again. The seed decides the order of the kinds:

- `rank-kill`, `rank-stop`: SIGKILL or SIGSTOP of one rank of a site;
- `site-kill`: all processes of a site are killed, and its join command is run again;
- `joiner-kill`: the same, and the site is killed again while it fetches its state;
- `link-cut`: a site's link is cut for twice the heartbeat interval;
- `link-slow`: a site's link has a tenth of its rate for 10 s;
- `coordinator-kill`: SIGKILL of the coordinator, and the same command a second later;
- `disk-full`: a site's disk is full while a checkpoint is due;
- `rogue`: an unknown site tries to join with a false token, and sends noise to the coordinator.

Figures per fault: `stall_seconds` is the longest time without a round at any site without the
fault (at any site, if the coordinator had the fault), less the usual time of a round.
`recovery_seconds` is the time until every site has contributed to a round that began after the
fault. The row `run` has figures for all runs together: hangs, divergence (of the anchors that sites
show after the same round), rounds, and rounds of a site that were begun and discarded. It also has
the sequences trained on twice or not accounted for, and the held-out loss over that of the run
without faults.

`--beside` makes another, short run in place of all that: with a standby and a witness beside the
coordinator (`benchmarks.chaos.beside`).

A full run has 9 parts. Each part is a separate run with 12 faults and its own seed: more than 100
faults in total, and more than an hour. With --json every finished part is saved to
NAME-parts.json; started again, the benchmark continues with the missing parts. --quick is one
shorter part.

Needs root and iproute2; without them it prints one line and exits with code 3. It exits with 1 if
a run hung, diverged, or trained on a sequence twice.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.chaos import rows as chaos_rows
from benchmarks.chaos import run as chaos_run
from benchmarks.chaos.rows import Blow, Row
from benchmarks.chaos.run import HEARTBEAT, HUB, RATE, SITES, SMALL_DISK, HangError, Run
from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.errors import JoinError
from dilocox.tools.testbed import LabError, Network, unsupported_reason, verify_links, watchdog
from dilocox.tools.testbed.netns import inside

BEFORE = 3
"""Number of rounds that all sites complete together before a fault."""
SLOW_SECONDS = 10.0


def rank_kill(run: Run, site: str, draw: random.Random) -> None:
    """Kill one rank of the site."""
    ranks = run.ranks(site)
    chaos_run.kill([ranks[draw.choice(sorted(ranks))]])


def rank_stop(run: Run, site: str, draw: random.Random) -> None:
    """Stop one rank of the site, so that it hangs."""
    ranks = run.ranks(site)
    chaos_run.kill([ranks[draw.choice(sorted(ranks))]], signal.SIGSTOP)


def site_kill(run: Run, site: str, _draw: random.Random) -> None:
    """Kill all processes of a site, as a power cut does, and let the site join again."""
    run.kill(site)
    run.join(site)


def joiner_kill(run: Run, site: str, draw: random.Random) -> None:
    """Kill a site twice, the second time while it enters again."""
    before = run.said().count(f"{site} enters")
    site_kill(run, site, draw)
    run.until(lambda: run.said().count(f"{site} enters") > before, f"entering of {site}")
    site_kill(run, site, draw)


def link_cut(run: Run, site: str, _draw: random.Random) -> None:
    """Cut the network of a site for two heartbeats."""
    run.cut(site, down=True)
    time.sleep(2 * HEARTBEAT)
    run.cut(site, down=False)


def link_slow(run: Run, site: str, _draw: random.Random) -> None:
    """Make the line of a site ten times slower for `SLOW_SECONDS`."""
    run.network.shape({site: RATE / 10})
    time.sleep(SLOW_SECONDS)
    run.network.shape({site: RATE})


def coordinator_kill(run: Run, _site: str, _draw: random.Random) -> None:
    """Kill the coordinator, and start it again."""
    run.kill(HUB)
    time.sleep(1.0)
    run.start_coordinator()


def disk_full(run: Run, _site: str, _draw: random.Random) -> None:
    """Fill a disk until a checkpoint could not be written."""
    filler, before = run.folder(SMALL_DISK) / "filler", run.said().count("was not written")
    # The run itself may have filled the disk already. Then even creating the file fails.
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    try:
        run.until(
            lambda: run.over or run.said().count("was not written") > before,
            "word of a checkpoint that was not written",
        )
    finally:
        filler.unlink(missing_ok=True)


def rogue(run: Run, site: str, _draw: random.Random) -> None:
    """Let an unknown site try to join. Raises `HangError` if it is admitted."""
    host, port = run.address.rsplit(":", 1)
    tokens = run.config.folder / "coordinator" / "tokens"
    token = (tokens / site).read_text(encoding="ascii").strip()
    forged = JoinToken(JoinToken.parse(token).fingerprint, "0" * 32)
    with inside(run.network.namespace(HUB)):
        with socket.create_connection((host, int(port)), timeout=5.0) as noise:
            noise.sendall(b"\x16\x03\x01" + bytes(range(256)) * 64)
        try:
            enrol(
                f"https://{run.address}",
                str(forged),
                Applicant(site, run.config.digest(), stages=2, shards=1),
                timeouts=Timeouts.derive(run.config.network),
            )
        except JoinError:
            return
    raise HangError("a stranger with a token of its own was let in")


KINDS: dict[str, Callable[[Run, str, random.Random], None]] = {
    "rank-kill": rank_kill,
    "rank-stop": rank_stop,
    "site-kill": site_kill,
    "joiner-kill": joiner_kill,
    "link-cut": link_cut,
    "link-slow": link_slow,
    "coordinator-kill": coordinator_kill,
    "disk-full": disk_full,
    "rogue": rogue,
}


def schedule(seed: int, faults: int) -> list[tuple[str, str]]:
    """Return (kind, site) of each fault. Every kind comes once before any kind comes again.

    The schedule depends on the seed alone.
    """
    draw = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < faults:
        kinds = list(KINDS)
        draw.shuffle(kinds)
        found += [(kind, draw.choice(SITES)) for kind in kinds]
    struck = {"coordinator-kill": HUB, "disk-full": SMALL_DISK}
    return [(kind, struck.get(kind, site)) for kind, site in found[:faults]]


def all_contribute(run: Run, after: int) -> Callable[[], bool]:
    """Return a condition: all sites have reported a round above `after`, or the run is over."""
    return lambda: (
        run.over
        or all((rows := run.reported(site)) and rows[-1]["round"] > after for site in SITES)
    )


def torment(run: Run, faults: Iterable[tuple[str, str]], seed: int, blows: list[Blow]) -> None:
    """Inject `faults` in order until all are injected or the run is over.

    Every injected fault is added to `blows`. Raises `HangError` if the run hangs.
    """
    draw = random.Random(seed)
    for kind, site in faults:
        run.until(all_contribute(run, run.last_round() + BEFORE), "rounds of all sites")
        if run.over:
            break
        began = time.time()
        KINDS[kind](run, site, draw)
        run.until(all_contribute(run, run.last_round() + 1), f"recovery from {kind} at {site}")
        if run.over:
            break
        blows.append(Blow(kind, site, began, time.time()))
        common.say(f"{kind} at {site}: all contribute again after {time.time() - began:.1f} s")


COLUMNS: dict[str, Any] = {
    "fault": "s",
    "count": "d",
    "stall_seconds": ".2f",
    "stall_worst": ".2f",
    "recovery_seconds": ".1f",
    "recovery_worst": ".1f",
    "hangs": "d",
    "diverged": "d",
    "rounds": "d",
    "discarded": "d",
    "tokens_doubled": "d",
    "tokens_lost": "d",
    "loss_ratio": ".4f",
}


@dataclass(frozen=True)
class Extent:
    """Number of parts, faults and rounds."""

    seed: int
    """Seed of the first part. Each further part has the next seed."""
    parts: int
    faults: int
    """Largest number of faults per part."""
    rounds: int
    """Rounds per part."""


QUICK = Extent(0, 1, 9, 200)
FULL = Extent(0, 9, 12, 300)


class Soak:
    """One call of the benchmark: the parts measured so far, and their file."""

    def __init__(self, extent: Extent, results: Path | None) -> None:
        self.extent = extent
        self._file = results and results.with_name(f"{results.stem}-parts.json")
        self.on = common.machine()
        self.reference: float | None = None
        """Held-out loss of the undisturbed run."""
        self.parts: list[Row] = []
        self.faults: list[Row] = []
        if self._file is not None and self._file.exists():
            self._take_up(self._file)

    def _take_up(self, file: Path) -> None:
        found = json.loads(file.read_text(encoding="utf-8"))
        before = found["settings"]
        for key in ("seed", "faults", "rounds"):
            if before[key] != getattr(self.extent, key):
                common.say(f"{file}: was made with --{key} {before[key]}; name another file")
                sys.exit(2)
        self.reference = before["reference"]
        self.parts = [row for row in found["rows"] if "fault" not in row]
        self.faults = [row for row in found["rows"] if "fault" in row]

    def keep(self) -> None:
        """Write all finished parts to the file."""
        if self._file is None:
            return
        settings = {**vars(self.extent), "reference": self.reference}
        common.write_json(self._file, "chaos-parts", self.on, settings, [*self.parts, *self.faults])

    def run(self, root: Path) -> None:
        """Measure the missing parts.

        Raises `LabError` and `CommandError`, and `HangError` if the undisturbed run hangs.
        """
        extent = self.extent
        missing = [
            part for part in range(extent.parts) if all(row["part"] != part for row in self.parts)
        ]
        if not missing:
            return
        file = chaos_run.run_file(root, "data", extent.rounds)
        common.say("preparing token files")
        common.run_dilocox("data", "prepare", str(file))
        with watchdog.watched(), Network([HUB, *SITES]) as network:
            network.shape(dict.fromkeys(SITES, RATE))
            verify_links(network)
            if self.reference is None:
                with started(network, root, "undisturbed", extent.rounds) as run:
                    self.reference = float(run.finish()["val_loss_last"])
                common.say(f"undisturbed: held-out loss {self.reference:.4f}")
                self.keep()
            for part in missing:
                self._part(network, root, part, self.reference)
                network.shape(dict.fromkeys(SITES, RATE))

    def _part(self, network: Network, root: Path, part: int, reference: float) -> None:
        extent, began = self.extent, time.monotonic()
        seed = extent.seed + part
        blows: list[Blow] = []
        with started(network, root, f"disturbed-{part}", extent.rounds) as run:
            try:
                torment(run, schedule(seed, extent.faults), seed, blows)
                summary = run.finish()
                row = chaos_rows.part_row(summary, run.ledger(), reference, run.records())
            except HangError as error:
                common.say(f"part {part}: {error}")
                row = dict(chaos_rows.HUNG)
            faults = chaos_rows.fault_rows(blows, run.records())
        self.faults += [{"part": part, **fault} for fault in faults]
        seconds = round(time.monotonic() - began)
        about = {"part": part, "seed": seed, "commit": common.commit(), "seconds": seconds}
        self.parts.append({**about, **row})
        self.keep()
        common.say(f"part {part}: {len(faults)} faults, {seconds} s")

    def rows(self) -> list[Row]:
        """Return the result rows of the parts measured so far."""
        return chaos_rows.rows_of(list(KINDS), self.faults, self.parts)


@contextlib.contextmanager
def started(network: Network, root: Path, name: str, rounds: int) -> Iterator[Run]:
    """Start a run on the network, and end it when the context is left."""
    with chaos_run.small_disk(root / SMALL_DISK):
        run = Run(network, root, name, rounds)
        try:
            yield run
        finally:
            run.close()


def main() -> int:
    """Measure what is missing, print and write. Returns the exit code."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seed", type=int, help="of the schedule (0)")
    parser.add_argument("--parts", type=int, help="runs (1 with --quick, else 9)")
    parser.add_argument("--faults", type=int, help="per part at most (9 with --quick, else 12)")
    parser.add_argument("--rounds", type=int, help="per part (200 with --quick, else 300)")
    parser.add_argument("--beside", action="store_true", help="a run with standby and witness")
    options = parser.parse_args()
    for name in ("seed", "parts", "faults") if options.beside else ():
        if getattr(options, name) is not None:
            parser.error(f"--{name}: has no meaning with --beside; leave it out")
    common.end_on_signals()
    if common.cannot("chaos", unsupported_reason()):
        return common.CANNOT
    if options.beside:
        from benchmarks.chaos import beside

        return beside.main(options.rounds or beside.ROUNDS, options.json)
    usual = QUICK if options.quick else FULL
    extent = Extent(
        options.seed or 0,
        options.parts or usual.parts,
        options.faults or usual.faults,
        options.rounds or usual.rounds,
    )
    soak = Soak(extent, options.json)
    root = Path(tempfile.mkdtemp(prefix="dilocox-chaos-"))
    try:
        soak.run(root)
    except (LabError, HangError, common.CommandError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    rows = soak.rows()
    print(common.table(rows, COLUMNS))
    if options.json:
        about = {**vars(extent), "heartbeat": HEARTBEAT, "line_mbit": RATE / 1e6}
        common.write_json(options.json, "chaos", soak.on, about, rows)
    return 1 if any(rows[-1][key] for key in ("hangs", "diverged", "tokens_doubled")) else 0
