"""The training loop of one rank: rounds of slots of inner steps (docs/algorithm.md §2).

Every rank of every site runs this same loop. A single site is the case D = 1. A site that enters
late follows the rounds without inner steps until a plan includes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from dilocox.coordinator.protocol.messages import Entering, PlanReply, RoundPlan
from dilocox.errors import RunEndedError
from dilocox.inner.garbage import PythonCollects
from dilocox.outer.first_state import FirstState
from dilocox.outer.staging import before_change
from dilocox.record.writer.state_recorder import RoundWatch
from dilocox.training.builder import Batches, Hooks
from dilocox.training.control_plane import CheckpointHook, ControlPlane, LeaseControl
from dilocox.training.evaluator import Evaluator
from dilocox.training.join_run import Donors, EntryStopped, FormGroup, JoiningSite
from dilocox.training.non_finite import NonFinitePolicy
from dilocox.training.own_code import evaluated
from dilocox.training.rank_state import RankState, capture_round
from dilocox.training.round_exchange import round_exchange
from dilocox.training.tasks.beside import TaskEvaluations, say_not_evaluated
from dilocox.utils import tracing
from dilocox.utils.background import BackgroundQueue

if TYPE_CHECKING:
    from dilocox.training.published_state import PublishedState

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop and has
    """The run was stopped after a checkpoint, or this site was asked to leave and has left."""


class Left(Stopped):
    """This site was asked to leave and has left; the run may go on."""


@dataclass
class Trainer:
    """Trains one rank, from its entry to the end of the run."""

    state: RankState
    control: LeaseControl
    client: ControlPlane
    batches: Batches
    evaluator: Evaluator
    checkpointer: CheckpointHook
    hooks: Hooks
    form_group: FormGroup
    donor_pause: float
    """Seconds without an offer after which a donor tells its receiver to keep waiting."""
    donor_patience: float
    """Seconds within which a donor whose link broke must be replaced by another donor."""
    background: BackgroundQueue = field(default_factory=BackgroundQueue)
    """Queue of requests to the coordinator, sent while training goes on. A round trip to the
    coordinator may take longer than an inner step."""
    counted_from: int = -1
    """First round in which this site took part after its latest entry."""
    ahead: Future[PlanReply] | None = None
    """Reply with the plan of the next round, which is requested while this round ends."""
    watch: RoundWatch | None = None
    """Signs states and fingerprints of inner steps, so that audits can repeat rounds. May be
    None: then no states are recorded."""
    tasks: TaskEvaluations | None = None
    """Evaluates anchors on tasks. None at a site that evaluates no tasks."""
    rounds_ended: int = 0
    """Number of rounds that this process has trained to their ends."""
    collector: PythonCollects = field(default_factory=PythonCollects)

    def __post_init__(self) -> None:
        own = self.state
        self.config, self.rank, self.outer = own.config, own.rank, own.outer
        self.meter, self.at, self.me = own.meter, own.at, own.site
        self.donors = Donors(
            own, self.control, self.client, self.background, self.form_group, self.donor_pause
        )
        self.non_finite = NonFinitePolicy(own, self.client)
        self.exchange = round_exchange(own, self.evaluator, self.non_finite)
        self.rank.model.before_update = before_change

    def run(self, joining_site: JoiningSite | None) -> None:
        """Train to the end of the run.

        `joining_site` fetches the state of a site that enters the run. It may be None: this rank
        then has its state already. Raises `Stopped` if the run was stopped or this site left it,
        and `DilocoxError` if the run or this site failed.
        """
        if joining_site is not None:
            self.enter(joining_site)
        self.control.at(self.at.tick, self.at.round, self.at.slot, None)
        if self.tasks is not None:
            self.tasks.begin(self.rank, self.at.round)
        while True:
            with tracing.span("wait for plan", round=self.at.round):
                plan = self.next_plan()
            self.outer.resume_in_flight()
            if plan.kind == "flush":
                if self.me not in plan.members or self.overtaken(plan.round - 1) is not None:
                    raise self.ends_without_it()
                break
            if self.me not in plan.members:
                self.catch_up()
                continue
            if plan.round == 0 and self.at.slot == 0:
                if self.counted_from == 0:
                    self.checkpointer.keep_theta(self.rank)
                self.evaluate(plan, -1)
                self.evaluate_tasks(-1)
            self.train_round(plan)
        self.finish(plan)

    def next_plan(self) -> RoundPlan:
        """Wait for the plan of the next round of this rank, and return the plan.

        While it waits, the rank serves entering sites as a donor. Raises `Stopped` if the run
        stops or this site is asked to leave.
        """
        ahead, self.ahead = self.ahead, None
        while True:
            if ahead is not None:
                reply, ahead = ahead.result(), None
            else:
                reply = self.client.poll_plan(self.at.round, 0.0 if self.donors.busy else 1.0)
            self.control.touch()
            self.donors.serve()
            # Raises if the run has failed or this site was declared gone.
            news = self.control.news
            # A resumed run has plans before all of its sites are back.
            started = news.phase != "starting"
            if reply.leave:
                self.depart()
            if reply.plan is not None and started:
                return reply.plan
            if news.stop_tick == self.at.tick and started:
                self.stop()
            if not started:
                self.control.hurry()
            self.collector.rest()
            if self.donors.busy or reply.plan is not None:
                time.sleep(0.02)

    def train_round(self, plan: RoundPlan) -> None:
        """Train the round of `plan`, from this rank's current slot to the end of the round."""
        self.meter.begin(plan, self.at.slot)
        if self.at.slot == 0:
            self.record_round_start(plan)
        tracing.mark(
            f"round {plan.round}", inner_steps=plan.inner_steps, codec=plan.codec, delay=plan.delay
        )
        self.state.weight = plan.members[self.me].weight
        for slot in range(self.at.slot + 1, plan.slots + 1):
            start = time.monotonic()
            with tracing.span("wait for lease"):
                leased = self.control.may_finish(plan.first_tick + slot)
            if not leased:
                self.stop()
            self.meter.held(time.monotonic() - start)
            self.train_slot(plan, slot)
            self.end_slot(plan, slot)
        self.end_round(plan)

    def record_round_start(self, plan: RoundPlan) -> None:
        """Have the state recorded in which the round of `plan` begins, if the run is recorded."""
        self.checkpointer.begin_round(self.outer, plan)
        if self.watch is not None:
            self.watch.boundary(
                plan.round,
                plan.first_tick,
                plan.kind == "train",
                lambda: capture_round(self.state),
            )

    def prefetch_plan(self, round_: int) -> None:
        """Request the plan of round `round_`, during the last inner step of the round before.

        An earlier request would miss sites that join or leave until then.
        """

        def ask() -> PlanReply:
            with tracing.span("ask for plan", round=round_):
                return self.client.poll_plan(round_)

        self.ahead = self.background.submit(ask)

    def train_slot(self, plan: RoundPlan, slot: int) -> None:
        """Take this site's inner steps of slot `slot`. A slow site may have none in a slot."""
        member = plan.members[self.me]
        steps = plan.inner_steps // plan.slots
        last = member.steps(plan.inner_steps) - 1
        for number in range(member.steps((slot - 1) * steps), member.steps(slot * steps)):
            if number == last:
                self.prefetch_plan(plan.round + 1)
            step = plan.first_step + member.place(number)
            rate = self.hooks.learning_rate(step, self.config)
            exchange = self.exchange.of_step(plan, number)
            tokens = member.batch * self.config.data.sequence_length
            with self.meter.first_step(self.outer.status.counts):
                with tracing.span("batch"):
                    averaged = () if exchange is None else list(plan.members.values())
                    batch = self.batches.step(member.ranges, member.batch, number, averaged)
                with tracing.span("inner step", step=step, site_tokens=tokens):
                    result = self.rank.model.inner_step(
                        batch.inputs, batch.labels, rate, exchange, batch.counted
                    )
            self.tell_of_compilation()
            if self.watch is not None:
                self.watch.step(result.numbers, self.rank.live.values())
            self.meter.add(result, rate)
            self.collector.step()
            self.control.touch()

    def tell_of_compilation(self) -> None:
        """Warn once, after the first step, if `torch.compile` fell back to eager execution."""
        problem = self.rank.model.compile_problem()
        if problem is not None:
            log.warning("%s: %s", self.rank.place, problem)
            text = f"stage {self.rank.place.stage} shard {self.rank.place.shard}: {problem}"
            self.background.submit(lambda: self.client.report(0, {"text": text}, kind="warning"))

    def end_slot(self, plan: RoundPlan, slot: int) -> None:
        """Apply the landings and take the boundaries that are due at the end of `slot`.

        Then report to the coordinator this rank's position and how long its slots take.
        """
        before_change()
        self.exchange.end_slot(plan, slot)
        self.at.slot, self.at.tick = slot, plan.first_tick + slot
        if slot < plan.slots:
            self.control.at(self.at.tick, plan.round, slot, self.meter.slot_seconds(slot))
            self.donors.serve()

    def end_round(self, plan: RoundPlan) -> None:
        """Report the round, and evaluate and write a checkpoint if `plan` says so.

        If the other sites have gone on without this site, it catches up instead.
        """
        self.outer.status.end_round()
        self.at.round, self.at.slot = plan.round + 1, 0
        self.rounds_ended += 1
        with tracing.span("account"), self.meter.working():
            if self.overtaken(plan.round) is not None:
                self.outer.status.mark_overtaken()
            metrics = self.meter.end(plan, self.outer, self.rank)
            self._add_labels(plan, metrics)
        if self.meter.dropped is not None:
            self.state.dropped_round = plan.round
        leads, measured = self.rank.place.leads, self.meter.measured

        def tell() -> None:
            with tracing.span("report", round=plan.round):
                if leads:
                    self.client.report(plan.round, metrics)
                self.client.round_done(plan.round, measured if leads else None)

        self.background.submit(tell)
        self.control.at(self.at.tick, self.at.round, 0, self.meter.slot_seconds(0))
        if self.meter.behind:
            self.catch_up()
            return
        if plan.evaluate or plan.checkpoint or self.donors.busy:
            self.background.wait()
        if plan.evaluate:
            self.evaluate(plan, plan.round)
        self.evaluate_tasks(plan.round)
        if plan.checkpoint:
            self.checkpointer.save(self.state, plan)
        self.donors.serve()

    def _add_labels(self, plan: RoundPlan, metrics: dict[str, Any]) -> None:
        """Add the labels that counted in this site's steps, if not every token is a label."""
        member = plan.members.get(self.me)
        if member is not None:
            labels = self.batches.labels(member.ranges, member.batch * metrics["steps"])
            if labels is not None:
                metrics["labels"] = labels

    def overtaken(self, round_: int) -> Entering | None:
        """Return this site's new entry if the others have gone on without it after `round_`.

        None if the site still takes part.
        """
        for entry in self.control.news.entering:
            # The last heartbeat may still name the entry that this site has completed.
            if entry.site == self.me and entry.from_round > max(round_, self.counted_from):
                return entry
        return None

    def ends_without_it(self) -> RunEndedError:
        """Return the error of a site that is left behind when the run ends.

        Its anchor is not the run's anchor, and no round is left in which it could catch up.
        """
        return RunEndedError(
            f"site {self.me}: the run ended while this site was left behind; the other sites have "
            "the model"
        )

    def catch_up(self) -> None:
        """Enter the run again after the other sites have gone on without this site.

        This site's training since then is kept in its residual. The state of its inner optimizer
        is kept, too. Raises `RunEndedError` if the run ends first.
        """
        log.warning(
            "site %s is left behind: it keeps its training in the residual and catches up", self.me
        )
        self.background.wait()
        self.ahead = None
        # This site may have trained another round before the coordinator named the entry.
        while (entry := self.overtaken(-1)) is None:
            self.control.hurry()
            self.control.touch()
            time.sleep(0.02)
        if entry.from_round > self.at.round:
            # The last exchange without this site is of this round. No round follows a flush.
            begun = self.client.poll_plan(entry.from_round - 1).plan
            if begun is not None and begun.kind == "flush":
                raise self.ends_without_it()
        before_change()
        with tracing.span("catch up", from_round=entry.from_round):
            self.outer.fold_into_residual(self.state.weight)
            self.enter(self.joining_site(entry))
        self.control.at(self.at.tick, self.at.round, self.at.slot, None)

    def joining_site(
        self,
        entry: Entering,
        first: FirstState | None = None,
        published: PublishedState | None = None,
    ) -> JoiningSite:
        """Start to fetch this rank's pieces, as `entry` says.

        `first`, `published`: see `JoiningSite`.
        """
        return JoiningSite(
            self.state,
            self.control,
            self.client,
            entry,
            self.form_group,
            self.donor_patience,
            first,
            published,
        )

    def enter(self, joining_site: JoiningSite) -> None:
        """Catch up until the next plan includes this site (see `JoiningSite.catch_up`).

        Raises `Stopped` if the run stops meanwhile or the site is asked to leave.
        """
        self.collector.rest()
        try:
            joining_site.catch_up()
        except EntryStopped as stop:
            self.turn_back(stop.leaves)
        self.counted_from = self.at.round

    def evaluate(self, plan: RoundPlan, round_: int) -> None:
        """Evaluate the held-out loss of the anchor after `round_`; -1 means before training.

        The first site of `plan` evaluates. With `evaluation.patience` all sites evaluate, because
        one site alone must not end the run.
        """
        if next(iter(plan.members)) == self.me:
            self.report_eval_loss(round_)
        elif not self.evaluator.has_held_out:
            return
        elif self.config.evaluation.patience and round_ >= 0:
            loss = self.evaluator.held_out_loss(round_).mean
            if self.rank.place.leads:
                found = {"val_loss": loss, "after_round": round_}
                self.client.report(round_, found, kind="peer_evaluation")
            self.checkpointer.keep_best(self.rank, round_, loss, first=False)

    def evaluate_tasks(self, round_: int) -> None:
        """Begin to evaluate the anchor after `round_` on tasks, if this site has to."""
        if self.tasks is not None:
            self.tasks.after_round(self.rank, round_)

    def report_eval_loss(self, round_: int) -> None:
        """Evaluate the anchor after `round_`, and report the held-out loss, if there is one."""
        if not self.evaluator.has_held_out:
            return
        loss, by_source, figures = self.evaluator.held_out_loss(round_, by_source=True)
        if self.rank.place.leads:
            evaluated(self.client, self.hooks.on_evaluation, round_, loss, by_source, figures)
        self.checkpointer.keep_best(self.rank, round_, loss, first=True)

    def wait_for_record(self) -> None:
        """Return when all checkpoints and the whole record up to now are written."""
        self.checkpointer.wait()
        if self.watch is not None:
            self.watch.wait()

    def stop(self) -> None:
        """Write a checkpoint at the slot where the whole run stops. Raises `Stopped`."""
        self.background.wait()
        plan = self.client.poll_plan(self.at.round, 0.0).plan
        self.checkpointer.save(self.state, plan, last=True)
        self._go(lambda: self.client.finish(complete=False))

    def depart(self) -> None:
        """Leave the run, after this rank's exchanges in flight have ended. Raises `Stopped`."""
        self.background.wait()
        self.outer.settle()
        self._go(self.client.depart, Left)

    def turn_back(self, leaves: bool) -> NoReturn:
        """End this site's part before it has trained a round since its latest entry.

        `leaves`: the site was asked to leave; otherwise the run stops. Raises `Stopped`.
        """
        self.background.wait()
        if leaves:
            self._go(self.client.depart, Left)
        self._go(lambda: self.client.finish(complete=False))

    def _go(self, say: Callable[[], object], end: type[Stopped] = Stopped) -> NoReturn:
        if self.tasks is not None:
            self.tasks.close()
        self.wait_for_record()
        say()
        raise end

    def finish(self, plan: RoundPlan) -> None:
        """Write the last checkpoint, flush, evaluate and publish the model.

        The last checkpoint is taken before the flush, so that a resumed run flushes only once.
        Raises `RunEndedError` if the other sites have flushed without this site.
        """
        self.background.wait()
        self.checkpointer.save(self.state, plan, last=True)
        self.record_round_start(plan)
        if self.watch is not None:
            # An auditor may look for this state as soon as the flush is decided, which is at once.
            self.watch.wait()
        before_change()
        self.exchange.flush(plan)
        self.meter.begin(plan, 0)
        self.non_finite.check_pseudo_gradients(plan)
        metrics = self.meter.end(plan, self.outer, self.rank)
        if self.rank.place.leads:
            self.client.report(plan.round, metrics, kind="flush")
        if self.meter.behind:
            raise self.ends_without_it()
        ends_run = self.checkpointer.ends_run(self.rank, plan)
        if ends_run:
            self.report_eval_loss(plan.round)
        self.checkpointer.publish(self.rank, plan)
        if self.tasks is not None:
            self.tasks.finish(self.rank, plan.round, self.control)
        elif ends_run and self.rank.place.leads:
            say_not_evaluated(self.client, self.config, plan)
        self.wait_for_record()
        self.client.finish(complete=True)
