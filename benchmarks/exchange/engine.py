"""The engine's exchange without a model: a real coordinator and real ranks that send numbers.

Every site is a host of a network. Its ranks are processes that enrol, form groups, vote and swap
payloads exactly as in training, but they compute nothing between exchanges. All sites contribute a
round's fragments at the same moment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dilocox.compression import Geometry, compressor
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.run_server import serve
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.tools.testbed import LabError, Network
from dilocox.training.builder import RankPlace
from dilocox.training.launch.exchange_backend import LinkBackend as RankNetwork
from dilocox.transport.exchange_worker import ExchangeWorker
from dilocox.transport.link.endpoint import open_endpoint
from dilocox.utils import chrome_trace, processes, tracing

HUB = "hub"
LIMIT = 120.0
"""Seconds after which a case is aborted."""


@dataclass(frozen=True)
class Case:
    """Sites, fragments and codec of the exchanges."""

    sites: tuple[str, ...]
    mode: str
    codec: str
    values: int
    """fp32 values per fragment; a multiple of 128."""
    fragments: int = 1
    """Number of fragments, handed in together and exchanged one after the other."""
    stages: int = 1
    """Ranks per site, which share its link."""
    rounds: int = 4
    congestion: str | None = None
    """TCP congestion control. None: that of the machine."""

    def config(self, folder: Path, host: str) -> RunConfig:
        """Return the run file of the case. Its model is never built."""
        network = {"host": host}
        if self.congestion is not None:
            network["congestion"] = self.congestion
        return resolve_run(
            {
                "run": {"name": "exchange", "folder": str(folder)},
                "model": {"architecture": {"model_type": "qwen3", "num_hidden_layers": 64}},
                "site": {"stages": self.stages, "batch_size": 64, "micro_batch_size": 1},
                "outer": {
                    "method": "diloco",
                    "rounds": self.rounds,
                    "inner_steps": self.fragments,
                    "slots": self.fragments,
                    "fragments": self.fragments,
                    "exchange": self.mode,
                },
                "compression": {"codec": self.codec},
                "checkpoint": {"every_rounds": 0},
                "network": network,
                "sites": {site: {} for site in self.sites},
            },
            where="exchange benchmark",
        )


@dataclass(frozen=True)
class Turn:
    """One round at one rank, by the machine's monotonic clock in seconds."""

    site: str
    stage: int
    round: int
    began: float
    ended: float
    payload_bytes: int
    link: tuple[tuple[float, float, int], ...]
    """See `Outcome.link`: the swaps from which the controller estimates the link."""


def run_case(network: Network, case: Case, root: Path) -> tuple[list[Turn], Path]:
    """Run `case`, and return the measurements of all ranks and the folder of their timelines.

    Raises `LabError` if a process fails or does not end.
    """
    folder = root / f"case-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    config = case.config(folder, network.address(HUB))
    told: Any = processes.CONTEXT.SimpleQueue()
    start = processes.CONTEXT.Barrier(len(case.sites) * case.stages)
    ours, theirs = processes.CONTEXT.Pipe(duplex=False)
    started = [processes.start(_hub, network, config, folder, theirs, name=HUB)]
    theirs.close()
    turns: list[Turn] = []
    try:
        if not ours.poll(LIMIT):
            raise _failure(folder, "the coordinator does not start")
        endpoint = ours.recv()
        for site in case.sites:
            started.append(
                processes.start(
                    _site, network, config, case, site, endpoint, folder, start, told, name=site
                )
            )
        deadline = time.monotonic() + LIMIT
        expected = case.rounds * case.stages * len(case.sites)
        while len(turns) < expected:
            while not told.empty():
                turns.append(told.get())
            dead = [process.name for process in started if process.exitcode not in (None, 0)]
            if dead or time.monotonic() > deadline:
                raise _failure(folder, f"{', '.join(dead) or 'the exchanges'} did not end well")
            time.sleep(0.02)
    finally:
        processes.end(started, grace=15.0 if len(turns) else 0.0)
    return turns, folder


def _failure(folder: Path, what: str) -> LabError:
    said = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    return LabError(f"{what}\n{said}")


def _hub(network: Network, config: RunConfig, folder: Path, pipe: Any) -> None:
    network.enter(HUB)
    with _logged(folder / "hub.log"):
        serve(config, folder / "coordinator", listener=RunListener(on_ready=pipe.send))


