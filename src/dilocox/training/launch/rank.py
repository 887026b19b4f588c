"""The process of one rank: builds its parts, enters the run, trains and leaves."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import Checkpoint, Entering
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import (
    CheckpointError,
    DilocoxError,
    RecordError,
    RunEndedError,
    RunStoppedError,
)
from dilocox.inner import available_cores, resolve_device
from dilocox.inner.flight_recorder import record_collectives
from dilocox.inner.garbage import Collector
from dilocox.outer.first_state import FirstState
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.record.log.blob_store import Store
from dilocox.record.log.statements import Signer
from dilocox.record.writer.rank_recorder import RankRecord, SigningIdentity
from dilocox.record.writer.state_recorder import InnerRecord, RecordingPolicy
from dilocox.record.writer.windows import Windows, bound_of
from dilocox.training.builder import (
    Batches,
    Hooks,
    ModelPlan,
    RankParts,
    RankPlace,
    RankWiring,
    build_rank,
)
from dilocox.training.checkpointing import Checkpointer, record_state, take_momentum
from dilocox.training.determinism_class import facts_here
from dilocox.training.evaluator import Evaluator
from dilocox.training.held_out_batches import admission_of, probe_batch, validation_batches
from dilocox.training.held_out_sources import source_batches
from dilocox.training.join_run import JoiningSite
from dilocox.training.launch import site_log
from dilocox.training.launch.exchange_backend import LinkBackend
from dilocox.training.rank_errors import explained
from dilocox.training.rank_state import RankState
from dilocox.training.tasks.beside import TaskEvaluations
from dilocox.training.trainer import Stopped, Trainer
from dilocox.transport.exchange_worker import ExchangeWorker
from dilocox.transport.link.endpoint import LinkEndpoint, open_endpoint
from dilocox.transport.link.times import LinkTimes
from dilocox.utils import library_warnings, tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankJob:
    """The arguments of a rank's process."""

    config: RunConfig
    place: RankPlace
    url: str
    identity: Identity
    hooks: Hooks
    address: str
    """Interface name or IP address that the exchange binds to."""
    meeting: str | dist.Store | None
    """File or store in which the site's ranks meet. May be None: the rank is alone."""
    local_rank: int
    """Number of this rank among the ranks on this machine."""
    ranks_here: int
    """Number of ranks on this machine."""
    shared_folder: bool
    """Whether all sites of the run write to the same run folder."""
    log_file: Path | None
    """File for the rank's output. None leaves the output where it is."""
    debug: bool = False
    trace: Path | None = None
    """File for the rank's timeline. None records no timeline."""
    tell: site_log.Say | None = None
    """Gets a line per event and round. None if another process shows the run."""


STOPPED = 130
"""Exit code of a rank to which the coordinator has said that the run is stopped already."""
_REPLACED: list[TextIO] = []
"""Output streams that a rank's process used before its log."""

Errors = Callable[[str, bool], None]
"""(one line with the reason of a failure, whether another start would fail in the same way)."""


def run_rank(job: RankJob, errors: Errors) -> int:
    """Run one rank to its end, and return the exit code: 0, 1 after a failure, or `STOPPED`.

    The code is also 0 if this rank took part in the stop of the run, or if its site was asked to
    leave and has left. `errors` gets the reason of a failure. A rank that has failed keeps its
    process group, since destroying a group waits for its peers, which may be in a collective until
    the time limit. The caller ends the process by `processes.exit_now`.
    """
    _set_up_log(job)
    try:
        with tracing.recording(job.trace):
            _train(job, errors)
    except Stopped:
        _leave_group()
        return 0
    except RunStoppedError as error:
        log.warning("%s", error)
        return STOPPED
    except DilocoxError as error:
        _say_failed(errors, str(error), error.permanent)
        return 1
    except Exception as error:
        _say_failed(errors, f"{job.place}: {type(error).__name__}: {error}", False)
        return 1
    _leave_group()
    return 0


def _leave_group() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _say_failed(errors: Errors, line: str, permanent: bool) -> None:
    log.error("%s", line)
    log.error("%s", traceback.format_exc())
    errors(line, permanent)


