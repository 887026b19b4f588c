"""Writes and loads a rank's checkpoints, and publishes the model as a Hugging Face folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.messages import Checkpoint, RoundPlan
from dilocox.data import TokenFiles
from dilocox.errors import CheckpointError, DilocoxError, RunEndedError
from dilocox.models import (
    Published,
    finish_model_folder,
    stage_file_name,
    write_stage_file,
    write_tensors,
)
from dilocox.models.adapter_export import finish_adapter_folder, write_adapter_stage
from dilocox.models.adapter_weights import with_fixed
from dilocox.outer.anchor_state import copy_anchor
from dilocox.outer.staging import snapshot
from dilocox.record.verify.model_files import other_files
from dilocox.record.writer.rank_recorder import RankRecord
from dilocox.training import best_model, checkpoint_io
from dilocox.training.builder import RankParts
from dilocox.training.one_folder import joined_here, part_in_the_end
from dilocox.training.published_tokenizer import tokenizer_of
from dilocox.training.rank_state import RankState, capture, restore
from dilocox.training.whole_anchor import anchor_of, whole_anchor
from dilocox.utils import tracing
from dilocox.utils.storage import run_in_thread

if TYPE_CHECKING:
    from dilocox.inner import SiteMesh
    from dilocox.outer.loop import OuterLoop

log = logging.getLogger(__name__)

T = TypeVar("T")
MEETING = 5.0
"""Seconds between two collectives of a site's ranks while they wait for a disk or another site.

