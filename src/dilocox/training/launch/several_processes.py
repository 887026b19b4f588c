"""A site around a loop of the user's own in several processes.

With DistributedDataParallel all processes hold the whole model, and the first one is the site for
the run. After each step it tells the others what follows: the next step, or the end. After each
slot it sends them the model's tensors, since the run may have changed them.

With FSDP2 each process holds some rows of every tensor, and is a shard of the site for the run. It
exchanges its rows by itself, and learns from the coordinator what follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from torch import Tensor

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import ConfigError, DilocoxError, TrainingError
from dilocox.inner.fsdp import drop_gathered
from dilocox.inner.loop_optimizers import LoopOptimizers
from dilocox.training.builder import RankPlace
from dilocox.training.launch.own_site import Outcome, OwnSite
from dilocox.training.launch.rank_job import RankJob
from dilocox.training.launch.torchrun import Seal, agree
from dilocox.training.loop.batches import batches_of_loop
from dilocox.training.loop.model import LoopModel, trained_tensors
from dilocox.training.loop.parts import OwnLoop, check_loop, plan_of
from dilocox.training.loop.ranks import SiteRanks
from dilocox.training.loop.turns import LoopLeftError, StepWork, Turns

_OUTCOMES: tuple[Outcome, ...] = ("running", "finished", "stopped", "left", "failed")
_FIELDS = 9
"""Numbers of a message: outcome, whether tensors follow, whether optimizer states follow, step,
learning rate, whether the step is its round's last, round, sequences of the step, and the number of
token ranges, which follow."""
PATIENCE = 2.0
"""Seconds, beside two heartbeats, in which a process that fails waits for the first process."""


def join_together(
    config: RunConfig,
    name: str,
    loop: OwnLoop,
    endpoint: Callable[[], Endpoint],
    show: Callable[[str], None],
) -> LeadingSite | FollowingSite | DividedSite:
    """Return this process's part of the site `name`, checked and not yet started. Collective.

    `endpoint`: returns the coordinator's address and the token. Called in the first process.
    `show`: shows a line in the first process.

    Raises `DilocoxError` in all processes if one of them cannot take part.
    """
    ranks = SiteRanks(name)
    found: LeadingSite | FollowingSite | DividedSite | None = None
    # The first process prepares the token files, which the others read.
    for turn in (0, 1):
        error: DilocoxError | None = None
        try:
            if config.site.shards > 1:
                if turn == min(ranks.rank, 1):
                    found = DividedSite(config, name, endpoint(), loop, show, ranks)
            elif turn == 0 and ranks.rank == 0:
                found = LeadingSite(config, name, endpoint(), loop, show, ranks)
            elif turn == 1 and ranks.rank > 0:
                found = FollowingSite(config, name, loop, ranks)
        except DilocoxError as raised:
            error = raised
        ranks.agree(error)
    assert found is not None
    ranks.check_same(sorted(trained_tensors(loop.model).items()))
    return found


class _Processes:
    """The part of both kinds of process that concerns failures and data."""

    config: RunConfig
    name: str
    ranks: SiteRanks
    _first = False
    """Whether this process was the first one to fail."""

    def check_batches(self) -> None:
        """Raise `ConfigError` if the run's batches cannot be divided among the processes."""
        unit, world = self.config.site.batch_unit, self.ranks.world
        if unit % world:
            raise ConfigError(
                f"site.micro_batch_size {self.config.site.micro_batch_size}: the run's batches "
                f"cannot be divided among the {world} processes of site {self.name}; set it to a "
                f"multiple of {world}, or give site.batches a loader"
            )

    def explanation(self, error: BaseException) -> TrainingError | None:
        """Return the failure of another process that has made this one's loop fail."""
        found = self.ranks.failure()
        if self._first or found is None or isinstance(error, DilocoxError):
            return None
        return TrainingError(f"site {self.name}: {found.reason}")

    def _check_others(self) -> None:
        """Raise `LoopLeftError` if another process of the site has failed."""
        found = self.ranks.failure()
        if found is not None and not self._first:
            raise LoopLeftError(f"site {self.name}: {found.reason}", failed=found.failed)

    def _first_reason(self, reason: str) -> str:
        """Return why the first process of the site that has failed did; else `reason`."""
        found = self.ranks.failure()
        return reason if found is None else found.reason

    def _fail(self, reason: str, *, failed: bool) -> None:
        self._first = self.ranks.fail(reason, failed=failed) or self._first