def _train(job: RankJob, errors: Errors) -> None:
    config, place = job.config, job.place
    timeouts = Timeouts.derive(config.network)
    files = TokenFiles.open(config.data_folder)
    blueprint = ModelPlan.of(config, files.vocabulary_size)
    if not place.exchanges:
        _follow(job, blueprint, timeouts)
        return
    number = place.rank_of(config.site)
    endpoint = open_endpoint(
        config.sites,
        job.identity,
        number,
        config.site.exchanging_ranks,
        job.address,
        timeouts,
        config.network.congestion,
    )
    client = site_log.TellingClient(
        job.url,
        job.identity,
        timeouts,
        RankName(site=place.site, stage=place.stage, shard=place.shard),
    )
    if place.leads and job.tell is not None:
        client.tell = job.tell
        client.journal = functools.partial(site_log.note, config, place.site)

    def stuck(error: DilocoxError) -> None:
        log.error("%s; the training loop does not answer, it hangs here:", error)
        faulthandler.dump_traceback()
        errors(f"{place}: {error}", error.permanent)
        os._exit(1)

    control = RankControl(client, timeouts.beat, timeouts.stall, timeouts.heartbeat, stuck)
    try:
        # Building a large model takes minutes, in which the coordinator expects heartbeats.
        control.start(building=True)
        rank = _build(job, blueprint, timeouts, control.touch)
        control.built()
        if rank.not_deterministic:
            _say_not_deterministic(rank, client)
        rank.model.lead()
        # After an error replicas are not released: they may be in a collective that never ends.
        try:
            _take_part(job, rank, files, client, control, timeouts, endpoint)
        except Stopped:
            rank.model.let_go()
            raise
        rank.model.let_go()
    except DilocoxError as error:
        if place.leads or not isinstance(error, Stopped):
            with contextlib.suppress(DilocoxError):
                client.leave(str(error), failed=True)
        raise
    finally:
        endpoint.close()
        control.close()
        client.close()


def _build(
    job: RankJob, blueprint: ModelPlan, timeouts: Timeouts, progress: Callable[[], None]
) -> RankParts:
    """Build this rank's part of the model. Collective over the site."""
    config, place, store = job.config, job.place, job.meeting
    if isinstance(store, str):
        store = dist.FileStore(store, config.site.ranks) if config.site.ranks > 1 else None
    if config.site.ranks > 1 and resolve_device(config.site, job.local_rank).type == "cuda":
        record_collectives(_flight_records(job))
    with explained(config, place):
        rank = build_rank(
            config,
            blueprint,
            place,
            job.hooks,
            RankWiring(store, job.local_rank, job.ranks_here, timeouts.stall),
            progress,
        )
    torch.manual_seed(random_seed(config, place))
    return rank


def random_seed(config: RunConfig, place: RankPlace) -> int:
    """Return the seed of a rank's default generator, from which dropout draws.

    The seed is in 0..2**63-1, and differs between all ranks of all sites.
    """
    name = f"dilocox/random/1|{config.run.seed}|{place.site}|{place.rank_of(config.site)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def _follow(job: RankJob, blueprint: ModelPlan, timeouts: Timeouts) -> None:
    """Run a rank of a further replica. Neither other sites nor the coordinator know this rank."""
    rank = _build(job, blueprint, timeouts, lambda: None)
    collector, steps = Collector(), 0

    def step_done() -> None:
        nonlocal steps
        steps += 1
        collector.step()

    with explained(job.config, job.place, lambda: steps == 0):
        rank.model.follow(step_done)


