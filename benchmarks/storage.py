"""Measures what publishing a run costs its training, where both share one uplink.

Two sites train in a lab (`dilocox.tools.testbed`) on links of 20 Mbit/s. Each pair of runs has one
run alone, and one with `dilocox publish --follow --limit` at the first site: under the site's quota
of processor time, over the site's uplink, to an S3 server (moto) at the coordinator. `ratio` is the
tokens/s of the run with a publisher over those of the run alone; on a shared machine it varies by
some per cent. `publisher_cpu_share` varies less: the publisher's processor time in the measured
rounds, as a share of the site's quota. It does not have the publisher's start, which comes once in
a run. Training cannot lose more than this share to the publisher's computing. `published_mbit` is
what the publisher has sent while the run went on, per second of the measured rounds' time, and must
be at most `limit_mbit`.

It takes about 15 minutes on two idle cores, and five with --quick. It needs the same as
`dilocox lab`, and the packages s3fs, moto, flask and flask-cors; otherwise it prints one line and
exits with code 3.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
ROUNDS, INNER_STEPS, WARM_UP = 14, 20, 3
PAIRS, QUICK_PAIRS = 5, 1
PATIENCE = 60.0
"""Seconds until the S3 server must answer."""
NEEDED = ("s3fs", "moto", "flask", "flask_cors")


def run_file(root: Path, name: str) -> Path:
    """Write a run file and return its path."""
    content = {
        "run": {"name": name, "folder": str(root / "{name}")},
        "model": {"architecture": common.MODEL},
        "data": {
            "source": "python-stdlib", "folder": str(root / "data"), "vocabulary_size": 1024,
            "sequence_length": 128, "max_documents": 100, "validation_sequences": 8,
        },
        "site": {"batch_size": 8, "micro_batch_size": 4, "device": "cpu"},
        "outer": {"rounds": ROUNDS, "inner_steps": INNER_STEPS, "fragments": 2},
        "control": {"adapt": "off"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {site: {} for site in SITES},
    }  # fmt: skip
    return common.write_run_file(root, name, content)


class Storage:
    """An S3 server at the coordinator, and a publisher at the first site."""

    def __init__(self, lab: Lab) -> None:
        """Start the server, and make its bucket. Raises `LabError` if it does not answer."""
        self._lab = lab
        url = f"http://{lab.address(HUB)}:{PORT}"
        self._settings = {
            **os.environ, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        }  # fmt: skip
        server = ["-m", "moto.server", "-H", lab.address(HUB), "-p", str(PORT)]
        self._start(HUB, server, subprocess.DEVNULL)
        make = ["-c", "import s3fs; s3fs.S3FileSystem().mkdir('runs')"]
        end = time.monotonic() + PATIENCE
        while self._start(SITES[0], make, subprocess.DEVNULL).wait() != 0:
            if time.monotonic() > end:
                raise LabError("the S3 server does not answer")

    def publish(self, folder: Path) -> subprocess.Popen[str]:
        """Start to publish the run in `folder` at the first site, while it goes on."""
        command = ["-m", "dilocox", "publish", str(folder), "--to", f"s3://runs/{folder.name}"]
        command += ["--every", "1", "--follow", "--limit", f"{LIMIT_MBIT}mbit"]
        return self._start(SITES[0], command, subprocess.PIPE)

    def size(self, name: str) -> int:
        """Return the bytes that are published of run `name`."""
        ask = ["-c", f"import s3fs; print(s3fs.S3FileSystem().du('runs/{name}'))"]
        text, _ = self._start(HUB, ask, subprocess.PIPE).communicate()
        return int(text or 0)

    def _start(self, host: str, arguments: Sequence[str], output: Any) -> subprocess.Popen[str]:
        return self._lab.start(
            host, [sys.executable, *arguments], env=self._settings, stdout=output,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def tokens_per_second(lab: Lab, root: Path, name: str, storage: Storage | None) -> common.Row:
    """Train one run, with a publisher beside it if there is a storage. Raises `LabError`."""
    config = load_run(run_file(root, name))
    beside: list[Beside] = []

    def on_record(record: dict[str, Any]) -> None:
        if storage is not None and not beside:
            beside.append(Beside(storage.publish(config.folder)))
        if record.get("kind") == "round" and record["round"] >= WARM_UP and beside:
            beside[0].look()

    found = run(lab, config, warm_up=WARM_UP, on_record=on_record)
    row: common.Row = {"tokens_per_second": found.tokens_per_second}
    if storage is not None:
        (publisher,) = beside
        if publisher.process.poll() not in (None, 0):
            raise LabError(f"run {name}: publishing has failed")
        row["published_bytes"] = storage.size(name)
        row["published_mbit"] = row["published_bytes"] * 8e-6 / (time.time() - publisher.begin)
        row["publisher_cpu_share"] = publisher.cores() / lab.quotas[SITES[0]]
        publisher.process.kill()
        publisher.process.wait()
    return row


class Beside:
    """A publisher, and the processor time that it takes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.begin = time.time()
        """When it was started."""
        self._looks: list[tuple[float, float]] = []

    def look(self) -> None:
        """Note the present time and the processor time so far."""
        self._looks.append((time.time(), common.cpu_seconds(self.process.pid)))

    def cores(self) -> float:
        """Return the mean number of cores that it took between the first look and the last one.

        Raises `LabError` without two looks.
        """
        if len(self._looks) < 2:
            raise LabError("the run had fewer than two measured rounds")
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        return (after - before) / (last - first)