class _RunningSite(_Processes, OwnSite):
    """A process that takes part in the run itself."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        endpoint: Endpoint,
        loop: OwnLoop,
        tell: Callable[[str], None],
        ranks: SiteRanks,
    ) -> None:
        """See `OwnSite`. `ranks`: connects the processes of the site."""
        super().__init__(config, name, endpoint, loop, tell)
        self.ranks = ranks
        # The leading process is the one of rank 0.
        self._place = RankPlace(name, 0, ranks.rank)
        self._part = (ranks.rank, ranks.world)

    def end(self, reason: str, *, failed: bool) -> None:
        """See `OwnSite`. Also tells the other processes."""
        if self.outcome == "running":
            self._fail(reason, failed=failed)
        super().end(self._first_reason(reason), failed=failed)

    def _look(self) -> None:
        """See `OwnSite`. Also ends the site's part if another process has failed."""
        super()._look()
        self._check_others()


class LeadingSite(_RunningSite):
    """The first process of the site, which takes part in the run for all."""

    _known: tuple[int, int] | None = None
    """(round, slot of the run) at the latest message to the other processes."""

    def take(self) -> StepWork | None:
        """See `OwnSite`. Also tells the other processes what follows."""
        try:
            work = super().take()
        except BaseException as error:
            self._fail(str(error).partition("\n")[0], failed=True)
            with contextlib.suppress(TrainingError):
                self.ranks.send([_OUTCOMES.index("failed"), *[0] * (_FIELDS - 1)])
            raise
        self._send(work)
        return work

    def _send(self, work: StepWork | None) -> None:
        """Send what follows; `work` is None at the end."""
        assert self.trainer is not None
        at, began = self.trainer.at, self._known is None
        # Only at the ends of slots does the run change the model.
        moved = work is None or self._known != (at.round, at.tick)
        restored = began and self.model.restored
        due = None if self.batches is None or work is None else self.batches.due
        ranges, batch, number = due or ((), 0, 0)
        self.ranks.send(
            [
                _OUTCOMES.index(self.outcome if work is None else "running"),
                moved,
                restored,
                0 if work is None else work.step,
                0 if work is None else work.learning_rate,
                work is not None and work.last,
                at.round,
                batch,
                len(ranges),
            ]
        )
        if ranges:
            self.ranks.send([number, *(each for pair in ranges for each in pair)])
        if moved:
            self.ranks.share(list(self.trainer.rank.live.values()))
        if restored:
            self.ranks.share_state(self.model.optimizer_state())
        self._known = (at.round, at.tick)

    def done(
        self, loss: Tensor | float, grad_norm: Tensor | float | None, tokens: int | None
    ) -> None:
        """See `OwnSite`: loss and tokens are those of all processes."""
        super().done(*_of_all(self.ranks, loss, grad_norm, tokens))

    def check_model(self) -> None:
        """See `OwnSite`. Also compares the tensors of the processes."""
        super().check_model()
        self.ranks.check_equal(self.model.trained.values())

    def end(self, reason: str, *, failed: bool) -> None:
        """See `OwnSite`. Also tells a process that has failed that the coordinator knows."""
        super().end(reason, failed=failed)
        self.ranks.acknowledge()

    def _trained(self, job: RankJob) -> tuple[Outcome, BaseException | None]:
        found = super()._trained(job)
        self.ranks.acknowledge()
        return found