def _take_part(
    job: RankJob,
    rank: RankParts,
    files: TokenFiles,
    client: site_log.TellingClient,
    control: RankControl,
    timeouts: Timeouts,
    endpoint: LinkEndpoint,
) -> None:
    config, place = job.config, job.place
    record = _open_record(job, rank, client)
    client.author = _author(job) if record is not None else None
    rounds = _open_rounds(job, rank, client)
    network = LinkBackend(client, control, place, timeouts, endpoint, record, rounds)
    times = LinkTimes(timeouts.link)
    worker = ExchangeWorker(network, place.site, _beside_training(rank), times)
    outer = OuterLoop(
        rank.states,
        rank.live,
        LoopPlace(place.site, place.stage, config.site.stages),
        worker.submit if record is None else record.watching(worker.submit),
        control.touch,
        hash_beside=rank.mesh.device.type != "cpu",
        admission=admission_of(config, rank, files),
        second=rank.model.second_moments,
    )
    checkpointer = Checkpointer(
        config, rank, files, job.shared_folder, client, record, control.touch
    )
    trainer = Trainer(
        state=RankState(config, rank, outer),
        control=control,
        client=client,
        batches=Batches.open(
            config, place.site, place.shard, files, rank.mesh.device, job.hooks.dataset
        ),
        evaluator=Evaluator(
            rank,
            control,
            validation_batches(config, files, place.shard, job.hooks.validation),
            probe_batch(config, files, place.shard),
            source_batches(config, files, place.shard, job.hooks),
        ),
        checkpointer=checkpointer,
        hooks=job.hooks,
        form_group=network.pair,
        donor_pause=timeouts.entry,
        donor_patience=2 * timeouts.heartbeat,
        watch=rounds,
        tasks=_tasks(config, place, client, checkpointer),
        collector=Collector(),
    )
    control.wait_while_role("enrolled")
    with explained(config, place, lambda: trainer.rounds_ended == 0):
        joining_site = _enter(trainer, client, checkpointer)
        if joining_site is None and trainer.at.tick == 0:
            record_state(record, "initial", 0, rank, control.touch, momentum=config.model.handover)
        if job.tell is not None and place.leads:
            job.tell(site_log.begins(place.site, None if joining_site else trainer.at.round))
            site_log.note(config, place.site, "begins", round=trainer.at.round)
        trainer.run(joining_site)
    worker.close()


def _tasks(
    config: RunConfig, place: RankPlace, client: CoordinatorClient, checkpointer: Checkpointer
) -> TaskEvaluations | None:
    if place.site != config.tasks_site:
        return None
    return TaskEvaluations(config, place.site, client, checkpointer.export, available_cores())


def _say_not_deterministic(rank: RankParts, client: CoordinatorClient) -> None:
    names = ", ".join(rank.not_deterministic)
    text = (
        f"no deterministic kernel on this GPU for {names}: the site trains without deterministic "
        "kernels, and audits of its rounds may be NOT_RUN (site.deterministic = false sets this "
        "for all sites)"
    )
    log.warning("%s", text)
    if rank.place.leads:
        _warning(client)(text)


def _open_record(job: RankJob, rank: RankParts, client: CoordinatorClient) -> RankRecord | None:
    """Return the writer of this rank's part of the record. None if the run is not recorded."""
    if not job.identity.record_run:
        return None
    patience = job.config.network.link_timeout
    store = Store(job.config.record_store, patience)
    windows = _open_windows(job, rank, store, _warning(client))
    return RankRecord(_author(job), store, client, _warning(client), patience, windows)


def _open_windows(
    job: RankJob, rank: RankParts, store: Store, warn: Callable[[str], None]
) -> Windows | None:
    """Return the windows that remove old payloads of this rank. None if all payloads stay."""
    place = job.place
    bound = bound_of(job.config, rank.blueprint.trained)
    if bound is None:
        return None
    name = f"{place.site}/{place.stage}.{place.shard}"
    try:
        return Windows(store, name, bound.for_one_of(job.config.site.exchanging_ranks))
    except RecordError as error:  # a store that cannot be reached does not end the run
        warn(f"record: {error}; all payloads stay")
        return None


def _open_rounds(job: RankJob, rank: RankParts, client: CoordinatorClient) -> InnerRecord | None:
    """Return the writer of this rank's states. None if no states are kept for audits."""
    config, place = job.config, job.place
    if not job.identity.record_run or config.record.states_every == 0:
        return None
    manner = RecordingPolicy(
        every=config.record.states_every,
        keep=config.record.states_keep,
        private=config.sites[place.site].data is not None,
        facts=facts_here(config, rank.mesh.device, rank.model.whole_gradients),
        replaced=job.hooks.replaced,
    )
    patience = config.network.link_timeout
    store = Store(config.record_store, patience)
    return InnerRecord(_author(job), manner, store, client, _warning(client), patience)


