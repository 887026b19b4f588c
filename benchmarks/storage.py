"""Measures what publishing a run costs its training, where both share one uplink.

Two sites train in a lab (`dilocox.tools.testbed`) on links of 20 Mbit/s. At the first site runs
`dilocox publish --follow --limit`: under the site's quota of processor time, over the site's
uplink, to an S3 server (moto) at the coordinator. The publisher stands still (SIGSTOP) in one of
two neighbouring stretches of twelve rounds; a draw with a fixed seed says in which one. So both
stretches of a pair belong to one run. The round before each stretch does not count: a publisher
that is let again sends one part at once in it, which a publisher that is never stopped does not.

`ratio` is the tokens/s beside a publisher over those without one. `publisher_cpu_share` is the
publisher's processor time in its stretches, as a share of the site's quota. It does not have the
publisher's start, which comes once in a run. `published_mbit` is what the publisher has sent, per
second of the time in which it was let. This time includes the rounds that do not count, so the
figure may exceed `limit_mbit`. `server_cores` is the processor time of the S3 server, in cores;
`wait_alone` and `wait_beside` are the shares of time in which training has waited for the network.

With --apart the publisher is outside of the site's quota, as on a site that has a core to spare. It
shares the uplink with training, and the machine's remaining tenth.

It takes 35 to 55 minutes on two idle cores, and ten with --quick. It needs the same as
`dilocox lab`, and the packages s3fs, moto, flask and flask-cors; otherwise it prints one line and
exits with code 3.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from dilocox.config.run_config import load_run
from dilocox.errors import DilocoxError
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.run import run
from dilocox.tools.testbed.testbed import HUB, unsupported_reason

RESULTS = common.RESULTS / "storage-cpu.json"
SITES = ("paris", "lyon")
LINK = "20mbit"
LIMIT_MBIT = 1
PORT = 5000
INNER_STEPS, BATCH, SEQUENCE_LENGTH = 20, 8, 128
WARM_UP = 10
"""Rounds before the first stretch. The publisher starts in them."""
SETTLE = 1
"""Rounds before each stretch in which the publisher has been let or stopped already."""
STRETCH = 12
"""Rounds of a stretch."""
PAIRS, QUICK_PAIRS = 40, 6
PATIENCE = 60.0
"""Seconds until the S3 server must answer."""
NEEDED = ("s3fs", "moto", "flask", "flask_cors")


def rounds_for(pairs: int) -> int:
    """Return the rounds of a run that has so many pairs of stretches."""
    return WARM_UP + 2 * pairs * (SETTLE + STRETCH)


def run_file(root: Path, name: str, pairs: int) -> Path:
    """Write a run file for so many pairs of stretches, and return its path."""
    content = {
        "run": {"name": name, "folder": str(root / "{name}")},
        "model": {"architecture": common.MODEL},
        "data": {
            "source": "python-stdlib", "folder": str(root / "data"), "vocabulary_size": 1024,
            "sequence_length": SEQUENCE_LENGTH, "max_documents": 100, "validation_sequences": 8,
        },
        "site": {"batch_size": BATCH, "micro_batch_size": 4, "device": "cpu"},
        "outer": {"rounds": rounds_for(pairs), "inner_steps": INNER_STEPS, "fragments": 2},
        "control": {"adapt": "off"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {site: {} for site in SITES},
    }  # fmt: skip
    return common.write_run_file(root, name, content)


class Storage:
    """An S3 server at the coordinator, and a publisher at the first site."""

    def __init__(self, lab: Lab, apart: bool) -> None:
        """Start the server, and make its bucket. Raises `LabError` if it does not answer.

        `apart`: the publisher is outside of the site's quota.
        """
        self._lab, self._apart = lab, apart
        url = f"http://{lab.address(HUB)}:{PORT}"
        self._settings = {
            **os.environ, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        }  # fmt: skip
        server = ["-m", "moto.server", "-H", lab.address(HUB), "-p", str(PORT)]
        self.server = self._start(HUB, server, subprocess.DEVNULL)
        make = ["-c", "import s3fs; s3fs.S3FileSystem().mkdir('runs')"]
        end = time.monotonic() + PATIENCE
        while self._start(SITES[0], make, subprocess.DEVNULL).wait() != 0:
            if time.monotonic() > end:
                raise LabError("the S3 server does not answer")

    def publish(self, folder: Path) -> subprocess.Popen[str]:
        """Start to publish the run in `folder` at the first site, while it goes on."""
        command = ["-m", "dilocox", "publish", str(folder), "--to", f"s3://runs/{folder.name}"]
        command += ["--every", "1", "--follow", "--limit", f"{LIMIT_MBIT}mbit"]
        if not self._apart:
            return self._start(SITES[0], command, subprocess.DEVNULL)
        outside = self._lab.network.command(SITES[0], [sys.executable, *command])
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            outside, env=self._settings, text=True, stdin=quiet, stdout=quiet, stderr=quiet
        )

    def size(self, name: str) -> int | None:
        """Return the bytes that are published of run `name`. None if the server does not say."""
        ask = ["-c", f"import s3fs; print(s3fs.S3FileSystem().du('runs/{name}'))"]
        text, _ = self._start(HUB, ask, subprocess.PIPE).communicate()
        return int(text) if text.strip() else None

    def _start(self, host: str, arguments: Sequence[str], output: Any) -> subprocess.Popen[str]:
        return self._lab.start(
            host, [sys.executable, *arguments], env=self._settings, stdout=output,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def order(pairs: int) -> list[bool]:
    """Return for each stretch whether the publisher sends in it: in one of each pair."""
    draw = random.Random(0)
    return [beside for _ in range(pairs) for beside in draw.sample((True, False), 2)]


class Mark(NamedTuple):
    """What had been used when a stretch began or ended."""

    time: float
    """Unix time."""
    publisher: float
    """CPU seconds of the publisher."""
    server: float
    """CPU seconds of the S3 server."""
    waited: float
    """Seconds for which training had waited for the network."""

    def since(self, other: Mark) -> Mark:
        """Return what was used after `other`."""
        return Mark._make(now - then for now, then in zip(self, other, strict=True))


class Stretches:
    """A publisher that stands still in one stretch of each pair, and how long each stretch took."""

    def __init__(self, process: subprocess.Popen[str], server: int, pairs: int) -> None:
        """`server`: process id of the S3 server."""
        self.process = process
        self._server = server
        self.beside_seconds = 0.0
        """Time in which the publisher could send."""
        self._order = order(pairs)
        self._waited = 0.0
        self._begin: Mark | None = None
        self._lengths: list[Mark] = []
        """What each stretch has used."""
        self._since: float | None = time.time()

    def round_ended(self, record: Mapping[str, Any]) -> None:
        """Note the record of a round of the first site, and let or stop the publisher.

        Raises `LabError` if the publisher has ended.
        """
        if self.process.poll() is not None:
            raise LabError("publishing has failed")
        self._waited += record["wait_seconds"]
        stretch, within = divmod(record["round"] + 1 - WARM_UP, SETTLE + STRETCH)
        if stretch < 0 or within not in (0, SETTLE):
            return
        used = [common.cpu_seconds(process) for process in (self.process.pid, self._server)]
        mark = Mark(record["time"], used[0], used[1], self._waited)
        if within == SETTLE:
            self._begin = mark
            return
        if self._begin is not None:
            self._lengths.append(mark.since(self._begin))
        self._let(stretch < len(self._order) and self._order[stretch])

    def end(self) -> None:
        """End the publisher."""
        self._let(False)
        self.process.kill()
        self.process.wait()

    def _let(self, on: bool) -> None:
        if on == (self._since is not None):
            return
        self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        if self._since is not None:
            self.beside_seconds += time.time() - self._since
        self._since = time.time() if on else None

    def pairs(self, quota: float) -> Iterator[common.Row]:
        """Yield a row of each pair of stretches. `quota`: the site's processor cores."""
        tokens = STRETCH * INNER_STEPS * BATCH * SEQUENCE_LENGTH * len(SITES)
        for first in range(0, len(self._lengths) - 1, 2):
            beside, alone = self._lengths[first : first + 2]
            if not self._order[first]:
                alone, beside = beside, alone
            yield {
                "pair": first // 2,
                "alone": round(tokens / alone.time, 1),
                "beside": round(tokens / beside.time, 1),
                "ratio": round(alone.time / beside.time, 4),
                "publisher_cpu_share": round(beside.publisher / beside.time / quota, 4),
                "server_cores": round(beside.server / beside.time, 4),
                "wait_alone": round(alone.waited / alone.time, 4),
                "wait_beside": round(beside.waited / beside.time, 4),
            }