class DividedSite(_RunningSite):
    """One of the processes among which FSDP2 divides the model: each exchanges its own rows."""

    def take(self) -> StepWork | None:
        """See `OwnSite`. Also tells the other processes of an error."""
        try:
            return super().take()
        except BaseException as error:
            self._fail(str(error).partition("\n")[0], failed=True)
            raise

    def done(
        self, loss: Tensor | float, grad_norm: Tensor | float | None, tokens: int | None
    ) -> None:
        """See `OwnSite`: loss and tokens are those of all processes."""
        whole = _of_all(self.ranks, loss, grad_norm, tokens)
        # The run may change the rows of this process, and gathered tensors would be out of date.
        drop_gathered(self.loop.model)
        super().done(*whole)

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Raise `TrainingError`: no process has the whole shared model."""
        raise TrainingError(
            f"site {self.name}: no process has the whole shared model; the run folder's model has, "
            "and so has the loop's model after the run's end"
        )

    def retire(self) -> None:
        """See `OwnSite`. One process asks."""
        if self._place.leads:
            super().retire()

    def _joined(self) -> Identity:
        """See `OwnSite`. The first process enrols the site, and gives the others its identity."""
        text = agree(
            self.ranks.store,
            self.ranks.rank,
            self.ranks.world,
            lambda: None,
            lambda: super(DividedSite, self)._joined().to_text(),
            Seal(self._endpoint.tokens[self.name], self.name),
        )
        return Identity.from_text(text)

    def _mean(self, loss: float, labels: int) -> float:
        return float(self.ranks.combined(loss, labels)[0])


class FollowingSite(_Processes):
    """Every further process of the site. The run does not know it."""

    def __init__(self, config: RunConfig, name: str, loop: OwnLoop, ranks: SiteRanks) -> None:
        """Check the run file and the model. Raises `DilocoxError` for a wrong one."""
        self.config, self.name, self.loop, self.ranks = config, name, loop, ranks
        check_loop(config, name)
        files = None if config.data.own else TokenFiles.open(config.data_folder)
        _, self._shapes = plan_of(config, loop, None if files is None else files.vocabulary_size)
        trained = trained_tensors(loop.model)
        optimizers = LoopOptimizers(trained, loop.optimizers, loop.state)
        self.device = loop.device
        self.model = LoopModel(
            loop.model, trained, optimizers, Turns(self.device, lambda: None), None, _no_step
        )
        part = (ranks.rank, ranks.world)
        self.batches = batches_of_loop(config, name, part, files, self.device)
        self.outcome: Outcome = "running"
        self.round = 0
        """Number of the round, from 0."""

    def start(self) -> None:
        """Do nothing: the first process joins the run."""

    def take(self) -> StepWork | None:
        """Wait until the first process says what follows: a step, or None at the end.

        Raises `TrainingError` if another process has failed.
        """
        outcome, moved, restored, step, rate, last, round_, batch, count = self.ranks.receive(
            _FIELDS
        )
        self.outcome, self.round = _OUTCOMES[int(outcome)], int(round_)
        if self.outcome == "failed":
            found = self.ranks.failure()
            reason = "its first process has failed" if found is None else found.reason
            raise TrainingError(f"site {self.name}: {reason}")
        if count:
            number, *flat = map(int, self.ranks.receive(1 + 2 * int(count)))
            ranges = list(zip(flat[::2], flat[1::2], strict=True))
            self.batches.step(ranges, int(batch), number)
        if moved:
            trained = self.model.trained
            self.ranks.share([trained[name].detach() for name in self._shapes])
        if restored:
            self.model.load_optimizer_state(self.ranks.share_state(None))
        return StepWork(int(step), rate, bool(last)) if self.outcome == "running" else None

    def done(
        self, loss: Tensor | float, grad_norm: Tensor | float | None, tokens: int | None
    ) -> None:
        """Report the step that `take` has returned."""
        _of_all(self.ranks, loss, grad_norm, tokens)

    def check_model(self) -> None:
        """Raise `TrainingError` if trained tensors have changed their form, or differ."""
        self.model.check()
        self.ranks.check_equal(self.model.trained.values())

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Raise `TrainingError`: only the first process has the shared model."""
        raise TrainingError(
            f"site {self.name}: only process 0 has the shared model; call site.state_dict there"
        )

    def touch(self) -> None:
        """Do nothing: the first process says that the loop is at work."""

    def retire(self) -> None:
        """Do nothing: the first process asks to leave."""

    def end(self, reason: str, *, failed: bool) -> None:
        """Tell the first process that this one's loop has ended, if the run goes on.

        Returns when the coordinator knows: a launcher ends all processes after this one.
        """
        self.batches.close()
        if self.outcome != "running":
            return
        self._fail(reason, failed=failed)
        self.outcome = "failed" if failed else "left"
        self.ranks.wait_until_heard(2 * Timeouts.derive(self.config.network).beat + PATIENCE)


def _of_all(
    ranks: SiteRanks,
    loss: Tensor | float,
    grad_norm: Tensor | float | None,
    tokens: int | None,
) -> tuple[Tensor | float, Tensor | float | None, int | None]:
    """Return (loss, gradient norm, tokens) of one step of the whole site. Collective."""
    whole, total = ranks.combined(loss, tokens)
    return whole, grad_norm, total


def _no_step() -> tuple[int, bool]:
    raise AssertionError("the first process asks for steps")