def _author(job: RankJob) -> SigningIdentity:
    place, identity = job.place, job.identity
    name = RankName(site=place.site, stage=place.stage, shard=place.shard)
    return SigningIdentity(identity.record_run, name, Signer.from_hex(identity.record_key))


def _warning(client: CoordinatorClient) -> Callable[[str], None]:
    def warn(text: str) -> None:
        with contextlib.suppress(DilocoxError):
            client.report(0, {"text": text}, kind="warning")

    return warn


def _beside_training(rank: RankParts) -> Callable[[], None] | None:
    """Return a function that limits the exchange thread to one thread of PyTorch. None on a GPU.

    Otherwise training and exchange together would have more OpenMP threads than there are cores.
    The runtime would then let all threads sleep at every barrier instead of spinning, which costs
    a quarter of the inner steps' speed.
    """
    if rank.mesh.device.type != "cpu":
        return None
    # `set_num_threads` also sets the number for threads that have not queried theirs yet. The
    # training thread queries its number now, so that it keeps that number.
    torch.get_num_threads()
    return lambda: torch.set_num_threads(1)


def _enter(
    trainer: Trainer, client: CoordinatorClient, checkpointer: Checkpointer
) -> JoiningSite | None:
    """Enter the run: load a checkpoint, be the founder, or start to fetch from a donor.

    Returns the fetching of state from a donor; None if this rank has its state already. If this
    site has no donor, raises `CheckpointError` if its part of the checkpoint is damaged, and
    `RunEndedError` if that part is missing.
    """
    news, first = trainer.control.news, None
    if news.phase == "starting":
        found = _last_complete(client.checkpoints())
        if found is not None and checkpointer.load(trainer.state, found):
            client.ready()
            return None
        if found is not None and news.donor is None and checkpointer.damage:
            client.spoiled(found.tick, checkpointer.damage)
            raise CheckpointError(
                f"{checkpointer.damage}; the run goes back to the checkpoint before"
            )
        if found is not None and news.donor is None:
            reason = (
                f"site {trainer.me} lacks its part of the checkpoint at slot {found.tick} in "
                f"{trainer.config.checkpoint_store}, and the other sites would fetch their state "
                "from this site; put the folder back, or start a new run from the model"
            )
            client.fail(reason)
            raise RunEndedError(reason)
        if found is None and trainer.config.model.handover:
            take_momentum(trainer.rank, str(trainer.config.model.path))
        if news.donor is None:
            client.ready()
            return None
        if found is None:
            model = trainer.config.model
            stored = model.path is not None and model.pretrained and trainer.config.adapter is None
            first = FirstState(trainer.me, news.donor, stored)
    entry = next(
        (e for e in news.entering if e.site == trainer.me),
        Entering(site=trainer.me, incarnation=0, donor=None, from_round=0),
    )
    return trainer.joining_site(entry, first)


def _last_complete(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    whole = [item for item in checkpoints if item.complete]
    return max(whole, key=lambda item: item.tick, default=None)


def _flight_records(job: RankJob) -> Path:
    """Return the path with which names of this rank's NCCL flight records begin, beside its log."""
    logs = job.config.folder / "logs" if job.log_file is None else job.log_file.parent
    place = job.place
    return logs / f"{place.file_name}-nccl-"


def _lines_to(descriptor: int) -> TextIO:
    """Return a line-buffered text stream to a descriptor, which stays open after the stream."""
    return open(
        descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _set_up_log(job: RankJob) -> None:
    library_warnings.silence()
    if job.log_file is not None:
        job.log_file.parent.mkdir(parents=True, exist_ok=True)
        stream = os.open(job.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        if stream > 2:
            os.close(stream)
        # Notebooks and output capture replace sys.stdout by a stream without a descriptor. The old
        # streams stay referenced: the stream that owns descriptor 1 would close it when freed.
        _REPLACED.extend((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = _lines_to(1), _lines_to(2)
    logging.basicConfig(
        level=logging.DEBUG if job.debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
