"""Replays one round of one rank with the trainer's own loop, without coordinator or other sites."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import CheckpointError, ExchangeError, RecordError
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.record.log.blob_store import DOCUMENT_BYTES, Store, Stores
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.round_document import Document, Fingerprint, checksum, fingerprint
from dilocox.record.verify.replay import Get
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.state_recorder import Capture
from dilocox.tools.audit.null_control_plane import NullCheckpointer, NullControlPlane
from dilocox.tools.audit.recorded_exchanges import PayloadCheck, RecordedExchanges
from dilocox.tools.audit.state_document import UNFIT, DocumentError, check_tensors
from dilocox.training.builder import (
    Batches,
    Hooks,
    ModelPlan,
    RankParts,
    RankPlace,
    RankWiring,
    build_rank,
)
from dilocox.training.determinism_class import facts_here
from dilocox.training.evaluator import Evaluator
from dilocox.training.rank_state import RankState, capture_round, restore_round
from dilocox.training.trainer import Trainer

Progress = Callable[[int], None]
"""Called with the number of inner steps that are done."""


@dataclass(frozen=True)
class RankJob:
    """The round that a rank replays, and everything that it needs for that."""

    config: RunConfig
    """The run, with device, threads and precision of the site as far as this machine has them."""
    place: RankPlace
    course: RunHistory
    plan: RoundPlan
    start: Document
    end: Document | None
    """The site's state after the round. None if it is not kept. A replay in another determinism
    class is compared with its tensors."""
    stores: tuple[str, ...]
    data: Path
    """Folder of the token files."""
    hooks: Hooks = field(default_factory=Hooks)
    """The functions of the file on which the run agreed; none without them."""
    meeting: str | None = None
    """File of the rendezvous of the site's ranks. None: the site has one rank."""


@dataclass(frozen=True)
class RankReplay:
    """Result of a replay."""

    facts: Mapping[str, Any]
    """This process's determinism class."""
    steps: tuple[Fingerprint, ...]
    payloads: tuple[PayloadCheck, ...]
    end: Document
    moved: float | None
    """Norm of the difference of replayed and signed parameters after the round, over the norm of
    their change in the round. None if the site's state after the round is not kept."""
    kept: Mapping[str, float]
    """Relative difference of the rest of the state after the round, such as the residual, by kind.
    It is the norm of the difference over the tensors' own norm. For kinds in units of parameters
    it is over the norm of the parameters' change, if that is larger: residuals of fine codecs are
    only rounding errors. Empty if the site's state is not kept."""


class StepTracer:
    """A `RoundWatch` that stores the fingerprints of inner steps in memory."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._steps: list[tuple[Tensor, Tensor]] = []

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        """Do nothing: the state at the boundary was given."""

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        """Store the fingerprint of an inner step (`RoundWatch.step`)."""
        self._steps.append((numbers, checksum(parameters)))
        self._progress(len(self._steps))

    def wait(self) -> None:
        """Do nothing: there are no writes to wait for."""

    @property
    def taken(self) -> int:
        """Number of inner steps so far."""
        return len(self._steps)

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Return the fingerprints of all steps so far."""
        return tuple(fingerprint(numbers, total) for numbers, total in self._steps)


class RepeatingTrainer(Trainer):
    """A trainer that skips evaluations, because these do not change parameters."""

    def evaluate(self, plan: RoundPlan, round_: int) -> None:
        """Do nothing."""


def repeat(job: RankJob, progress: Progress) -> RankReplay:
    """Replay a round. All ranks of the site must call it together.

    Raises `DilocoxError` if the round cannot be replayed, `DocumentError` if the signed start
    state is not one of this run.
    """
    rank = _build(job)
    rank.model.lead()
    found = _repeat(job, rank, progress)
    rank.model.let_go()
    return found


def follow(job: RankJob) -> None:
    """Replay a round as a rank of a further replica, which follows the first replica's rank."""
    _build(job).model.follow(lambda: None)


def _build(job: RankJob) -> RankParts:
    place, config = job.place, job.config
    files = TokenFiles.open(job.data)
    store = None if job.meeting is None else dist.FileStore(job.meeting, config.site.ranks)
    return build_rank(
        config,
        ModelPlan.of(config, files.vocabulary_size),
        place,
        job.hooks,
        RankWiring(
            store=store if config.site.ranks > 1 else None,
            local_rank=place.rank_of(config.site),
            ranks_here=config.site.ranks,
            timeout=Timeouts.derive(config.network).stall,
        ),
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
        rank.states, rank.live, LoopPlace(place.site, place.stage, config.site.stages),
        exchanges.submit, nobody.touch,
        second=rank.model.second_moments,
    )  # fmt: skip
    trainer = RepeatingTrainer(
        state=RankState(config, rank, outer),
        control=nobody,
        client=nobody,
        batches=Batches.open(config, place.site, place.shard, files, device, job.hooks.dataset),
        evaluator=Evaluator(rank, nobody, [], None),
        checkpointer=NullCheckpointer(),
        hooks=job.hooks,
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
    check_tensors(job.start, capture_round(trainer.state)[0], job.hooks.optimizer is not None)
    tensors = {each.name: load_tensor(each, get) for each in job.start.tensors}
    if trainer.rank.mesh.device.type != "cuda":
        tensors.pop("random/cuda", None)
    try:
        restore_round(trainer.state, tensors, job.start.state, job.plan.first_tick)
        trainer.outer.resume_in_flight()
    except (*UNFIT, CheckpointError, ExchangeError) as error:
        raise DocumentError(f"its state is not one of this run ({error})") from None


_OWN = ("residual", "reference", "previous", "own")
"""Tensors of a piece that no other check covers; they are in units of parameters."""


def _differences(
    found: Mapping[str, Tensor], job: RankJob, get: Get
) -> tuple[float | None, dict[str, float]]:
    """Return `RankReplay.moved` and `RankReplay.kept` for the tensors `found` by a replay."""
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
    """Return the kind of a state's tensor by its name. None if another check covers the tensor."""
    group, *rest = name.split("/")
    if group == "inner":
        return rest[0]
    if group == "outer" and rest[-1] in _OWN:
        return rest[-1]
    return "live" if group == "live" else None


def load_tensor(about: TensorDigest, get: Get) -> Tensor:
    """Return a tensor of a state, on the CPU.

    Raises `RecordError` if it is in no store, or its bytes do not have its dtype and shape.
    """
    dtype = getattr(torch, about.dtype, None)
    data = get(about.sha256)
    if not isinstance(dtype, torch.dtype) or len(data) != dtype.itemsize * math.prod(about.shape):
        raise RecordError(f"{about.name}: its bytes are no {about.dtype} {list(about.shape)}")
    if not data:
        return torch.empty(about.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(about.shape)


def _no_group(name: str, donor: str, receiver: str) -> Any:
    raise RecordError("a repeated round has no peers")
