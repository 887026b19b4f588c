"""Two sites of one rank in this process, which train and record rounds as real ones do.

Loop, states, codecs, record and log are the engine's; only the network and the coordinator are
played. One site may cheat: every cheat is a change of what it does in one round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dilocox.compression import payload_digest
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.step_share import FULL, steps_taken
from dilocox.coordinator.server.notary import Decision
from dilocox.data import TokenFiles, prepare
from dilocox.outer.averaging import average
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.record.log.acceptance import Acceptance, OwnFacts, digest_of_entry
from dilocox.record.log.blob_store import Store
from dilocox.record.log.statements import Signer
from dilocox.record.writer.notary import TransparencyLogSink, code_digest
from dilocox.record.writer.rank_recorder import RankRecord, SigningIdentity
from dilocox.record.writer.state_recorder import InnerRecord, RecordingPolicy
from dilocox.tools.audit.null_control_plane import NullCheckpointer, NullControlPlane
from dilocox.tools.audit.round_replay import RepeatingTrainer
from dilocox.training.builder import (
    Batches,
    Hooks,
    ModelPlan,
    RankParts,
    RankPlace,
    RankWiring,
    build_rank,
)
from dilocox.training.checkpointing import record_state
from dilocox.training.determinism_class import facts_here
from dilocox.training.evaluator import Evaluator
from dilocox.training.rank_state import RankState
from dilocox.training.trainer import Trainer

STEPS, SLOTS = 4, 4
"""Inner steps and slots of a round."""

Cheat = Callable[["Neighbour"], Any]
"""A context in which a site trains one round; what it changes is put back."""


class Registry:
    """The coordinator's part: it decides, and its notary writes the log."""

    def __init__(
        self, config: RunConfig, paces: Mapping[str, int], fragments: Mapping[int, int]
    ) -> None:
        self.config, self.paces, self.fragments = config, paces, fragments
        self.gone: set[str] = set()
        """Sites that are still in plans and do nothing any more."""
        self.notary = TransparencyLogSink.open(config, config.folder / "coordinator", print)
        self.plans: dict[int, m.RoundPlan] = {}
        self._lock = threading.Lock()
        self._in: dict[str, dict[str, tuple[Contribution, Future[Outcome]]]] = {}
        self.sites: dict[str, Neighbour] = {}

    def record_state(self, statement: str) -> None:
        """What a rank has signed, whoever it is."""
        for site in self.config.sites:
            rank = m.RankId(site=site, stage=0, shard=0)
            if f'"site":"{site}"' in _payload(statement):
                with self._lock:
                    self.notary.checkpoint(rank, statement)

    def exchange(self, me: str, given: Contribution) -> Future[Outcome]:
        """Take a contribution; when all are there the exchange is over."""
        future: Future[Outcome] = Future()
        self.sites[me].watch.wait_signed()
        with self._lock:
            there = self._in.setdefault(given.key.text, {})
            there[me] = (given, future)
            if len(there) == len(self.sites) - len(self.gone):
                self._decide(given, there)
        return future

    def _decide(
        self, what: Contribution, there: Mapping[str, tuple[Contribution, Future[Outcome]]]
    ) -> None:
        plan, payloads = self.plans[what.key.round], {}
        parts = {
            site: cast(Any, each.compressor).part(0, what.length, what.seed)
            for site, (each, _) in there.items()
        }
        names = tuple(site for site in plan.members if site in there)
        for site in names:
            values = there[site][0].values
            assert values is not None
            payloads[site] = parts[site].encode(values)
            digest = payload_digest(payloads[site]).hex()
            rank = m.RankId(site=site, stage=0, shard=0)
            said = self.sites[site].record.commit(there[site][0], bytes.fromhex(digest))
            self.notary.committed(rank, what.key, said, bound=True)
        for site in names:
            digest = payload_digest(payloads[site]).hex()
            self.sites[site].store.put(bytes(payloads[site].numpy()))
            signed = self.sites[site].record.sign(what.key, 1, digest)
            rank = m.RankId(site=site, stage=0, shard=0)
            self.notary.contribution(rank, what.key, 1, digest, signed)
        self.notary.decided(Decision(what.key, 1, names, names, plan))
        seen = {site: parts[site].decode(payloads[site]) for site in names}
        mean = average((seen[site] for site in names), [1.0] * len(names))
        told = tuple(payloads[site] for site in names)
        for site, (_, future) in there.items():
            future.set_result(Outcome(mean, names, seen[site], None, 0, 0.0, 1, payloads=told))

    def _steps(self, site: str) -> int:
        return steps_taken(self.paces.get(site, FULL), 0, STEPS)

    def plan(self, round_: int) -> m.RoundPlan:
        """The next round's plan, on fresh token ranges."""
        batch = self.config.site.batch_size
        count = max(map(self._steps, self.config.sites)) * batch
        first = round_ * count * len(self.config.sites)
        plan = m.RoundPlan(
            round=round_,
            kind="train",
            first_tick=round_ * SLOTS,
            first_step=round_ * STEPS,
            members={
                site: m.MemberPlan(
                    weight=1.0,
                    batch=batch,
                    ranges=[(first + number * count, self._steps(site) * batch)],
                    space="shared",
                    pace=self.paces.get(site, FULL),
                )
                for number, site in enumerate(self.config.sites)
            },
            inner_steps=STEPS,
            slots=SLOTS,
            fragments=self.fragments.get(round_, 2),
            delay=1,
            overlap="keep",
            keep=0.7,
            learning_rate=self.config.outer.learning_rate,
            momentum=self.config.outer.momentum,
            codec=self.config.sent_as(self.config.compression.codec),
            residual_decay=0.95,
            residual_view=0.2,
            exchange="gather",
            checkpoint=False,
            evaluate=False,
            last=False,
        )
        self.plans[round_] = plan
        self.notary.planned(plan)
        return plan

    def flush(self, round_: int) -> m.RoundPlan:
        """The plan of the flush."""
        train = self.plans[round_ - 1]
        plan = train.model_copy(
            update={
                "round": round_, "kind": "flush", "first_tick": round_ * SLOTS, "inner_steps": 0,
                "slots": 0, "fragments": 2, "delay": 0, "overlap": "none", "residual_view": 0.0,
                "codec": self.config.sent_as("int8"), "last": True,
                "members": {
                    site: member.model_copy(update={"ranges": []})
                    for site, member in train.members.items()
                },
            }
        )  # fmt: skip
        self.plans[round_] = plan
        self.notary.planned(plan)
        return plan