def measure(root: Path, pairs: int, apart: bool) -> tuple[list[common.Row], common.Row]:
    """Train one run. Returns a row for each pair of stretches, and what was published in all.

    `apart`: the publisher is outside of the site's quota.

    Raises `LabError`, or another `DilocoxError` if the run cannot be started.
    """
    config = load_run(run_file(root, "beside", pairs))
    beside: list[Stretches] = []

    with Lab(list(SITES), LINK) as lab:
        storage = Storage(lab, apart)

        def on_record(record: dict[str, Any]) -> None:
            if not beside:
                beside.append(Stretches(storage.publish(config.folder), storage.server.pid, pairs))
            if record.get("kind") == "round" and record.get("site") == SITES[0]:
                beside[0].round_ended(record)
                if (record["round"] + 1) % 50 == 0:
                    common.say(f"round {record['round'] + 1} of {config.outer.rounds}")

        try:
            run(lab, config, warm_up=WARM_UP, on_record=on_record)
        finally:
            # The lab ends what is under a quota. A publisher apart is not.
            for each in beside:
                each.end()
        (stretches,) = beside
        size = storage.size(config.folder.name)
        rows = list(stretches.pairs(lab.quotas[SITES[0]]))
    rate = None if size is None else round(size * 8e-6 / stretches.beside_seconds, 3)
    return rows, {"published_bytes": size, "published_mbit": rate}


