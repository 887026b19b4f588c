"""Trains runs in a lab. The coordinator and every site have a host each.

with Lab(list(config.sites), "20mbit") as lab:
    result = run(lab, config)
    print(result.tokens_per_second, result.sites["paris"].wire_sent_bytes)

The processes are those of `dilocox coordinator` and `dilocox join`, forked from this one.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import DilocoxError
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.results import (
    WARM_UP,
    Record,
    Recording,
    RunResult,
    Sample,
    result_of,
)
from dilocox.tools.testbed.testbed import HUB, Lab
from dilocox.training.builder import Hooks
from dilocox.training.code_file import with_code
from dilocox.training.launch import preflight
from dilocox.training.launch.console import Display
from dilocox.training.launch.coordinator_check import ENDPOINT
from dilocox.training.launch.coordinator_process import coordinate
from dilocox.training.launch.run_folder import claim_folder
from dilocox.training.launch.site import run_site
from dilocox.training.launch.supervisor import print_error
from dilocox.utils import chrome_trace, processes

EVERY = 0.25
"""Seconds between two readings of the interfaces' counters."""
LINK_PORTS = 29500
"""First port in the lab of a site whose run file gives an address to advertise."""
OnRecord = Callable[[Record], None]


def run(
    lab: Lab,
    config: RunConfig,
    *,
    overwrite: bool = False,
    trace: bool = False,
    warm_up: int = WARM_UP,
    on_record: OnRecord | None = None,
) -> RunResult:
    """Train `config` to its end in the lab. The lab must have the run's sites.

    Links, round trips and quotas are measured before (`Lab.verify`), and again at the end if links
    were changed meanwhile. This process must not have computed with torch on several threads.

    Args:
        lab: The lab.
        config: The run.
        overwrite: Whether an existing run folder may be replaced.
        trace: Whether to write `trace.json` to the run's folder.
        warm_up: Rounds at the start that are not measured.
        on_record: Called with every record of the run's metrics as it is written.

    Raises:
        LabError: Links or quotas are not as requested, or a process has failed.
        DilocoxError: The run cannot be started.
    """
    config = in_lab(lab, config)
    check(config)
    lab.verify()
    started = Run(lab, config, overwrite=overwrite, trace=trace)
    finish(lab, [started], on_record)
    lab.verify()
    return started.result(warm_up)


def run_alone(
    lab: Lab, config: RunConfig, *, overwrite: bool = False, warm_up: int = WARM_UP
) -> dict[str, RunResult]:
    """Train each site of the lab by itself, all at the same time: their speed without exchanges.

    Folders are those of `config` with the site's name after a hyphen. Raises as `run`.
    """
    config = in_lab(lab, config)
    check(config)
    lab.verify()
    started: dict[str, Run] = {}
    try:
        for site in lab.sites:
            started[site] = Run(lab, alone(config, site), overwrite=overwrite)
        finish(lab, list(started.values()))
    finally:
        for each in started.values():
            each.end()
    return {site: each.result(warm_up) for site, each in started.items()}


def in_lab(lab: Lab, config: RunConfig) -> RunConfig:
    """Return `config` for the lab: with the lab's addresses, and one thread per whole core.

    Raises `LabError` if the run and the lab have different sites.
    """
    if list(config.sites) != lab.sites:
        raise LabError(
            f"the run's sites are {', '.join(config.sites)}, the lab's {', '.join(lab.sites)}"
        )
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["data"]["folder"] = str(config.data_folder.absolute())
    raw["network"].update(host=lab.address(HUB), port=0)
    for key in ("advertise", "interface"):
        raw["network"].pop(key, None)
    # More threads than cores would waste the quota by waiting for each other.
    raw["site"]["threads"] = config.site.threads or max(1, int(lab.quota / config.site.ranks))
    for site in raw["sites"].values():
        site.pop("interface", None)
        if site.pop("advertise", None) is not None and "ports" not in site:
            # The run chooses its ports, so it does in the lab.
            site["ports"] = f"{LINK_PORTS}-{LINK_PORTS + config.site.exchanging_ranks - 1}"
    return resolve_run(raw)