def _site(
    network: Network,
    config: RunConfig,
    case: Case,
    site: str,
    endpoint: Endpoint,
    folder: Path,
    start: Any,
    told: Any,
) -> None:
    network.enter(site)
    with _logged(folder / f"{site}.log"):
        identity, _ = enrol(
            endpoint.url,
            endpoint.tokens[site],
            Applicant(site, config.digest(), case.stages, shards=1),
            timeouts=Timeouts.derive(config.network),
        )
        address = network.address(site)
        ranks = [
            processes.start(
                _rank, config, case, RankPlace(site, stage, 0), endpoint.url, identity, address,
                folder, start, told, name=f"{site}-{stage}",
            )
            for stage in range(case.stages)
        ]  # fmt: skip
        processes.end(ranks, grace=LIMIT)
        sys.exit(max(rank.exitcode or 0 for rank in ranks))


@contextlib.contextmanager
def _logged(path: Path) -> Any:
    """Redirect standard output and errors of this process and its children to a file."""
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(stream, number)
    os.close(stream)
    yield


def _rank(
    config: RunConfig,
    case: Case,
    place: RankPlace,
    url: str,
    identity: Identity,
    address: str,
    folder: Path,
    start: Any,
    told: Any,
) -> None:
    torch.set_num_threads(1)
    part = chrome_trace.part_path(folder, place.site, place.stage, place.shard)
    try:
        with tracing.recording(part):
            _exchange_rounds(config, case, place, url, identity, address, start, told)
    except BaseException:
        traceback.print_exc()
        start.abort()
        raise


def _exchange_rounds(
    config: RunConfig,
    case: Case,
    place: RankPlace,
    url: str,
    identity: Identity,
    address: str,
    start: Any,
    told: Any,
) -> None:
    timeouts = Timeouts.derive(config.network)
    name = RankName(site=place.site, stage=place.stage, shard=place.shard)
    client = CoordinatorClient(url, identity, timeouts, name)
    control = RankControl(client, timeouts.beat, timeouts.stall, LIMIT, _end)
    control.start()
    links = open_endpoint(
        config.sites, identity, place.stage, case.stages, address, timeouts,
        config.network.congestion,
    )  # fmt: skip
    network = RankNetwork(client, control, place, timeouts, links)
    worker = ExchangeWorker(network, place.site)
    draw = torch.Generator().manual_seed(case.sites.index(place.site) * case.stages + place.stage)
    chosen = compressor(case.codec, Geometry(((case.values,),), (0,), case.values))
    control.wait_while_role("enrolled")
    client.ready()
    for number in range(case.rounds):
        plan = client.plan(number)
        weights = {site: member.weight for site, member in plan.members.items()}
        # Other values in every round: repeated bytes would be stale, and would not count.
        values = torch.randn(case.values, generator=draw)
        start.wait(LIMIT)
        began = time.monotonic()
        futures = [
            worker.submit(
                Contribution(
                    key=ExchangeKey.outer(number, place.stage, fragment),
                    length=case.values,
                    values=values,
                    compressor=chosen,
                    mode=case.mode,
                    weights=weights,
                )
            )
            for fragment in range(case.fragments)
        ]
        outcomes: list[Outcome] = [future.result(LIMIT) for future in futures]
        ended = time.monotonic()
        for outcome in outcomes:
            if sorted(outcome.contributors) != sorted(case.sites):
                raise LabError(f"round {number}: only {', '.join(outcome.contributors)} counted")
        told.put(
            Turn(
                place.site,
                place.stage,
                number,
                began,
                ended,
                sum(outcome.payload_bytes for outcome in outcomes),
                tuple(interval for outcome in outcomes for interval in outcome.link),
            )
        )
        for slot in range(1, plan.slots + 1):
            control.may_finish(plan.first_tick + slot)
            whole = slot == plan.slots
            control.at(plan.first_tick + slot, number + whole, 0 if whole else slot, 1.0)
        client.round_done(number)
    start.wait(LIMIT)
    worker.close()
    links.close()
    client.finish(complete=True)
    control.close()


def _end(error: BaseException) -> None:
    print(error, file=sys.stderr)
    os._exit(1)