It is far below the time limit of a collective.
"""


class Checkpointer:
    """Writes this rank's checkpoints, and its part of the published model."""

    _form = Published()
    """Number format and file sizes of Hugging Face folders."""

    def __init__(
        self,
        config: RunConfig,
        rank: RankParts,
        files: TokenFiles | None,
        shared: bool,
        client: CoordinatorClient,
        record: RankRecord | None,
        touch: Callable[[], None],
    ) -> None:
        """Prepare to write; nothing is written yet.

        Args:
            files: the run's token files, whose tokenizer is published with the model. None: the
                tokenizer that the run file names is published, if the run file names one.
            shared: whether all sites write to one run folder. Otherwise the sites that have joined
                from this folder do.
            record: writer of this rank's part of the record; may be None.
            touch: called while the rank waits for a disk, so that it keeps counting as alive.
                The wait may be longer than the time after which a hanging rank counts as dead.
        """
        place = rank.place
        self._touch = touch
        self._client = client
        self._record = record
        self._config = config
        self._files, self._form = files, Published.of(config)
        self._shared = shared
        """Whether all sites write to one run folder. Only one of a folder's sites publishes."""
        self._publishes = False
        """Whether this site publishes the model in the end (`ends_run`)."""
        self._root = config.checkpoint_store
        self._recorded: int | None = None
        """Tick of this rank's latest checkpoint that the coordinator knows; None without one."""
        self.damage = ""
        """Why the last `load` failed at any rank of the site; empty without a failure."""
        self._writer = checkpoint_io.RankCheckpointer(
            self._root,
            place.site,
            place.stage,
            place.shard,
            config.checkpoint.keep,
            lambda: newest_whole(client.checkpoints()),
            config.network.link_timeout,
            lambda tensors: snapshot(tensors).tensors,
        )

    def save(self, own: RankState, plan: RoundPlan | None, *, last: bool = False) -> None:
        """Copy this rank's state now, and write the copy in the background.

        If the previous write has not ended, this checkpoint is skipped with a warning, because
        slow storage must not delay training. With `last` the previous write is waited for. A tick
        that is already recorded is not written again: a run may stop where a checkpoint has just
        been written, or where it was resumed. `plan` is the plan of the round, if there is one.

        With `checkpoint.hugging_face` this is collective over the site, and also writes a Hugging
        Face folder. That folder is left out if any rank has skipped its checkpoint.
        """
        at, client = own.at, self._client

        def written(tick: int, digest: str) -> None:
            client.checkpoint(tick, position[0], position[1], {"files.json": digest})
            self._recorded = tick

        def failed(tick: int, reason: str) -> None:
            warn(f"checkpoint after slot {tick} was not written ({reason})")

        def warn(text: str) -> None:
            _warn(client, position[0], text)

        position = (at.round, at.slot)
        with tracing.span("checkpoint", tick=at.tick):
            behind = None if last else self._writer.behind
            skipped = behind is not None and at.tick != self._recorded
            if behind is not None and skipped:
                warn(
                    f"checkpoint after slot {at.tick} was skipped: writing the checkpoint after "
                    f"slot {behind[0]} has taken {behind[1]:.0f} s so far; the storage is slow"
                )
            else:
                self._writer.wait(self._touch)
                if at.tick != self._recorded:
                    tensors, state = capture(own)
                    self._writer.save(at.tick, tensors, state, written, failed)
        if self._config.checkpoint.hugging_face:
            problem = self._exported_beside(own, plan, skipped=skipped)
            if problem and own.rank.place.leads:
                warn(problem)

    def _exported_beside(self, own: RankState, plan: RoundPlan | None, *, skipped: bool) -> str:
        """Write the Hugging Face folder beside a checkpoint, if all ranks of the site may.

        Collective over the site. A rank may have skipped its checkpoint, or have no plan where
        others have one, since each asks by itself. Returns why it failed, or an empty text.
        """
        may = (
            not skipped
            and plan is not None
            and plan.kind == "train"
            and self._here(plan.members, own.site)[0] == own.site
        )
        if _first(own.rank.mesh.gather_names(["" if may else "no"])):
            return ""
        folder = self._config.folder / f"model-tick-{own.at.tick:08d}"
        part = folder.with_name(f"{folder.name}.part")

        def put() -> None:
            if folder.is_dir():  # the same checkpoint, written before the run stopped
                shutil.rmtree(folder)
            part.replace(folder)

        return self._export_whole(own.rank, part, put)

    def _export_whole(self, rank: RankParts, part: Path, put: Callable[[], None]) -> str:
        """Write the anchor's folder to `part`, and call `put` when the folder is whole.

        `put` renames the folder. A disk that fails leaves no half model: a reader would take it for
        a whole one, and it would take room. Collective over the site. Returns the reason of a
        failure, or an empty text.
        """
        leads = rank.place.leads
        clear = (lambda: shutil.rmtree(part, ignore_errors=True)) if leads else None
        problem = (
            self._written(rank, part, clear)
            or self.export(rank, part)
            or self._written(rank, part, put if leads else None)
        )
        if problem:
            self._written(rank, part, clear)
        return problem

    def keep_best(self, rank: RankParts, round_: int, loss: float, *, first: bool) -> None:
        """Write the anchor as `model-best/` if its held-out loss is the lowest so far.

        Does nothing without `checkpoint.best`. `loss`: held-out loss of the anchor after
        `round_`. `first`: whether this site is the first of the plan. Of several sites that write
        to one run folder only that site writes, or the first one if that site is elsewhere. A disk
        that fails is reported and does not end the run. Collective over the site.
        """
        run = self._config.folder
        site, leads = rank.place.site, rank.place.leads
        if not self._config.checkpoint.best or round_ < 0 or (self._shared and not first):
            return
        # The leading rank decides for all, since each rank could find other files on the disk.
        writes = leads and (first or self._here(self._config.sites, site)[0] == site)
        better = writes and best_model.improves(run, site, loss)
        if not _first(rank.mesh.gather_names(["yes" if better else ""])):
            return
        with tracing.span("best model", after_round=round_):
            problem = self._export_whole(
                rank,
                best_model.partial(run, site),
                lambda: best_model.put(run, site, round_, loss),
            )
        if problem and leads:
            _warn(self._client, round_, f"the best model was not written ({problem})")

    def keep_theta(self, rank: RankParts) -> None:
        """Keep a copy of theta_0 in this site's store, in a run with `[availability]`.

        Collective over the site. Another site has made theta_0 and signs it. Without the copy, the
        record would be lost with that site, whatever pieces the others have.
        """
        record = self._record
        if record is None or self._config.availability is None or self._shared:
            return
        tensors, keeping = anchor_of(rank, self._config.handover is not None), None
        if rank.place.shard == 0:
            keeping = run_in_thread(lambda: record.copy_state(tensors))
        wait_together(rank.mesh, keeping, self._touch)

    def begin_round(self, outer: OuterLoop, plan: RoundPlan) -> None:
        """Tell the record that the round of `plan` begins, from the anchor of `outer`.

        The record may start a new window of kept rounds at this anchor.
        """
        if self._record is not None and plan.kind == "train":
            self._record.begin_round(
                plan.round, plan.first_tick, lambda: copy_anchor(outer, plan.round)
            )

    def wait(self) -> None:
        """Wait until the current write has ended and the record has all payloads so far."""
        self._writer.wait(self._touch)
        if self._record is not None:
            living(self._record.wait, self._touch)

    def ends_run(self, rank: RankParts, plan: RoundPlan) -> bool:
        """Return whether this site, which took part in the flush of `plan`, ends the run.

        That site evaluates the model (see `part_in_the_end`). Of several sites that write to one
        run folder, one publishes the model. This call waits until an earlier one of them has
        finished or all earlier ones are lost. Collective over the site. Raises `RunEndedError` if
        the run fails meanwhile.
        """
        client, seen, me = self._client, 0, rank.place.site
        with tracing.span("wait for the first site"):
            while True:
                part = ""
                if rank.place.leads:
                    status = client.status(seen, MEETING if seen else 0.0)
                    if status.phase == "failed":
                        raise RunEndedError(f"the run has failed: {status.reason}")
                    seen = status.sequence
                    here = self._here(plan.members, me)
                    part = part_in_the_end(status.sites, plan.members, me)
                    alone = here == [me] and not self._shared
                    part += " speaks" if alone else f" {part_in_the_end(status.sites, here, me)}"
                whole, own = _first(rank.mesh.gather_names([part])).split()
                self._touch()
                if own != "waits":
                    self._publishes = own == "speaks"
                    return whole == "speaks"

    def publish(self, rank: RankParts, plan: RoundPlan) -> None:
        """Write the anchor as `model/`, a Hugging Face folder. Collective over the site.

        Of several sites that write to one run folder only one writes it, as the call of `ends_run`
        before has found. Raises `CheckpointError` at all ranks of the site if the folder cannot be
        written.
        """
        mine = self._publishes
        folder = self._config.folder / "model"
        with tracing.span("publish"):
            problem = self.export(rank, folder) if mine else ""
        if problem:
            raise CheckpointError(problem)
        if mine:
            files = other_files(folder)
            touch, form = self._touch, self._form
            record_state(self._record, "final", plan.round, rank, touch, files, form=form)

    def _here(self, names: Iterable[str], me: str) -> list[str]:
        """Return those of the sites `names` that write to this site's run folder, with `me`."""
        return list(names) if self._shared else joined_here(self._config.folder, names, me)

    def export(self, rank: RankParts, folder: Path) -> str:
        """Write the anchor as a Hugging Face folder, or as a PEFT folder if adapters are trained.

        Collective over the site.

        Returns the reason why a rank of the site failed, or an empty text.
        """
        tensors, config = whole_anchor(rank), rank.blueprint.hf_config
        if self._config.model.own:
            return self._written(rank, folder, lambda: write_tensors(folder, tensors, self._form))
        adapter = rank.blueprint.adapter
        if adapter is None:
            tensors |= rank.model.saved_buffers()

        def stage() -> None:
            if adapter is not None:
                whole = with_fixed(tensors, config, adapter, self._config.run.seed)
                write_adapter_stage(folder, rank.place.stage, whole, self._form)
                return
            name = stage_file_name(rank.place.stage, rank.mesh.stages)
            write_stage_file(folder / name, tensors, config, self._form)

        def rest() -> None:
            revision, files = self._config.model.revision, self._files
            ends = () if files is None else files.ends_of_turn
            with tokenizer_of(self._config, files) as tokenizer:
                if adapter is not None:
                    model = self._config.model
                    finish_adapter_folder(folder, config, model, adapter, tokenizer, ends)
                    return
                finish_model_folder(folder, config, tokenizer, revision, ends)

        problem = self._written(rank, folder, stage if rank.place.shard == 0 else None)
        if problem:
            return problem
        return self._written(rank, folder, rest if rank.place.leads else None)

    def _written(self, rank: RankParts, folder: Path, write: Callable[[], None] | None) -> str:
        """Call `write` in a thread, and wait for all ranks of the site. Collective over the site.

        `write` is None at a rank that writes nothing. Returns the reason why a rank failed, or an
        empty text. Ranks meet again and again while a disk is busy, because one collective has a
        time limit.
        """
        writing = None if write is None else run_in_thread(write)
        while True:
            busy, problem = "", ""
            if writing is not None and not wait_for([writing], timeout=MEETING).done:
                busy = "busy"
            elif writing is not None:
                problem = _why_not(writing, folder)
            rows = rank.mesh.gather_names([problem, busy])
            self._touch()
            if not any(row[1] for row in rows):
                return _first(rows)

    def load(self, own: RankState, found: Checkpoint) -> bool:
        """Restore this rank's state from the checkpoint `found`. Collective over the site.

        Returns False if this site does not hold the whole checkpoint, or if a file is damaged.
        In the second case `damage` names the file and the reason.
        """
        place, mesh = own.rank.place, own.rank.mesh
        digests = found.digests.get(str(place), {})
        root = self._root
        here = "files.json" in digests and checkpoint_io.exists(
            root, found.tick, place.site, place.stage, place.shard
        )
        if not all(row[0] == "yes" for row in mesh.gather_names(["yes" if here else "no"])):
            return False
        loaded, damage = None, ""
        try:
            reading = run_in_thread(
                lambda: checkpoint_io.load(
                    root,
                    found.tick,
                    place.site,
                    place.stage,
                    place.shard,
                    digests["files.json"],
                    self._config.network.link_timeout,
                )
            )
            loaded = wait_together(mesh, reading, self._touch)
        except CheckpointError as error:
            damage = str(error)
        self.damage = _first(mesh.gather_names([damage]))
        if loaded is None or self.damage:
            log.error("%s", self.damage)
            if place.leads:
                self._client.report(found.round, {"text": self.damage}, kind="warning")
            return False
        restore(own, loaded)
        self._recorded = found.tick
        return True


