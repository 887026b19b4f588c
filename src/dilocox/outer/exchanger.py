"""Starts the exchanges of one rank beside training, waits for them, and counts their costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace

import torch

from dilocox.compression.second_moments import carried
from dilocox.config.codec_spec import parse_spec
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.fragment_group import FragmentGroup
from dilocox.outer.in_flight import Pending
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.staging import staging_of
from dilocox.utils import tracing

Submit = Callable[[Contribution], "Future[Outcome]"]
"""Starts an exchange beside training."""


def for_landing(given: Contribution, future: Future[Outcome]) -> Future[Outcome]:
    """Return a future of the outcome of `future`, without what no landing needs of its payloads.

    A landing may come a whole round after its exchange, and the payloads would be held until then.
    Of the payloads a landing reads the second moments alone: a copy of the moments takes the place
    of each payload that carries them.
    """
    codec = given.compressor
    moments = parse_spec(codec.name).moments
    landing: Future[Outcome] = Future()

    def ended(future: Future[Outcome]) -> None:
        # An error must reach the landing, which waits for `landing` alone.
        try:
            outcome = future.result()
            whole = outcome.payloads if moments else ()
            left = tuple(carried(payload, codec.geometry).clone() for payload in whole)
            landing.set_result(replace(outcome, payloads=left))
        except BaseException as error:
            landing.set_exception(error)

    future.add_done_callback(ended)
    return landing


def without_payloads(submit: Submit) -> Submit:
    """Wrap `submit` for a run that keeps no payloads; see `for_landing`."""
    return lambda given: for_landing(given, submit(given))


class Exchanger:
    """The exchanges of one rank, from the contribution to the outcome."""

    def __init__(
        self,
        site: str,
        device: torch.device,
        submit: Submit,
        touch: Callable[[], None],
        status: LoopStatus,
    ) -> None:
        """Prepare to exchange.

        Args:
            site: name of this rank's site.
            device: device of the outer state, which encodes, decodes and averages.
            submit: starts an exchange beside training.
            touch: called while this rank waits, so that it still counts as alive.
            status: holds the counts of this rank.
        """
        self._site, self._device = site, device
        self._submit, self._touch = submit, touch
        self._status = status

    def start(
        self,
        item: Pending,
        whole: FragmentGroup,
        aggregation: str = "mean",
        examines: bool = False,
    ) -> None:
        """Submit the exchange `item` of the pieces `whole`, and set `item.outcome`.

        `aggregation` and `examines`: see `Contribution`.
        """
        plan = item.plan
        if item.contribution is not None:
            # A contribution from a checkpoint is in host memory.
            item.contribution = item.contribution.to(self._device)
        staging = staging_of(self._device)
        chosen = whole.compressor(plan.codec)
        if item.moments is not None:
            chosen = chosen.carrying(item.moments)
        item.outcome = self._submit(
            Contribution(
                key=item.key,
                length=whole.layout.length,
                values=item.contribution,
                compressor=chosen,
                warm=None if chosen.agreement is None else whole.warm,
                mode=plan.exchange,
                weights={site: member.weight for site, member in plan.members.items()},
                contributes=item.contributes,
                aggregation=aggregation,
                examines=examines,
                probe=item.probe,
                staging=staging,
                ready=staging.mark(),
            )
        )

    def wait(self, item: Pending) -> Outcome:
        """Wait until the exchange `item` has ended, and return its outcome.

        Raises the error of an exchange that failed.
        """
        start, counts = time.monotonic(), self._status.counts
        with tracing.span("wait for landing", key=item.key.text):
            while not wait_for([item.outcome], timeout=1.0).done:
                self._touch()
            outcome = item.outcome.result()
        if outcome.ready is not None:
            outcome.ready.wait()
        second = None if outcome.second_error is None else outcome.second_error[1]
        staging_of(self._device).use(outcome.average, outcome.sent, second)
        counts.wait_seconds += time.monotonic() - start
        self._blame(outcome, start)
        return outcome

    def _blame(self, outcome: Outcome, since: float) -> None:
        """Count the wait from `since` on against the site that was ready last."""
        others = {site: at for site, at in outcome.arrivals.items() if site != self._site}
        last = max(others, key=lambda site: others[site], default=None)
        if last is not None and others[last] > since:
            waited = self._status.counts.waited_for
            waited[last] = waited.get(last, 0.0) + min(others[last], time.monotonic()) - since

    def count(self, outcome: Outcome, values: int) -> None:
        """Add a landed exchange of `values` fp32 values to the counts."""
        counts = self._status.counts
        counts.exchange_seconds += outcome.seconds
        counts.exchanges += 1
        counts.payload_bytes += outcome.payload_bytes
        counts.values += values
        counts.attempts += outcome.attempts
        counts.contributors.append(len(outcome.contributors))
        counts.link.extend(outcome.link)
        counts.work_seconds += outcome.work_seconds
        if outcome.effective_rank is not None:
            counts.effective_ranks.append(outcome.effective_rank)