def _payload(statement: str) -> str:
    from dilocox.record.log.statements import opened

    return opened(statement)[0].to_bytes().decode()


class Neighbour:
    """One site."""

    def __init__(self, registry: Registry, name: str, number: int, files: TokenFiles) -> None:
        config, place = registry.config, RankPlace(name, 0, 0)
        signer = Signer.from_hex(f"{number + 1:02x}" * 32)
        versions = m.Versions(dilocox="0", torch="0", python="0")
        registry.notary.enrolled(
            m.EnrolRequest.model_construct(
                site=name,
                record_key=signer.public,
                data_digest=files.digest,
                versions=versions,
            ),
            1,
        )
        rank = m.RankId(site=name, stage=0, shard=0)
        own = OwnFacts(files.digest, None, code_digest(), versions.named())
        manifest = registry.notary.manifest
        said = Acceptance(name, 1, signer.public, digest_of_entry(manifest), own, 0)
        registry.notary.checkpoint(rank, signer.sign(said.statement(registry.notary.run)))
        registry.sites[name] = self
        self.name = name
        self.rank: RankParts = build_rank(
            config, ModelPlan.of(config, files.vocabulary_size), place, Hooks(),
            RankWiring(store=None, local_rank=0, ranks_here=1, timeout=60.0),
        )  # fmt: skip
        author = SigningIdentity(registry.notary.run, rank, signer)
        self.store = Store(config.record_store)
        self.record = RankRecord(author, self.store, registry, print, 60.0)
        facts = facts_here(config, self.rank.mesh.device)
        self.watch = InnerRecord(
            author, RecordingPolicy(1, 0, False, facts), self.store, registry, print, 60.0
        )
        self.change: Callable[[Tensor], Tensor] = lambda u: u
        """What it makes of a contribution before it is sent."""
        self.tell: Callable[[Any], Any] = lambda compressor: compressor
        """Sets the second moments that it sends."""
        self.outer = OuterLoop(
            self.rank.states, self.rank.live, LoopPlace(name),
            lambda given: registry.exchange(name, self._given(given)), lambda: None,
            second=self.rank.model.second_moments,
        )  # fmt: skip
        nobody = NullControlPlane()
        self.trainer: Trainer = RepeatingTrainer(
            state=RankState(config, self.rank, self.outer),
            control=nobody,
            client=nobody,
            batches=Batches.open(config, place.site, place.shard, files),
            evaluator=Evaluator(self.rank, nobody, [], None),
            checkpointer=NullCheckpointer(),
            hooks=Hooks(),
            form_group=cast(Any, None),
            donor_pause=0.0,
            donor_patience=0.0,
            watch=self.watch,
        )
        record_state(self.record, "initial", 0, self.rank, nobody.touch)

    def _given(self, given: Contribution) -> Contribution:
        from dataclasses import replace

        assert given.values is not None
        compressor = self.tell(given.compressor)
        return replace(given, values=self.change(given.values), compressor=compressor)


