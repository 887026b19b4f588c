"""The process of one rank: builds its parts, enters the run, trains and leaves."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import logging
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import Checkpoint, Entering
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import (
    CheckpointError,
    ConfigError,
    DilocoxError,
    RunEndedError,
    RunStoppedError,
)
from dilocox.inner import SiteModel, available_cores, resolve_device
from dilocox.inner.flight_recorder import record_collectives
from dilocox.inner.garbage import Collector, PythonCollects
from dilocox.outer.exchanger import without_payloads
from dilocox.outer.first_state import FirstState
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.record.writer.rank_recorder import RankRecord
from dilocox.training.batches import NO_BATCH
from dilocox.training.builder import (
    Batches,
    ModelPlan,
    RankParts,
    RankPlace,
    RankWiring,
    build_rank,
)
from dilocox.training.checkpointing import Checkpointer, record_state
from dilocox.training.evaluator import Evaluator, Measure
from dilocox.training.held_out_batches import admission_of, probe_batch, validation_batches
from dilocox.training.held_out_sources import source_batches
from dilocox.training.join_run import JoiningSite
from dilocox.training.launch import site_log
from dilocox.training.launch.data_preparation import OWN_DATA
from dilocox.training.launch.exchange_backend import LinkBackend
from dilocox.training.launch.rank_job import STOPPED, RankJob
from dilocox.training.launch.rank_log import flight_records, set_up_log
from dilocox.training.launch.rank_writers import author_of, open_record, open_rounds, warning_to
from dilocox.training.loop.turns import LoopLeftError
from dilocox.training.rank_errors import explained
from dilocox.training.rank_state import RankState
from dilocox.training.tasks.beside import TaskEvaluations
from dilocox.training.trainer import Stopped, Trainer
from dilocox.training.whole_anchor import take_momentum
from dilocox.transport.exchange_worker import ExchangeWorker
from dilocox.transport.link.endpoint import LinkEndpoint, open_endpoint
from dilocox.transport.link.times import LinkTimes
from dilocox.utils import tracing
from dilocox.utils.file_errors import file_problem

log = logging.getLogger(__name__)


Errors = Callable[[str, bool], None]
"""(one line with the reason of a failure, whether another start would fail in the same way)."""


@dataclass(frozen=True)
class LoopParts:
    """What differs in a rank whose inner steps a loop of the user's own takes."""

    build: Callable[[TokenFiles | None], RankParts]
    """Returns the parts of the rank, given the run's token files; None if the run has no text."""
    batches: Callable[[TokenFiles | None], Batches]
    """Returns the batches, which the loop may read."""
    ready: Callable[[Trainer, RankControl, list[Callable[[], None]]], None]
    """Called before the trainer runs, with functions that end the rank's threads."""
    stuck: Callable[[DilocoxError], None]
    """Called if the training loop does not answer. The process goes on: it is the user's."""
    evaluates: bool = False
    """Whether the loop evaluates held-out data, which it has to in a run without text."""


def run_rank(job: RankJob, errors: Errors) -> int:
    """Run one rank to its end, and return the exit code: 0, 1 after a failure, or `STOPPED`.

    The code is also 0 if this rank took part in the stop of the run, or if its site was asked to
    leave and has left. `errors` gets the reason of a failure. A rank that has failed keeps its
    process group, since destroying a group waits for its peers, which may be in a collective until
    the time limit. The caller ends the process by `processes.exit_now`.
    """
    try:
        set_up_log(job)
    except OSError as error:  # without a log, a traceback would go to the terminal
        errors(f"{job.place}: {file_problem(error) or error}", False)
        return 1
    try:
        with tracing.recording(job.trace):
            train_rank(job, errors)
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
        text = file_problem(error) or f"{type(error).__name__}: {error}"
        _say_failed(errors, f"{job.place}: {text}", False)
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


def train_rank(job: RankJob, errors: Errors, loop: LoopParts | None = None) -> None:
    """Train as the rank of `job` to the end of the run.

    `loop`: a loop of the user's own takes the inner steps; None: dilocox's own loop does.

    Raises `Stopped` after a stop or if the site was asked to leave, and the error of a failure.
    """
    config, place = job.config, job.place
    timeouts = Timeouts.derive(config.network)
    files = None if config.data.own else TokenFiles.open(config.data_folder)
    if not place.exchanges:
        _follow(job, ModelPlan.of(config, _text(files).vocabulary_size), timeouts)
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
        if loop is not None:
            loop.stuck(error)
            return
        faulthandler.dump_traceback()
        errors(f"{place}: {error}", error.permanent)
        os._exit(1)

    control = RankControl(client, timeouts.beat, timeouts.stall, timeouts.heartbeat, stuck)
    try:
        # Building a large model takes minutes, in which the coordinator expects heartbeats.
        control.start(building=True)
        if loop is None:
            blueprint = ModelPlan.of(config, _text(files).vocabulary_size)
            rank = _build(job, blueprint, timeouts, control.touch)
        else:
            rank = loop.build(files)
        control.built()
        if rank.not_deterministic:
            _say_not_deterministic(rank, client)
        rank.model.lead()
        # After an error replicas are not released: they may be in a collective that never ends.
        try:
            _take_part(job, rank, files, client, control, timeouts, endpoint, loop)
        except Stopped:
            rank.model.let_go()
            raise
        rank.model.let_go()
    except DilocoxError as error:
        if place.leads or not isinstance(error, Stopped):
            with contextlib.suppress(DilocoxError):
                client.leave(
                    str(error), failed=not isinstance(error, LoopLeftError) or error.failed
                )
        raise
    finally:
        endpoint.close()
        control.close()
        client.close()


