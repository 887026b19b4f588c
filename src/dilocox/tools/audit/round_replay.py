"""One rank repeats one round: the trainer's own loop, with nobody at the other end of its lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import PlanReply, RoundPlan
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import CheckpointError, ExchangeError, RecordError
from dilocox.outer.loop import OuterLoop
from dilocox.record.log.blob_store import DOCUMENT_BYTES, Store, Stores
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.round_document import Document, Fingerprint, checksum, fingerprint
from dilocox.record.verify.replay import Get
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.state_recorder import Capture
from dilocox.tools.audit.recorded_exchanges import PayloadCheck, RecordedExchanges
from dilocox.tools.audit.state_document import UNFIT, DocumentError, check_tensors
from dilocox.training.builder import Batches, Hooks, ModelPlan, RankParts, RankPlace, build_rank
from dilocox.training.checkpointing import Checkpointer
from dilocox.training.determinism_class import facts_here
from dilocox.training.evaluator import Evaluator
from dilocox.training.rank_state import RankState, capture_round, restore_round
from dilocox.training.trainer import Trainer

Progress = Callable[[int], None]
"""Inner steps that are done."""


@dataclass(frozen=True)
class RankJob:
    """What a rank repeats."""

    config: RunConfig
    """With device, threads and precision as the site had them, where they are to be had."""
    place: RankPlace
    course: RunHistory
    plan: RoundPlan
    start: Document
    end: Document | None
    """The state after the round, if it is kept: another class is compared with its tensors."""
    stores: tuple[str, ...]
    data: Path
    """Folder of the token files."""
    meeting: str | None = None
    """File in which the site's ranks meet."""


@dataclass(frozen=True)
class RankReplay:
    """What came of it."""

    facts: Mapping[str, Any]
    """This process's determinism class."""
    steps: tuple[Fingerprint, ...]
    payloads: tuple[PayloadCheck, ...]
    end: Document
    moved: float | None
    """Norm of the difference of the parameters after the round over that of the way they had come
    in it, if the site's are kept."""
    kept: Mapping[str, float]
    """Of what else a site goes on with, such as its residual: norm of the difference by kind, if
    the site's are kept. Over its own norm; over that of the way that the parameters had come, where
    it counts in the same units and is less: residuals of fine codecs are rounding errors."""


class StepTracer:
    """A `RoundWatch` that keeps fingerprints to itself."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._steps: list[tuple[Tensor, Tensor]] = []

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        """The round's state was given."""

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        """See `RoundWatch`."""
        self._steps.append((numbers, checksum(parameters)))
        self._progress(len(self._steps))

    def wait(self) -> None:
        """Nothing is kept anywhere."""

    @property
    def taken(self) -> int:
        """Inner steps so far."""
        return len(self._steps)

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Of all steps so far."""
        return tuple(fingerprint(numbers, total) for numbers, total in self._steps)


class NullControlPlane:
    """Control, coordinator and checkpointer of a rank that has none: nobody waits, nobody hears."""

    news = SimpleNamespace(entering=[], phase="running")

    def touch(self) -> None:
        """Nobody counts it as dead."""

    def at(self, tick: int, round_: int, slot: int, seconds: float | None) -> None:
        """Nobody asks where it is."""

    def may_finish(self, tick: int) -> bool:
        """No lease."""
        return True

    def poll_plan(self, round_: int, wait: float = 0.0) -> PlanReply:
        """The next round is nobody's matter."""
        return PlanReply(plan=None, waiting_for="")

    def report(self, round_: int, metrics: Mapping[str, Any], kind: str = "round") -> None:
        """No metrics."""

    def round_done(self, round_: int, measured: Any) -> None:
        """No ledger."""

    def fail(self, reason: str) -> None:
        """No run."""

    def save(self, own: RankState, plan: RoundPlan | None, *, last: bool = False) -> None:
        """No checkpoint."""

    def begin_round(self, outer: OuterLoop, plan: RoundPlan) -> None:
        """No record."""


class RepeatingTrainer(Trainer):
    """A trainer that evaluates nothing: what is held out moves no parameter."""

    def evaluate(self, plan: RoundPlan, round_: int) -> None:
        """Left out."""


def repeat(job: RankJob, progress: Progress) -> RankReplay:
    """Repeat a round. Collective over the site's ranks. Raises `DilocoxError`."""
    rank = _build(job)
    rank.model.lead()
    found = _repeat(job, rank, progress)
    rank.model.let_go()
    return found


def follow(job: RankJob) -> None:
    """Repeat a round as a rank of a further replica: what the first one does."""
    _build(job).model.follow(lambda: None)


def _build(job: RankJob) -> RankParts:
    place, config = job.place, job.config
    files = TokenFiles.open(job.data)
    store = None if job.meeting is None else dist.FileStore(job.meeting, config.site.ranks)
    return build_rank(
        config,
        ModelPlan.of(config, files.vocabulary_size),
        place,
        Hooks(),
        store=store if config.site.ranks > 1 else None,
        local_rank=place.rank_of(config.site),
        ranks_here=config.site.ranks,
        timeout=Timeouts.derive(config.network).stall,
    )