def train(
    config: RunConfig,
    files: TokenFiles,
    rounds: int,
    cheats: Mapping[int, Cheat],
    paces: Mapping[str, int] | None = None,
    goes_after: int | None = None,
    fragments: Mapping[int, int] | None = None,
    flush: Cheat | None = None,
    ends: bool = False,
) -> None:
    """Train `rounds` rounds into the run's folder; lyon cheats in some, paris never.

    `paces`: of sites that are not as fast as the typical; they leave nothing of a step. After the
    round `goes_after` lyon is gone, though the next one names it. `fragments`: of rounds in which
    the two pieces are not exchanged apart. `flush`: the run ends with one, in which lyon does this;
    with `ends` both sites then sign their final state, as a run that has finished.
    """
    torch.set_num_threads(1)
    config.folder.mkdir(parents=True)
    (config.folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    registry = Registry(config, paces or {}, fragments or {})
    sites = [Neighbour(registry, name, number, files) for number, name in enumerate(config.sites)]
    with ThreadPoolExecutor(len(sites)) as pool:
        for round_ in range(rounds):
            plan = registry.plan(round_)

            def one(site: Neighbour, plan: m.RoundPlan = plan) -> None:
                cheat = cheats.get(plan.round) if site.name == "lyon" else None
                with (cheat or honest)(site):
                    site.trainer.train_round(plan)
                site.watch.wait()

            for future in [pool.submit(one, site) for site in sites]:
                future.result(60.0)
            if round_ == goes_after:
                registry.gone.add("lyon")
                sites = [site for site in sites if site.name != "lyon"]
    # What the last round ended in, as a run says when it has no more rounds to train.
    end = registry.flush(rounds)
    for site in sites:
        site.trainer.record_round_start(end)
        site.watch.wait()
    if flush is not None:
        with ThreadPoolExecutor(len(sites)) as pool:

            def last(site: Neighbour) -> None:
                with (flush if site.name == "lyon" else honest)(site):
                    site.outer.flush(end)

            for future in [pool.submit(last, site) for site in sites]:
                future.result(60.0)
    for site in sites if ends else ():
        record_state(site.record, "final", rounds, site.rank, NullControlPlane().touch)
    registry.notary.close()


@contextmanager
def honest(site: Neighbour) -> Any:
    """Nothing is changed."""
    yield


def run_config(root: Path, name: str, method: str = "dilocox") -> RunConfig:
    """The run file of two sites that keep the state of every round."""
    from tests.training.launch.test_preflight import ARCHITECTURE, config

    small = {**ARCHITECTURE, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    return config(
        root, name,
        model={"architecture": small},
        site={"stages": 1, "threads": 1, "precision": "fp32", "device": "cpu"},
        outer={"method": method, "rounds": 20, "inner_steps": STEPS, "fragments": 2},
        control={"adapt": "off"},
        record={"states_every": 1},
    )  # fmt: skip


def trained_in(
    root: Path, rounds: int, cheats: Mapping[int, Cheat], method: str = "dilocox", **more: Any
) -> Path:
    """Text, token files and a run of `train` below `root`; the run's folder. `more`: of `train`."""
    from tests.training.launch.test_preflight import write_text

    write_text(root / "text", 0)
    config = run_config(root, "run", method)
    files = prepare(config.data, config.data_folder, config.run.seed)
    train(config, files, rounds, cheats, **more)
    return config.folder