def _text(files: TokenFiles | None) -> TokenFiles:
    """Return the token files. Raises `ConfigError` if the run has none."""
    if files is None:
        raise ConfigError(OWN_DATA)
    return files


def _build(
    job: RankJob, blueprint: ModelPlan, timeouts: Timeouts, progress: Callable[[], None]
) -> RankParts:
    """Build this rank's part of the model. Collective over the site."""
    config, place, store = job.config, job.place, job.meeting
    if isinstance(store, str):
        store = dist.FileStore(store, config.site.ranks) if config.site.ranks > 1 else None
    if config.site.ranks > 1 and resolve_device(config.site, job.local_rank).type == "cuda":
        record_collectives(flight_records(job))
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
    files: TokenFiles | None,
    client: site_log.TellingClient,
    control: RankControl,
    timeouts: Timeouts,
    endpoint: LinkEndpoint,
    loop: LoopParts | None,
) -> None:
    config, place = job.config, job.place
    record = open_record(job, rank, client)
    client.author = author_of(job) if record is not None else None
    rounds = open_rounds(job, rank, client)
    network = LinkBackend(client, control, place, timeouts, endpoint, record, rounds)
    times = LinkTimes(timeouts.link)
    worker = ExchangeWorker(network, place.site, _beside_training(rank), times)
    outer = OuterLoop(
        rank.states,
        rank.live,
        LoopPlace(place.site, place.stage, config.site.stages),
        without_payloads(worker.submit) if record is None else record.watching(worker.submit),
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
        batches=loop.batches(files)
        if loop is not None
        else Batches.open(
            config, place.site, place.shard, _text(files), rank.mesh.device, job.hooks.dataset
        ),
        evaluator=_evaluator(job, rank, control, files, loop),
        checkpointer=checkpointer,
        hooks=job.hooks,
        form_group=network.pair,
        donor_pause=timeouts.entry,
        donor_patience=2 * timeouts.heartbeat,
        watch=rounds,
        tasks=_tasks(config, place, client, checkpointer),
        collector=Collector() if loop is None else PythonCollects(),
    )
    if loop is not None:
        loop.ready(trainer, control, ends_of(trainer, worker, record))
    control.wait_while_role("enrolled")
    with explained(config, place, lambda: trainer.rounds_ended == 0):
        joining_site = _enter(trainer, client, checkpointer)
        if joining_site is None and trainer.at.tick == 0:
            handed = config.handover is not None
            record_state(record, "initial", 0, rank, control.touch, momentum=handed)
        if job.tell is not None and place.leads:
            job.tell(site_log.begins(place.site, None if joining_site else trainer.at.round))
            site_log.note(config, place.site, "begins", round=trainer.at.round)
        trainer.run(joining_site)
    worker.close()


def ends_of(
    trainer: Trainer, worker: ExchangeWorker, record: RankRecord | None
) -> list[Callable[[], None]]:
    """Return functions that end all that runs beside a loop of the user's own.

    The user's process goes on when the loop's site has ended, so nothing ends by itself.
    """
    ends = [
        lambda: worker.close(0.0),
        trainer.background.close,
        trainer.batches.close,
        trainer.outer.close,
    ]
    if trainer.tasks is not None:
        ends.append(trainer.tasks.close)
    return ends if record is None else [*ends, record.close]


def _evaluator(
    job: RankJob,
    rank: RankParts,
    control: RankControl,
    files: TokenFiles | None,
    loop: LoopParts | None,
) -> Evaluator:
    """Return the evaluator, which reads held-out text of the run unless the loop has its own."""
    config, shard = job.config, job.place.shard
    if files is None:
        own = loop is not None and loop.evaluates
        return Evaluator(rank, control, [NO_BATCH] if own else [], None)
    return Evaluator(
        rank,
        control,
        validation_batches(config, files, shard, job.hooks.validation),
        probe_batch(config, files, shard),
        source_batches(config, files, shard, job.hooks),
        measure=_measure_of(config, rank),
    )


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
        warning_to(client)(text)


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
        if found is None and trainer.config.handover is not None:
            take_momentum(trainer.rank, trainer.config.handover)
        if news.donor is None:
            client.ready()
            return None
        if found is None and not trainer.config.model.own:
            first = _first_state(trainer.config, trainer.me, news.donor)
    entry = next(
        (e for e in news.entering if e.site == trainer.me),
        Entering(site=trainer.me, incarnation=0, donor=None, from_round=0),
    )
    published = None
    if trainer.config.record.published and news.phase != "starting":
        # Imported here, because few ranks need it.
        from dilocox.training.published_state import PublishedState

        published = PublishedState(trainer.state, client, entry.from_round, trainer.donor_pause)
    return trainer.joining_site(entry, first, published)


def _measure_of(config: RunConfig, rank: RankParts) -> Measure | None:
    """Return the evaluation of a batch that gives figures beside the loss; None without figures."""
    if config.data.format == "preference" and isinstance(rank.model, SiteModel):
        return rank.model.measure
    return None


def _first_state(config: RunConfig, site: str, donor: str) -> FirstState:
    """Return the check of theta_0 that `site` receives from `donor` at the start of the run."""
    model, adapter = config.model, config.adapter
    if adapter is not None:
        key = "adapter.path" if adapter.handover is None else "adapter.handover"
        return FirstState(site, donor, adapter.stored is not None, key)
    return FirstState(site, donor, model.path is not None and model.pretrained)


def _last_complete(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    whole = [item for item in checkpoints if item.complete]
    return max(whole, key=lambda item: item.tick, default=None)