def _warn(client: CoordinatorClient, round_: int, text: str) -> None:
    """Write a warning to the rank's log, and report it to the coordinator."""
    log.error("%s", text)
    try:
        client.report(round_, {"text": text}, kind="warning")
    except DilocoxError as error:
        log.error("the coordinator could not be told: %s", error)


def living(call: Callable[[], T], touch: Callable[[], None]) -> T:
    """Run `call` in a thread, and return or raise its result.

    `touch` is called meanwhile, so that this rank keeps counting as alive.
    """
    future = run_in_thread(call)
    while not wait_for([future], timeout=checkpoint_io.LOOK).done:
        touch()
    return future.result()


def wait_together(mesh: SiteMesh, mine: Future[T] | None, touch: Callable[[], None]) -> T | None:
    """Wait until the futures of all ranks of the site are done. Collective over the site.

    Returns or raises the result of `mine`. `mine` is None at a rank that waits for nothing itself;
    the result is then None. Ranks meet again and again, because one collective has a time limit.
    `touch` is called meanwhile, so that this rank keeps counting as alive.
    """
    while True:
        busy = mine is not None and not wait_for([mine], timeout=MEETING).done
        rows = mesh.gather_names(["busy" if busy else ""])
        touch()
        if not any(row[0] for row in rows):
            return None if mine is None else mine.result()