def measure(root: Path, pairs: int) -> list[common.Row]:
    """Measure pairs of runs, the first of a pair alternately with and without a publisher."""
    rows: list[common.Row] = []
    with Lab(list(SITES), LINK) as lab:
        storage = Storage(lab)
        for pair in range(pairs):
            found: dict[bool, common.Row] = {}
            for beside in (False, True) if pair % 2 == 0 else (True, False):
                name = f"{'beside' if beside else 'alone'}{pair}"
                found[beside] = tokens_per_second(lab, root, name, storage if beside else None)
            alone, own = found[False]["tokens_per_second"], found[True]["tokens_per_second"]
            rows.append(
                {
                    "pair": pair,
                    "link": LINK,
                    "limit_mbit": LIMIT_MBIT,
                    "alone": round(alone, 1),
                    "beside": round(own, 1),
                    "ratio": round(own / alone, 4),
                    "published_bytes": found[True]["published_bytes"],
                    "published_mbit": round(found[True]["published_mbit"], 3),
                    "publisher_cpu_share": round(found[True]["publisher_cpu_share"], 4),
                }
            )
            share = found[True]["publisher_cpu_share"]
            common.say(f"pair {pair}: {own / alone:.3f} of the speed alone; the publisher took "
                       f"{share:.2%} of the site's processor time")  # fmt: skip
    return rows


COLUMNS = {
    "pair": "d",
    "link": "s",
    "limit_mbit": "d",
    "alone": ",.1f",
    "beside": ",.1f",
    "ratio": ".3f",
    "published_bytes": ",d",
    "published_mbit": ".3f",
    "publisher_cpu_share": ".2%",
}


def main() -> int:
    """Measure, print and write. Returns 1 if a run could not be measured."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    lacking = f"not installed: {', '.join(missing)}" if missing else unsupported_reason()
    if common.cannot("storage", lacking):
        return common.CANNOT
    on = common.machine()
    with tempfile.TemporaryDirectory(prefix="dilocox-storage-") as folder:
        try:
            rows = measure(Path(folder), QUICK_PAIRS if options.quick else PAIRS)
        except DilocoxError as error:
            common.say(f"storage: {error}")
            return 1
    ratio = common.median_interval([row["ratio"] for row in rows])
    print(common.table(rows, COLUMNS))
    most = max(row["publisher_cpu_share"] for row in rows)
    print(
        f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}); the publisher took at "
        f"most {most:.2%} of the site's processor time"
    )
    path = options.json or (None if options.quick else RESULTS)
    if path:
        settings = {"rounds": ROUNDS, "inner_steps": INNER_STEPS, "sites": len(SITES)}
        common.write_json(path, "storage", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
