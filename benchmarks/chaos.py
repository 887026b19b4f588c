"""What faults cost a run: a seeded schedule of kills, cuts and full disks against three real sites.

Three sites of two stages train together between network namespaces, started as their users would
(`dilocox coordinator`, `dilocox join`), on lines of 20 Mbit/s. First the run is made undisturbed,
then again with faults, one after the other: each is struck when all sites contribute, and the
next when they do again. The kinds come in an order that the seed decides:

- `rank-kill`, `rank-stop`: SIGKILL or SIGSTOP of one rank of a site;
- `site-kill`: all processes of a site die, and its join line is typed again;
- `joiner-kill`: the same, and the site is killed again while it fetches its state;
- `link-cut`: a site's line is gone for twice the heartbeat; `link-slow`: a tenth of it for 10 s;
- `coordinator-kill`: SIGKILL, and the same command a second later;
- `disk-full`: a site's disk is full while a checkpoint falls due;
- `rogue`: a stranger tries to join with a token of its own, and sends noise to the coordinator.

Per fault: `stall_seconds`, the longest time without a round of any site that was not struck (of all
sites where the coordinator was), less the usual time of a round; `recovery_seconds`, until every
site has contributed to a round that began after the fault. For the whole run (row `run`): hangs,
divergence (the coordinator compares all anchors every round), rounds, rounds of a site that were
begun and thrown away, sequences trained on twice or accounted for nowhere, and held-out loss over
that of the undisturbed run.

Needs root and iproute2: else one line says so, exit code 3. It exits with 1 if a run hung,
diverged, or trained on a sequence twice.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chaos_run
import common
from chaos_run import HEARTBEAT, HUB, RATE, SITES, SMALL_DISK, HangError, Record, Run

from dilocox.errors import JoinError
from dilocox.lab import LabError, Network, why_not
from dilocox.lab.netns import inside
from dilocox.outer.coordinator.identity import JoinToken
from dilocox.outer.coordinator.joining import enrol
from dilocox.outer.coordinator.timeouts import Timeouts

CANNOT = 3
BEFORE = 3
"""Rounds of all sites together before a fault."""
SLOW_SECONDS = 10.0


@dataclass(frozen=True)
class Blow:
    """One fault that was struck."""

    kind: str
    site: str
    """Which site was struck; `hub` for the coordinator."""
    began: float
    """When, by the clock of metrics.jsonl."""
    ended: float
    """When everything was contributing again."""


def rank_kill(run: Run, site: str, draw: random.Random) -> None:
    """One rank dies."""
    ranks = run.ranks(site)
    chaos_run.kill([ranks[draw.choice(sorted(ranks))]])


def rank_stop(run: Run, site: str, draw: random.Random) -> None:
    """One rank hangs."""
    ranks = run.ranks(site)
    chaos_run.kill([ranks[draw.choice(sorted(ranks))]], signal.SIGSTOP)


def site_kill(run: Run, site: str, _draw: random.Random) -> None:
    """A site's machine loses power and comes back."""
    run.kill(site)
    run.join(site)


def joiner_kill(run: Run, site: str, draw: random.Random) -> None:
    """The same, twice: the second time while the site enters."""
    before = run.said().count(f"{site} enters")
    site_kill(run, site, draw)
    run.until(lambda: run.said().count(f"{site} enters") > before, f"entering of {site}")
    site_kill(run, site, draw)


def link_cut(run: Run, site: str, _draw: random.Random) -> None:
    """A site has no network for a while."""
    run.cut(site, down=True)
    time.sleep(2 * HEARTBEAT)
    run.cut(site, down=False)


def link_slow(run: Run, site: str, _draw: random.Random) -> None:
    """A site's line is ten times slower for a while."""
    run.network.shape({site: RATE / 10})
    time.sleep(SLOW_SECONDS)
    run.network.shape({site: RATE})


def coordinator_kill(run: Run, _site: str, _draw: random.Random) -> None:
    """The coordinator dies and is started again."""
    run.kill(HUB)
    time.sleep(1.0)
    run.start_coordinator()


def disk_full(run: Run, _site: str, _draw: random.Random) -> None:
    """A disk is full until a checkpoint could not be written."""
    filler, before = run.folder(SMALL_DISK) / "filler", run.said().count("was not written")
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    try:
        run.until(
            lambda: run.over or run.said().count("was not written") > before,
            "word of a checkpoint that was not written",
        )
    finally:
        filler.unlink()