def _why_not(writing: Future[None], folder: Path) -> str:
    try:
        writing.result()
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{folder}: {error}"
    return ""


def _first(rows: list[list[str]]) -> str:
    return next((row[0] for row in rows if row[0]), "")


def newest_whole(checkpoints: Iterable[Checkpoint]) -> int | None:
    """Return the tick of the newest checkpoint that every rank has written. None without one."""
    return max((item.tick for item in checkpoints if item.complete), default=None)


def record_state(
    record: RankRecord | None,
    kind: str,
    round_: int,
    rank: RankParts,
    touch: Callable[[], None],
    files: Mapping[str, str] | None = None,
    momentum: bool = False,
    form: Published | None = None,
) -> None:
    """Sign and keep the site's anchor, if the run is recorded. Collective over the site.

    Runs in a thread: hashing and keeping a large stage may take longer than a collective's limit.

    Args:
        record: writer of this rank's part of the record. None: nothing is recorded.
        kind: kind of the state, such as "final".
        touch: called meanwhile, so that this rank keeps counting as alive.
        files: digests of further files of the published model, by name.
        momentum: whether to sign the outer momentum, too.
        form: format in which the anchor was published; None if it was not published.
    """
    if record is not None:
        tensors = anchor_of(rank, momentum)
        keeping = None
        if rank.place.shard == 0:
            told = files if rank.place.leads else None
            rounded = form.converted if form is not None and form.bf16 else None
            keeping = run_in_thread(lambda: record.state(kind, round_, tensors, told, rounded))
        wait_together(rank.mesh, keeping, touch)