def summary(rows: Sequence[common.Row]) -> common.Row:
    """Return the figures over all pairs: the ratio's median with its interval and its mean with its
    standard error, and the mean share of the processor."""
    ratios = [row["ratio"] for row in rows]
    middle = common.median_interval(ratios)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "ratio": {
            "median": round(middle.median, 4), "low": round(middle.low, 4),
            "high": round(middle.high, 4), "mean": round(statistics.fmean(ratios), 4),
            "standard_error": round(error, 4),
        },
        **{
            name: round(statistics.fmean(row[name] for row in rows), 4)
            for name in ("publisher_cpu_share", "server_cores", "wait_alone", "wait_beside")
        },
    }  # fmt: skip


COLUMNS = {
    "pair": "d",
    "alone": ",.1f",
    "beside": ",.1f",
    "ratio": ".3f",
    "publisher_cpu_share": ".2%",
    "server_cores": ".3f",
    "wait_alone": ".2%",
    "wait_beside": ".2%",
}


def main() -> int:
    """Measure, print and write. Returns 1 if a run could not be measured."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--apart", action="store_true", help="publish outside of the site's quota")
    parser.add_argument("--pairs", type=common.positive, metavar="N", help=f"pairs ({PAIRS})")
    options = parser.parse_args()
    pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    if pairs < 2:
        parser.error("--pairs: a standard error needs at least two pairs")
    common.end_on_signals()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    lacking = f"not installed: {', '.join(missing)}" if missing else unsupported_reason()
    if common.cannot("storage", lacking):
        return common.CANNOT
    on = common.machine()
    with tempfile.TemporaryDirectory(prefix="dilocox-storage-") as folder:
        try:
            rows, published = measure(Path(folder), pairs, options.apart)
        except DilocoxError as error:
            common.say(f"storage: {error}")
            return 1
    print(common.table(rows, COLUMNS))
    found = summary(rows) | published
    rate = found["published_mbit"]
    sent = "an unknown number of bytes" if rate is None else f"{rate:.2f} Mbit/s"
    print(
        f"ratio: median {found['ratio']['median']:.4f} ({found['ratio']['low']:.4f} to "
        f"{found['ratio']['high']:.4f}), mean {found['ratio']['mean']:.4f}, standard error "
        f"{found['ratio']['standard_error']:.4f}; the publisher took "
        f"{found['publisher_cpu_share']:.2%} of the site's processor time, and sent {sent}"
    )
    # The committed file has all pairs; fewer must not replace it.
    path = options.json or (None if pairs < PAIRS or options.apart else RESULTS)
    if path:
        settings = {
            "rounds": rounds_for(pairs), "inner_steps": INNER_STEPS, "sites": len(SITES),
            "link": LINK, "limit_mbit": LIMIT_MBIT, "settle": SETTLE, "stretch": STRETCH,
            "apart": options.apart, "found": found,
        }  # fmt: skip
        common.write_json(path, "storage", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