def of_sites(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """Return the run of `config` with the sites `names` only, in this order."""
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["sites"] = {name: raw["sites"][name] for name in names}
    raw["outer"]["min_sites"] = min(config.outer.min_sites, len(names))
    return resolve_run(raw)


def alone(config: RunConfig, site: str) -> RunConfig:
    """Return the run of `config` with one site only, and a run folder of its own."""
    raw = of_sites(config, [site]).model_dump(mode="json", exclude_none=True)
    raw["run"]["folder"] = f"{config.folder}-{site}"
    raw["run"]["name"] = f"{config.run.name}-{site}"
    return resolve_run(raw)


def check(config: RunConfig, display: Display | None = None) -> None:
    """Refuse a run that cannot work, before anything starts. Prepares missing token files."""
    config, hooks = with_code(config, Hooks())
    preflight.check(config, preflight.Role("lab", hooks), display)


@dataclass
class _Child:
    process: BaseProcess
    log: Path


class Run:
    """A started run in a lab: the processes of its coordinator and its sites."""

    def __init__(
        self, lab: Lab, config: RunConfig, *, overwrite: bool = False, trace: bool = False
    ) -> None:
        self.config = config
        self.folder = config.folder
        self.samples: list[Sample] = []
        self._lab = lab
        self._trace = trace
        self._children: dict[str, _Child] = {}
        self._read = 0
        self.records: list[Record] = []
        _claim(config, overwrite)
        try:
            self.sample()
            self._fork(HUB, _serve, config, self.folder / "run.toml")
            endpoint = self._endpoint()
            for site in config.sites:
                self._fork(site, _take_part, config, site, endpoint, self.folder, trace)
        except BaseException:
            self.end()
            raise

    def _fork(self, host: str, target: Callable[..., int], *arguments: Any) -> None:
        # A coordinator clears `logs` when it starts, but keeps names that begin with a dot.
        log = self.folder / ".lab" / f"{host}.log"
        log.parent.mkdir(exist_ok=True)
        process = self._lab.fork(host, _logged, target, log, arguments, name=host)
        self._children[host] = _Child(process, log)

    def _endpoint(self) -> Endpoint:
        file = self.folder / "coordinator" / ENDPOINT
        while not file.exists():
            self.check()
            wait(self.sentinels, timeout=0.05)
        return Endpoint.load(file)

    @property
    def sentinels(self) -> list[int]:
        """Sentinels of the processes that are still running."""
        every = [child.process for child in self._children.values()]
        return [process.sentinel for process in every if process.is_alive()]

    def check(self) -> None:
        """Raise `LabError` if a process has failed."""
        for host, child in self._children.items():
            if child.process.exitcode in (None, 0):
                continue
            said = [ln for ln in _text(child.log).splitlines() if ln.startswith("dilocox: ")]
            what = said[-1].removeprefix("dilocox: ") if said else ""
            raise LabError(
                f"run {self.config.run.name}: {'coordinator' if host == HUB else host} "
                f"{processes.why_ended(child.process)}"
                f"{f' ({what})' if what else ''}; see {child.log}"
            )

    def sample(self) -> None:
        """Read the counters of all interfaces, and add them to `samples`."""
        self.samples.append((time.time(), self._lab.counters()))

    def new_records(self) -> list[Record]:
        """Return the records of `metrics.jsonl` that were written since the last call."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        found = [json.loads(line) for line in text.split(b"\n") if line.strip()]
        self.records += found
        return found

    def result(self, warm_up: int = WARM_UP) -> RunResult:
        """Return the results of the run after its end. Raises `LabError` if it did not finish."""
        self.new_records()
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        if summary["phase"] != "finished":
            raise LabError(f"run {self.config.run.name}: {summary['phase']} ({summary['reason']})")
        if self._trace:
            chrome_trace.merge_run(self.folder)
        return result_of(
            name=self.config.run.name,
            method=self.config.outer.method,
            sites=list(self.config.sites),
            hub=HUB,
            recording=Recording(self.records, self.samples, summary, self.folder),
            warm_up=warm_up,
        )

    def end(self) -> None:
        """Kill the processes that are still running."""
        processes.end([child.process for child in self._children.values()], grace=0.0)


def finish(
    lab: Lab,
    runs: Sequence[Run],
    on_record: OnRecord | None = None,
    limit: float | None = None,
) -> None:
    """Wait for runs to end, and read their counters and records meanwhile.

    Raises `LabError` if a process fails, or if the runs have not ended after `limit` seconds
    (None: no limit). All processes are killed then.
    """
    due = 0.0
    last = math.inf if limit is None else time.monotonic() + limit
    try:
        while True:
            for each in runs:
                each.check()
            if lab.delay is not None:
                lab.delay.check_alive()
            sentinels = [handle for each in runs for handle in each.sentinels]
            if time.monotonic() >= due or not sentinels:
                due = time.monotonic() + EVERY
                for each in runs:
                    each.sample()
                    for record in each.new_records():
                        if on_record is not None:
                            on_record(record)
            if not sentinels:
                return
            if time.monotonic() > last:
                names = ", ".join(each.config.run.name for each in runs)
                raise LabError(f"run {names} has not ended after {limit:.0f} s")
            wait(sentinels, timeout=max(0.0, due - time.monotonic()))
    finally:
        for each in runs:
            each.end()


def _claim(config: RunConfig, overwrite: bool) -> None:
    """Make the run's folder. The check needs an address of this machine's own network, which the
    coordinator's in the lab is not."""
    network = config.network.model_copy(update={"host": "127.0.0.1"})
    claim_folder(config.model_copy(update={"network": network}), False, overwrite)
    chrome_trace.discard(config.folder)


def _logged(target: Callable[..., int], log: Path, arguments: tuple[Any, ...]) -> None:
    """Run `target` in a child process: its output goes to `log`, its result is the exit code."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for handle in (1, 2):
        os.dup2(stream, handle)
    os.close(stream)
    try:
        code = target(*arguments)
    except DilocoxError as error:
        print(f"dilocox: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _serve(config: RunConfig, run_file: Path) -> int:
    return coordinate(config, run_file=run_file, overrides=[], wait_for=None, resume=False)


def _take_part(config: RunConfig, site: str, endpoint: Endpoint, folder: Path, trace: bool) -> int:
    config, hooks = with_code(config, Hooks())
    ended = run_site(config, site, endpoint, hooks, False, folder, True, trace)
    if ended.reason:
        print_error(ended.reason)
    return ended.code


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
