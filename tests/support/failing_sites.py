"""Sites that fail on purpose: the real outer loop, exchanges and coordinator, and no model.

Every site is a forked process that "trains" by moving its parameters by numbers that follow from
its name and the step. `Fault` says in which round, at which point of an exchange, and in what way
a site fails. The test's process is the supervisor of all: it says who was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, RoundPlan, VoteReply
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.coordinator.server.ledger_audit import Audit, audit
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.run_server import serve
from dilocox.errors import DilocoxError
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.fragment_state import FragmentState, tensors_digest
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.training.builder import RankPlace
from dilocox.training.launch.exchange_backend import LinkBackend
from dilocox.transport.exchange_worker import ExchangeWorker
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.endpoint import open_endpoint
from dilocox.transport.link.state import LinkState, Piece
from tests.support.dying import die
from tests.support.thread_sites import CONTEXT, run_and_tell

SHAPES = {"layers.0": (40, 24), "layers.1": (40, 24)}
"""A fragment each: 960 values, so that a payload travels in two pieces."""
HEARTBEAT = 2.5
FIRST = 64
"""Bytes of a payload that travel before a site strikes."""
LINK = 20.0
SLOW = 1.0
"""Seconds that a slow site takes longer: less than any limit."""
Point = Literal["before", "sending", "reducing"]
Kind = Literal["dies", "hangs", "leaves", "slow"]
POINTS: tuple[Point, ...] = ("before", "sending", "reducing")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in the exchange of a round's first fragment."""

    site: str
    round: int
    point: Point
    kind: Kind


@dataclass
class Told:
    """What a site that came to the end tells."""

    digests: dict[int, str] = field(default_factory=dict)
    """Of anchors and momenta, by round; -1: after the flush."""
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Contribution set by exchange."""
    averages: dict[str, str] = field(default_factory=dict)
    """Digest of the averaged pseudo-gradient by exchange."""
    seconds: dict[str, float] = field(default_factory=dict)
    """From handing in to decision, by exchange."""
    decided: dict[str, float] = field(default_factory=dict)
    """When, by exchange, on the clock that all processes of the machine share."""
    late: dict[int, float] = field(default_factory=dict)
    """When it went on after it had been slow, by round, on the same clock."""
    given: dict[int, np.ndarray] = field(default_factory=dict)
    """Sum of w times delta, by fragment, float64, from the displacements themselves."""
    sent: dict[int, np.ndarray] = field(default_factory=dict)
    """Sum of what others saw of it, less the second errors that it took over, by fragment."""
    residual: dict[int, np.ndarray] = field(default_factory=dict)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """What it has trained on."""


@dataclass(frozen=True)
class End:
    """How a run ended."""

    phase: str
    reason: str
    ledger: Audit
    messages: list[str]
    sites: dict[str, Told]
    """Those that came to the end."""


def config_of(
    folder: Path, sites: Sequence[str], mode: str, rounds: int, codec: str = "int4"
) -> RunConfig:
    """A run of these sites; its model is never built."""
    return resolve_run(
        {
            "run": {"name": "failing", "folder": str(folder)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"batch_size": 2, "micro_batch_size": 1},
            "outer": {
                "rounds": rounds, "inner_steps": 2, "slots": 2, "fragments": 2, "delay": 1,
                "exchange": mode, "momentum": 0.5, "learning_rate": 0.7,
            },
            "compression": {"codec": codec, "residual_decay": 1.0},
            "control": {"adapt": "off"},
            "checkpoint": {"every_rounds": 0},
            "network": {"heartbeat": HEARTBEAT, "link_timeout": LINK},
            "sites": {site: {} for site in sites},
        }
    )  # fmt: skip


class FailingNetwork(LinkBackend):
    """A rank's network that fails where it is told to."""

    faults: Sequence[Fault] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._struck: set[Fault] = set()
        self._round = -1
        self.late: dict[int, float] = {}

    def strike(self, point: Point) -> None:
        """Fail, if it is time to."""
        for fault in self.faults:
            if (fault.round, fault.point) == (self._round, point) and fault not in self._struck:
                self._struck.add(fault)
                self._fail(fault)

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "slow":
            time.sleep(SLOW)
            self.late[fault.round] = time.monotonic()
        elif fault.kind == "leaves":
            self.client.leave("was told to go at once")
            os._exit(0)
        else:
            die(number=signal.SIGKILL if fault.kind == "dies" else signal.SIGSTOP)

    def commit(self, what: Contribution, payload: bytes | None) -> str | None:
        """Fails before anybody knows of its contribution."""
        if what.key.fragment == 0:
            self._round = what.key.round
            self.strike("before")
        return super().commit(what, payload)

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        """`gather`: fails with all payloads and no vote; `reduce`: with the set, and its mean not
        handed round."""
        reduces = self.mode == "reduce"
        if key.fragment == 0 and not reduces:
            self.strike("reducing")
        reply = super().vote(key, attempt, vote)
        if key.fragment == 0 and reduces and vote.phase == "held":
            self.strike("reducing")
        return reply

    mode = "gather"

    def group(self, begun: BeginReply, superseded: Any) -> PeerGroup:
        """A group whose sending fails in the middle."""
        found = super().group(begun, superseded)
        if self.faults:
            for link in found._links.values():
                if not isinstance(link._state, _Cut):
                    link._state = _Cut(link._state, self)
        return found