def _repeat(job: RankJob, rank: RankParts, progress: Progress) -> RankReplay:
    place, config = job.place, job.config
    files = TokenFiles.open(job.data)
    stores = Stores([Store(each) for each in job.stores], most=DOCUMENT_BYTES)
    stores.expect([*job.start.tensors, *(() if job.end is None else job.end.tensors)])
    get = stores.get
    watch = StepTracer(progress)
    device = rank.mesh.device
    layouts = [state.layout for state in rank.states]
    exchanges = RecordedExchanges(
        job.course, place, layouts, get, lambda: watch.taken, device.type == "cpu"
    )
    nobody = NullControlPlane()
    outer = OuterLoop(
        rank.states, rank.live, place.site, place.stage, config.site.stages,
        exchanges.submit, nobody.touch,
        second=rank.model.second_moments,
    )  # fmt: skip
    trainer = RepeatingTrainer(
        state=RankState(config, rank, outer),
        control=cast(RankControl, nobody),
        client=cast(CoordinatorClient, nobody),
        batches=Batches.open(config, place.site, place.shard, files, device),
        evaluator=Evaluator(rank, cast(RankControl, nobody), [], None),
        checkpointer=cast(Checkpointer, nobody),
        hooks=Hooks(),
        form_group=_no_group,
        donor_pause=0.0,
        donor_patience=0.0,
        watch=watch,
    )
    facts = facts_here(config, device, rank.model.whole_gradients)
    _take_up(trainer, job, get)
    if job.plan.kind == "flush":
        outer.flush(job.plan)
    else:
        trainer.train_round(job.plan)
    tensors, state = capture_round(trainer.state)
    end = Document.of(tensors, state, facts, ())
    moved, kept = _differences(tensors, job, get)
    return RankReplay(facts, watch.fingerprints(), tuple(exchanges.checks), end, moved, kept)


def _take_up(trainer: Trainer, job: RankJob, get: Get) -> None:
    check_tensors(job.start, capture_round(trainer.state)[0])
    tensors = {each.name: load_tensor(each, get) for each in job.start.tensors}
    if trainer.rank.mesh.device.type != "cuda":
        tensors.pop("random/cuda", None)
    try:
        restore_round(trainer.state, tensors, job.start.state, job.plan.first_tick)
        trainer.outer.resume_in_flight()
    except (*UNFIT, CheckpointError, ExchangeError) as error:
        raise DocumentError(f"its state is not one of this run ({error})") from None


_OWN = ("residual", "reference", "previous", "own")
"""Tensors of a piece that no other check is of: in units of parameters."""


def _differences(
    found: Mapping[str, Tensor], job: RankJob, get: Get
) -> tuple[float | None, dict[str, float]]:
    """`RankReplay.moved` and `.kept` of the state that a repetition has `found`."""
    if job.end is None:
        return None, {}
    start, end = ({each.name: each for each in of.tensors} for of in (job.start, job.end))
    apart, size, way = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for name, tensor in found.items():
        kind = _kind(name)
        if kind is None:
            continue
        if name not in end:
            apart[kind] = math.inf
            continue
        ours, theirs = tensor.detach().cpu().double(), load_tensor(end[name], get).double()
        apart[kind] += float((ours - theirs).square().sum())
        size[kind] += float(ours.square().sum())
        if kind == "live":
            before = load_tensor(start[name], get).double()
            way += float((theirs - before).square().sum())
    moved = math.sqrt(apart.pop("live", 0.0) / (way or 1.0))
    kept = {}
    for kind, square in apart.items():
        norm = max(size[kind], way) if kind in _OWN else size[kind]
        if square:
            kept[kind] = math.sqrt(square / norm) if norm else math.inf
    return moved, kept


def _kind(name: str) -> str | None:
    """What a tensor of a state is, where no other check is of it."""
    group, *rest = name.split("/")
    if group == "inner":
        return rest[0]
    if group == "outer" and rest[-1] in _OWN:
        return rest[-1]
    return "live" if group == "live" else None


def load_tensor(about: TensorDigest, get: Get) -> Tensor:
    """A tensor of a state, on the CPU. Raises `RecordError`."""
    dtype = getattr(torch, about.dtype, None)
    data = get(about.sha256)
    if not isinstance(dtype, torch.dtype) or len(data) != dtype.itemsize * math.prod(about.shape):
        raise RecordError(f"{about.name}: its bytes are no {about.dtype} {list(about.shape)}")
    if not data:
        return torch.empty(about.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(about.shape)


def _no_group(name: str, donor: str, receiver: str) -> Any:
    raise RecordError("a repeated round has no peers")