def rogue(run: Run, site: str, _draw: random.Random) -> None:
    """A stranger knocks. Raises `HangError` if it is let in."""
    host, port = run.address.rsplit(":", 1)
    token = (run.config.folder / "coordinator" / "token").read_text(encoding="ascii").strip()
    forged = JoinToken(JoinToken.parse(token).fingerprint, "0" * 32)
    with inside(run.network.namespace(HUB)):
        with socket.create_connection((host, int(port)), timeout=5.0) as noise:
            noise.sendall(b"\x16\x03\x01" + bytes(range(256)) * 64)
        try:
            enrol(
                f"https://{run.address}",
                str(forged),
                site=site,
                run_digest=run.config.digest(),
                stages=2,
                shards=1,
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
    """Kinds and sites: every kind once before any comes again. The same for a seed."""
    draw = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < faults:
        kinds = list(KINDS)
        draw.shuffle(kinds)
        found += [(kind, draw.choice(SITES)) for kind in kinds]
    struck = {"coordinator-kill": HUB, "disk-full": SMALL_DISK}
    return [(kind, struck.get(kind, site)) for kind, site in found[:faults]]


def all_contribute(run: Run, after: int) -> Callable[[], bool]:
    """Whether every site has reported a round above `after`, or the run is over."""
    return lambda: (
        run.over
        or all((rows := run.reported(site)) and rows[-1]["round"] > after for site in SITES)
    )


def torment(run: Run, faults: Iterable[tuple[str, str]], seed: int) -> list[Blow]:
    """Strike until the run is over or `faults` are through. Raises `HangError`."""
    draw, blows = random.Random(seed), []
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
    return blows


def round_times(records: Sequence[Record], struck: str) -> list[float]:
    """When each round was first reported by a site other than `struck`, rising."""
    first: dict[int, float] = {}
    for record in records:
        if record["kind"] == "round" and record.get("site") not in (None, struck):
            first[record["round"]] = min(record["time"], first.get(record["round"], float("inf")))
    return sorted(first.values())


def stall(blow: Blow, times: Sequence[float]) -> float:
    """Longest time between rounds around a fault, less the usual one, seconds.

    `times`: as `round_times` gives them.
    """
    gaps = list(itertools.pairwise(times))
    usual = statistics.median(end - start for start, end in gaps)
    near = [end - start for start, end in gaps if end >= blow.began and start <= blow.ended]
    return max(0.0, max(near, default=0.0) - usual)


def rows_of(blows: Sequence[Blow], records: Sequence[Record]) -> list[common.Row]:
    """One row per kind of fault: median and worst."""
    rows = []
    for kind in KINDS:
        own = [blow for blow in blows if blow.kind == kind]
        if not own:
            continue
        stalls = [stall(blow, round_times(records, blow.site)) for blow in own]
        recoveries = [blow.ended - blow.began for blow in own]
        rows.append(
            {
                "fault": kind,
                "count": len(own),
                "stall_seconds": round(statistics.median(stalls), 2),
                "stall_worst": round(max(stalls), 2),
                "recovery_seconds": round(statistics.median(recoveries), 2),
                "recovery_worst": round(max(recoveries), 2),
            }
        )
    return rows


def whole(summary: Record, ledger: Sequence[Record], reference: float, faults: int) -> common.Row:
    """The row of the whole run."""
    thrown = {(e["site"], e["round"]) for e in ledger if e["state"] == "returned"}
    return {
        "fault": "run",
        "count": faults,
        "hangs": 0,
        "diverged": int(summary["phase"] != "finished"),
        "rounds": summary["rounds"],
        "discarded": len(thrown),
        "tokens_doubled": summary["sequences_doubled"],
        "tokens_lost": summary["sequences_missing"],
        "loss_ratio": round(summary["val_loss_last"] / reference, 4),
    }


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


def measure(root: Path, seed: int, faults: int, rounds: int) -> list[common.Row]:
    """Both runs, and their rows. Raises `LabError` and `HangError`."""
    file = chaos_run.run_file(root, "data", rounds)
    common.say("preparing token files")
    command = [sys.executable, "-m", "dilocox", "data", "prepare", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with (
        chaos_run.small_disk(root / SMALL_DISK),
        Network([HUB, *SITES]) as network,
        contextlib.ExitStack() as runs,
    ):
        network.shape(dict.fromkeys(SITES, RATE))
        network.verify()

        def started(name: str) -> Run:
            run = Run(network, root, name, rounds)
            runs.callback(run.close)
            return run

        reference = started("undisturbed").finish()
        common.say(f"undisturbed: held-out loss {reference['val_loss_last']:.4f}")
        run = started("disturbed")
        blows = torment(run, schedule(seed, faults), seed)
        summary = run.finish()
        rows = rows_of(blows, run.records())
        row = whole(summary, run.ledger(), reference["val_loss_last"], len(blows))
    return [*rows, row]


def main() -> int:
    """Measure, print, write."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (0)")
    parser.add_argument("--faults", type=int, help="how many at most (9 with --quick, else 100)")
    parser.add_argument("--rounds", type=int, help="of the run (200 with --quick, else 2500)")
    options = parser.parse_args()
    common.end_on_signals()
    reason = why_not()
    if reason is not None:
        print(f"chaos: cannot be measured here: {reason}", file=sys.stderr)
        return CANNOT
    on = common.machine()
    faults = options.faults or (9 if options.quick else 100)
    rounds = options.rounds or (200 if options.quick else 2500)
    root = Path(tempfile.mkdtemp(prefix="dilocox-chaos-"))
    try:
        rows = measure(root, options.seed, faults, rounds)
    except (LabError, HangError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(common.table(rows, COLUMNS))
    if options.json:
        about = {"seed": options.seed, "heartbeat": HEARTBEAT, "line_mbit": RATE / 1e6}
        common.write_json(options.json, "chaos", on, about, rows)
    bad = rows[-1]["diverged"] or rows[-1]["tokens_doubled"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