class _Cut:
    """Sends the first bytes of a payload, and strikes before the rest."""

    def __init__(self, state: LinkState, network: FailingNetwork) -> None:
        self._state, self._network = state, network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def piece(self) -> Piece | None:
        """As the link's, in two pieces."""
        found = self._state.piece()
        if found is None or found.frame.length < 2:
            return found
        if found.frame.offset:
            self._network.strike("sending")
            return found
        return found._replace(frame=found.frame._replace(length=FIRST))


def displacement(site: str, step: int) -> dict[str, torch.Tensor]:
    """What the inner step `step` of a site takes away from its parameters."""
    draw = torch.Generator().manual_seed(1000 * step + sum(site.encode()))
    return {name: 0.01 * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class Site:
    """One site's only rank."""

    def __init__(
        self, config: RunConfig, endpoint: Endpoint, me: str, faults: Sequence[Fault]
    ) -> None:
        self.me, self.told, self.round = me, Told(), 0
        limits = self.limits = Timeouts.derive(config.network)
        identity, _ = enrol(
            endpoint.url,
            endpoint.tokens[me],
            Applicant(me, config.digest(), stages=1, shards=1),
            timeouts=limits,
        )
        self.client = CoordinatorClient(
            endpoint.url, identity, limits, RankName(site=me, stage=0, shard=0)
        )
        self.control = RankControl(self.client, limits.beat, limits.stall, LINK, _end)
        self.control.start()
        place = RankPlace(me, 0, 0)
        links = open_endpoint(config.sites, identity, 0, 1, "127.0.0.1", limits)
        self.network = FailingNetwork(self.client, self.control, place, limits, links)
        self.network.faults, self.network.mode = faults, config.outer.exchange
        self.worker = ExchangeWorker(self.network, me)
        self.live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.moved = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        names = split_pieces(dict.fromkeys(SHAPES, 960), 2)
        self.layouts = [Layout.of({name: SHAPES[name] for name in group}) for group in names]
        states = [FragmentState(each, self.live, error_feedback=True) for each in self.layouts]
        self.loop = OuterLoop(states, self.live, LoopPlace(me), self.submit, self.control.touch)
        for number, layout in enumerate(self.layouts):
            for sums in (self.told.given, self.told.sent):
                sums[number] = np.zeros(layout.length)

    def submit(self, what: Contribution) -> Any:
        """Hand in, and keep what is needed to check the residual."""
        layout, began = self.layouts[what.key.fragment], time.monotonic()
        given = torch.from_numpy(self.told.given[what.key.fragment])
        for name, view in layout.views(given).items():
            view += what.weights[self.me] * self.moved[name]
            self.moved[name].zero_()
        future = self.worker.submit(what)

        def note(done: Any) -> None:
            if done.exception() is None:
                self._note(what.key, done.result(), time.monotonic() - began)

        future.add_done_callback(note)
        return future

    def _note(self, key: ExchangeKey, outcome: Outcome, seconds: float) -> None:
        told, sent = self.told, self.told.sent[key.fragment]
        told.seconds[key.text] = seconds
        told.decided[key.text] = time.monotonic()
        told.sets[key.text] = outcome.contributors
        if outcome.average is not None:
            told.averages[key.text] = tensors_digest({"average": outcome.average})
        if outcome.sent is not None:
            sent += outcome.sent.double().numpy()
        if outcome.second_error is not None:
            start, error = outcome.second_error
            sent[start : start + error.numel()] -= error.double().numpy()

    def train(self) -> Told:
        """All rounds and the flush."""
        self.control.wait_while_role("enrolled")
        self.client.ready()
        while True:
            reply = self.client.poll_plan(self.round, 1.0)
            self.control.touch()
            if self.control.news.phase == "starting" or reply.plan is None:
                continue
            if reply.plan.kind == "flush":
                break
            self.train_round(reply.plan)
        self.loop.flush(reply.plan)
        self.told.digests[-1] = self.digest()
        for number, state in enumerate(self.loop.states):
            assert state.residual is not None
            self.told.residual[number] = state.residual.double().numpy()
        self.client.finish()
        self.worker.close()
        self.told.late = self.network.late
        return self.told

    def train_round(self, plan: RoundPlan) -> None:
        """Two slots of an inner step each."""
        for slot in (1, 2):
            assert self.control.may_finish(plan.first_tick + slot)
            for name, by in displacement(self.me, plan.first_step + slot).items():
                before = self.live[name].double()
                self.live[name] -= by
                self.moved[name] += before - self.live[name].double()
            self.loop.end_of_slot(plan, slot)
            assert not self.loop.status.overtaken, "it was overtaken"
            self.control.at(plan.first_tick + slot, plan.round, slot, 0.02)
        self.told.ranges += plan.members[self.me].ranges
        self.client.round_done(plan.round)
        self.told.digests[plan.round] = self.digest()
        self.round += 1

    def digest(self) -> str:
        """Of all anchors and momenta."""
        return " ".join(state.digest() for state in self.loop.states)


def _end(error: DilocoxError) -> None:
    os._exit(3)


def run_sites(config: RunConfig, faults: Sequence[Fault], limit: float) -> End:
    """Train with all sites of `config` to the end, which must come within `limit` seconds."""
    folder = config.folder
    folder.mkdir(parents=True)
    ours: dict[str, Connection] = {}
    processes: dict[str, Any] = {}
    by_site = {site: [f for f in faults if f.site == site] for site in config.sites}
    deadline = time.monotonic() + limit
    try:
        for name in ("hub", *config.sites):
            ours[name], theirs = CONTEXT.Pipe(duplex=False)
            part = partial(_take_part, config, name, by_site.get(name, ()))
            processes[name] = CONTEXT.Process(target=run_and_tell, args=(part, theirs), name=name)
            processes[name].start()
            theirs.close()
        results = _supervise(folder, config, ours, processes, by_site, deadline)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    status, ledger, messages = results.pop("hub")
    return End(*status, Audit(**ledger), messages, results)


def _supervise(
    folder: Path,
    config: RunConfig,
    pipes: Mapping[str, Connection],
    processes: Mapping[str, Any],
    faults: Mapping[str, Sequence[Fault]],
    deadline: float,
) -> dict[str, Any]:
    """What everyone told; who was killed is reported at once, as a site's supervisor does."""
    results: dict[str, Any] = {}
    open_ = dict(pipes)
    kinds = {name: {fault.kind for fault in struck} for name, struck in faults.items()}
    awaited = {name for name in pipes if not kinds.get(name, set()) - {"slow"}}
    while awaited - results.keys():
        ready = wait(list(open_.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{', '.join(open_)} did not come to an end")
        for name in [name for name, pipe in open_.items() if pipe in ready]:
            try:
                results[name] = open_.pop(name).recv()
            except EOFError:
                processes[name].join()
                assert name not in awaited, f"{name}: ended without a word"
                if "dies" in kinds[name]:
                    assert processes[name].exitcode == -signal.SIGKILL
                    _retire(folder, config, name)
                continue
            assert not isinstance(results[name], str), f"{name}: {results[name]}"
    return results


def _retire(folder: Path, config: RunConfig, site: str) -> None:
    endpoint = Endpoint.load(folder / "endpoint.json")
    limits = Timeouts.derive(config.network)
    client = CoordinatorClient(endpoint.url, Identity.load(endpoint.operator), limits)
    client.retire(site, "was killed", now=True)
    client.close()


def _take_part(config: RunConfig, name: str, faults: Sequence[Fault]) -> Any:
    ready = config.folder / "endpoint.json"
    if name == "hub":
        return _serve(config, ready)
    while not ready.exists():
        time.sleep(0.01)
    return Site(config, Endpoint.load(ready), name, faults).train()


def _serve(config: RunConfig, ready: Path) -> Any:
    ledgers: list[Audit] = []
    messages: list[str] = []
    status = serve(
        config,
        config.folder / "coordinator",
        listener=RunListener(
            on_message=messages.append, on_ledger=lambda ledger: ledgers.append(audit(ledger))
        ),
        ready_file=ready,
    )
    return (status.phase, status.reason), asdict(ledgers[0]), messages
