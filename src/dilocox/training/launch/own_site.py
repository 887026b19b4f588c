"""A site whose inner steps are taken by a loop of the user's own, in the user's process.

The trainer runs in a thread of this process. It is the trainer of every other site; only the inner
step waits for the user's loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.client.transport import addresses_of
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import (
    DilocoxError,
    JoinError,
    RetryLaterError,
    RunStoppedError,
    TrainingError,
)
from dilocox.inner.step_result import ReportedStep
from dilocox.models.prefetch import fetch_weights
from dilocox.training.builder import Batches, RankParts, RankPlace, anchors
from dilocox.training.launch import site_log
from dilocox.training.launch.capacity_check import open_checkpoints
from dilocox.training.launch.coordinator_check import ENDPOINT
from dilocox.training.launch.data_check import check_data
from dilocox.training.launch.data_preparation import prepare_here
from dilocox.training.launch.join_token import read_token
from dilocox.training.launch.model_check import check_model
from dilocox.training.launch.rank import LoopParts, train_rank
from dilocox.training.launch.rank_job import RankJob
from dilocox.training.launch.run_folder import check_writable
from dilocox.training.launch.site import SiteLine, enrol_site, exchange_address
from dilocox.training.loop.batches import LoopBatches, batches_of_loop
from dilocox.training.loop.hooks import LoopHooks
from dilocox.training.loop.model import LoopModel
from dilocox.training.loop.parts import (
    OwnLoop,
    OwnModelPlan,
    build_parts,
    check_loop,
    plan_of,
)
from dilocox.training.loop.turns import LoopLeftError, StepWork, Turns
from dilocox.training.trainer import Left, Stopped, Trainer
from dilocox.transport.link.endpoint import check_ports
from dilocox.transport.link.tcp import check_congestion
from dilocox.utils import library_warnings
from dilocox.utils.backoff import backoff_delays
from dilocox.utils.versions import check_versions

log = logging.getLogger("dilocox.site")

Outcome = Literal["running", "finished", "stopped", "left", "failed"]
"""How a site's part in the run has ended; `running` until then."""


def endpoint_of(
    config: RunConfig,
    site: str,
    address: str | None,
    token_file: str | Path | None,
) -> Endpoint:
    """Return the address of the run's coordinator, and the site's token.

    Without `address`, the coordinator runs on this machine and its folder is the run folder.

    Raises `JoinError` if the site, the coordinator or the token is not known.
    """
    if site not in config.sites:
        known = ", ".join(config.sites)
        raise JoinError(f"site {site!r}: not in the run file, which names: {known}")
    if address is not None:
        url = f"https://{address.removeprefix('https://')}"
        addresses_of(url)
        token = read_token(None if token_file is None else Path(token_file))
        return Endpoint(url, {site: token}, "")
    path = config.folder / "coordinator" / ENDPOINT
    try:
        found = Endpoint.load(path)
        return Endpoint(found.url, {site: found.tokens[site]}, "")
    except (OSError, ValueError, TypeError, KeyError):
        raise JoinError(
            f"site {site}: no coordinator of this run is known on this machine ({path}); start "
            "it here with dilocox coordinator RUN_FILE, or give address and token_file"
        ) from None


class OwnSite:
    """One site's part in a run, from the enrolment to its end."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        endpoint: Endpoint,
        loop: OwnLoop,
        tell: Callable[[str], None],
    ) -> None:
        """Check the run and this site. Nothing is started yet. `tell` gets lines for the user.

        Raises `DilocoxError` for a site that cannot take part.
        """
        self.config, self.name, self._endpoint, self.loop = config, name, endpoint, loop
        self._tell = tell
        check_versions()
        check_loop(config, name)
        check_writable(config.folder)
        open_checkpoints(config)
        check_congestion(config.network.congestion)
        library_warnings.silence_saves()
        self._hooks = LoopHooks()
        self._hooks.check(config, required=True)
        self.device = loop.device
        if not config.model.own:
            check_model(config, own_loop=True)
            fetch_weights(config)
        # A model of the user's own is checked before text is prepared, which may take long.
        own = plan_of(config, loop, None)[0] if config.model.own or config.data.own else None
        self._own_model = own.digest if isinstance(own, OwnModelPlan) else None
        if not config.data.own:
            files = prepare_here(config, tell)
            check_data(config, files, [name])
            if own is None:
                plan_of(config, loop, files.vocabulary_size)
        self._timeouts = Timeouts.derive(config.network)
        self._control: RankControl | None = None
        self.trainer: Trainer | None = None
        self.batches: LoopBatches | None = None
        self.outcome: Outcome = "running"
        self.turns = Turns(self.device, self._look)
        self._line: SiteLine | None = None
        self._place = RankPlace(name, 0, 0)
        self._part = (0, 1)
        """(number, parts): the part of each batch of the run's data that this process reads."""
        self._thread: threading.Thread | None = None
        self._threads: list[Callable[[], None]] = []
        """Functions that end the other threads."""

    def start(self) -> None:
        """Enrol the site and start the trainer's thread. Raises `DilocoxError` if refused."""
        config, name = self.config, self.name
        address = exchange_address(config, name, self._endpoint.url)
        if self._place.leads:
            check_ports(name, config.sites[name], config.site.exchanging_ranks, address)
        identity = self._joined()
        self._line = SiteLine(config, name, self._endpoint, identity)
        job = RankJob(
            config=config,
            place=self._place,
            url=self._endpoint.url,
            identity=identity,
            hooks=self._hooks,
            address=address,
            meeting=None,
            local_rank=self._place.shard,
            ranks_here=config.site.shards,
            shared_folder=False,
            log_file=None,
            tell=self._tell if self._place.leads else None,
        )
        # A thread that has not asked for its number of threads yet would take the trainer's.
        torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="dilocox-trainer", daemon=True
        )
        self._thread.start()

    def _joined(self) -> Identity:
        """Return this process's identity in the run, with which the site has joined."""
        identity = self._enrol()
        where = self._endpoint.url.removeprefix("https://")
        self._tell(site_log.joined(self.name, self.config.run.name, where))
        site_log.note_joined(self.config, self.name, where)
        return identity

    def _enrol(self) -> Identity:
        """Enrol the site; wait while an earlier process of the site still counts as present."""
        end = time.monotonic() + self._timeouts.link
        for pause in backoff_delays(self._timeouts.retry, self._timeouts.retry_most):
            try:
                return enrol_site(self.config, self.name, self._endpoint, self._own_model)
            except RetryLaterError as error:
                if time.monotonic() + pause > end:
                    raise
                self._tell(f"{error}; again in {pause:.1f} s")
                time.sleep(pause)
        raise AssertionError("the delays never end")

    def _run(self, job: RankJob) -> None:
        """Train to the end of the run, in the trainer's thread."""
        usual = torch.get_num_threads()
        if self.device.type == "cuda":
            # A new thread's current GPU is the first one.
            torch.cuda.set_device(self.device)
        if self.device.type == "cpu":
            # Two teams of threads of PyTorch would slow each other down.
            torch.set_num_threads(1)
        error: BaseException | None = None
        try:
            self.outcome, error = self._trained(job)
        finally:
            # New threads of the user's program get the number that this thread has set last.
            torch.set_num_threads(usual)
            self.turns.end(error)

    def _trained(self, job: RankJob) -> tuple[Outcome, BaseException | None]:
        """Train, and return how the site's part has ended, with the error that ended it."""
        outcome: Outcome = "failed"
        error: BaseException | None = None
        try:
            parts = LoopParts(
                self._build,
                self._open,
                self._ready,
                self._stuck,
                self.loop.evaluation is not None,
            )
            train_rank(job, self._failed, parts)
            self._take_anchor()
            outcome = "finished"
        except Left:
            outcome = "left"
        except (Stopped, RunStoppedError):
            outcome = "stopped"
        except LoopLeftError as found:
            outcome, error = "failed" if found.failed else "left", found
        except DilocoxError as found:
            error = found
        except BaseException as found:
            first = next(iter(str(found).splitlines()), "")
            said = f"{type(found).__name__}: {first}"
            error = TrainingError(f"site {self.name}: {said}")
            error.__cause__ = found
            # No rank has told the coordinator of an error that is not dilocox's own.
            if self._line is not None:
                self._line.leave(said, failed=True)
        failed = outcome == "failed"
        if not failed:
            # The user's thread raises the error of a failure.
            self._tell(self._last_line(outcome))
        site_log.note(
            self.config,
            self.name,
            "ended",
            code=0 if outcome == "finished" else 1 if failed else 130,
            reason="" if error is None else str(error),
        )
        return outcome, error

    def _last_line(self, outcome: Outcome) -> str:
        if outcome == "finished":
            return site_log.end(self.config, self.name)
        if outcome == "stopped":
            return f"site {self.name}: the run was stopped; resume it at its coordinator"
        return f"site {self.name} has left the run"

    def _build(self, files: TokenFiles | None) -> RankParts:
        return build_parts(
            self.config,
            None if files is None else files.vocabulary_size,
            self._place,
            self.loop,
            self.turns,
            lambda: (self._hooks.steps[0], self.batches is not None and self.batches.last),
            self._mean,
        )

    def _mean(self, loss: float, _labels: int) -> float:
        """Return the mean loss over the processes that divide the model.

        `loss` is the mean over this process's labels.
        """
        return loss

    def _open(self, files: TokenFiles | None) -> Batches:
        self.batches = batches_of_loop(self.config, self.name, self._part, files, self.device)
        return self.batches

    def _ready(
        self, trainer: Trainer, control: RankControl, threads: list[Callable[[], None]]
    ) -> None:
        self.trainer, self._control, self._threads = trainer, control, threads

    def _look(self) -> None:
        """Raise the error that ended this site's part in the run, if there is one."""
        if self._control is not None:
            _ = self._control.news

    def _stuck(self, error: DilocoxError) -> None:
        """End the trainer's wait for the loop. If it waits elsewhere, its own time limits do."""
        self.turns.leave(str(error), failed=True)

    def _failed(self, _line: str, _permanent: bool) -> None:
        """Do nothing: the user's thread raises the error."""

    def _take_anchor(self) -> None:
        """Put the run's last anchor, which is the published model, into the user's model."""
        assert self.trainer is not None
        rank = self.trainer.rank
        for state in rank.states:
            state.layout.unpack(state.anchor, rank.live)

    @property
    def round(self) -> int:
        """Number of the round, from 0."""
        return 0 if self.trainer is None else self.trainer.at.round

    @property
    def model(self) -> LoopModel:
        """The user's model as the trainer knows it."""
        assert self.trainer is not None
        model = self.trainer.rank.model
        assert isinstance(model, LoopModel)
        return model

    def take(self) -> StepWork | None:
        """Wait for the next inner step (`Turns.take`). Called by the user's thread."""
        return self.turns.take()

    def done(
        self, loss: Tensor | float, grad_norm: Tensor | float | None, tokens: int | None
    ) -> None:
        """Report the step that `take` has returned. Called by the user's thread."""
        self.turns.done(ReportedStep(loss, grad_norm, tokens))

    def check_model(self) -> None:
        """Raise `TrainingError` if trained tensors were replaced, added, frozen or converted."""
        self.model.check()

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the run's anchor by name.

        Raises `TrainingError` before the site has joined the run.
        """
        if self.trainer is None:
            raise TrainingError(
                f"site {self.name}: has no shared model before it has joined the run"
            )
        return anchors(self.trainer.rank)

    def check_batches(self) -> None:
        """Do nothing: this process reads whole batches."""

    def explanation(self, error: BaseException) -> TrainingError | None:
        """Return an error that says why the loop has ended by `error`, if `error` does not."""
        return None

    def touch(self) -> None:
        """Note that the user's loop is at work between two steps."""
        if self._control is not None:
            self._control.touch()

    def retire(self) -> None:
        """Ask the coordinator to let the site leave after the rounds that are planned.

        Raises `TrainingError` if the coordinator does not reply.
        """
        said = "" if self._line is None else self._line.ask_to_leave("asked to go by its loop")
        if not said:
            raise TrainingError(
                f"site {self.name}: the coordinator did not reply to its wish to leave; end the "
                "loop to leave at once"
            )
        self._tell(said)

    def end(self, reason: str, *, failed: bool) -> None:
        """End the site's part in the run, if it goes on, since the user's loop has ended."""
        if self._thread is None:
            return
        if self.outcome == "running":
            self.turns.leave(f"site {self.name}: {reason}", failed=failed)
            self._thread.join(self._timeouts.beat)
            if self._thread.is_alive() and self._line is not None:
                # The trainer waits for other sites: the coordinator ends that wait.
                self._line.leave(reason, failed=failed)
        self._thread.join(self._timeouts.heartbeat + self._timeouts.beat)
        for end in self._threads:
            end()
        if self._thread.is_alive():
            self.outcome = "failed"
            log.warning(
                "site %s: its thread waits for other sites and has not ended; do not use the model "
                "in this process any more",
                self.name,
            )
