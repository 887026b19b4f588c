"""The plan of a round, as a pure function of the run file, what was chosen, members and ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dilocox.config.codec_spec import SPARSE, parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.batch import shared_batches
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.pace import limited, site_weights
from dilocox.coordinator.protocol.messages import LinkEstimate, MemberPlan, RoundPlan
from dilocox.coordinator.protocol.schedule import all_boundary_slots
from dilocox.coordinator.protocol.step_share import FULL, carried, steps_taken
from dilocox.coordinator.server.ledger import Ledger, Range

FLUSH_CODEC = "int8"
"""docs/algorithm.md §2: what is pending at the end of training goes through the 8-bit codec.

Sparse codecs are kept: their residual is what many rounds have withheld, and much of it is out of
date. Sent whole, it was measured to undo training, and costs more bytes than hundreds of rounds
(docs/notes/quality.md)."""


def space_of(config: RunConfig, site: str) -> str:
    """Where a site's sequence numbers come from: `shared`, or a space of its own."""
    return f"site/{site}" if config.sites[site].data is not None else "shared"


def make_plan(
    config: RunConfig,
    round_: int,
    first_tick: int,
    first_step: int,
    members: Sequence[str],
    ledger: Ledger,
    choice: Choice,
    estimate: LinkEstimate | None = None,
    paces: Mapping[str, int] | None = None,
    before: RoundPlan | None = None,
    ends_early: str = "",
) -> RoundPlan:
    """Plan of round `round_` for `members` (run file order), with what was chosen for it.

    `paces` by member, none if all take the same steps; `before`: the plan of the round before, for
    what it has left of a step. It is cut short to the steps that are left; the flush when there are
    none, or when the run `ends_early`, for that reason.
    """
    left = config.total_steps - first_step
    flush = left <= 0 or bool(ends_early)
    outer = config.outer
    choice = choice.shortened(left, outer.overlap)
    if flush:
        choice = _of_the_flush(config, choice, before)
    steps = 0 if flush else choice.inner_steps
    paces = paces or dict.fromkeys(members, FULL)
    batches = {site: config.site_batch(site) for site in members}
    if outer.global_batch == "fixed":
        everyone = {site: config.site_batch(site) for site in config.sites}
        batches = shared_batches(everyone, members, config.site.batch_unit)
    weights = site_weights(config.control.weights, batches, paces, steps)
    if config.control.steps == "by-speed" and not config.declares_speeds:
        weights = limited(weights, batches, config.control.max_share)
    offsets: dict[str, int] = {}
    spare: dict[str, list[Range]] = {}
    planned: dict[str, MemberPlan] = {}
    for site in members:
        space, batch, pace = space_of(config, site), batches[site], paces[site]
        carry, _ = carried(pace, _left(before, site), steps)
        free = spare.setdefault(space, list(ledger.pool.get(space, [])))
        there = sum(count for _, count in free)
        needed = batch * steps_taken(pace, carry, steps)
        ranges = ledger.allocate(space, needed, offsets.get(space, 0), free)
        pooled = there - sum(count for _, count in free)
        offsets[space] = offsets.get(space, 0) + needed - pooled
        planned[site] = MemberPlan(
            weight=weights[site], batch=batch, ranges=ranges, space=space, pace=pace, carry=carry
        )
    last = steps >= left
    whole = flush and parse_spec(choice.codec).kind not in SPARSE
    codec = config.sent_as(choice.codec)
    if flush:
        codec = FLUSH_CODEC if whole else choice.codec
    decay = 1.0 if whole else choice.residual_decay

    def due(every: int) -> bool:
        # Rounds of the run file's length: those that are chosen may be a single step long.
        interval = every * outer.inner_steps
        return every > 0 and (first_step + steps) // interval > first_step // interval

    return RoundPlan(
        round=round_,
        kind="flush" if flush else "train",
        first_tick=first_tick,
        first_step=first_step,
        members=planned,
        inner_steps=steps,
        slots=0 if flush else choice.slots,
        fragments=outer.fragments if flush else choice.fragments,
        delay=0 if flush else choice.delay,
        overlap="none" if flush else outer.overlap,
        keep=choice.keep,
        learning_rate=choice.learning_rate,
        momentum=choice.momentum,
        codec=codec,
        residual_decay=_of_what_was_withheld(before, codec, decay),
        residual_view=0.0 if flush else choice.residual_view,
        exchange=outer.exchange,
        reason=("" if left <= 0 else ends_early) if flush else choice.reason,
        estimate=estimate,
        checkpoint=flush or (not last and due(config.checkpoint.every_rounds)),
        evaluate=flush or (not last and due(config.evaluation.every_rounds)),
        last=last,
    )


def _of_the_flush(config: RunConfig, choice: Choice, before: RoundPlan | None) -> Choice:
    """What the flush goes by: codec and rates of the round that it follows, whose pseudo-gradients
    and residuals it sends.

    With overlap `none` and all boundaries at the round's end nothing was trained since the last
    landing. An outer step by what was withheld is all there is to take then: momentum would only
    go on in the old direction.
    """
    if before is not None:
        choice = replace(
            choice,
            slots=before.slots,
            fragments=before.fragments,
            codec=replace(parse_spec(before.codec), moments=False).text,
            learning_rate=before.learning_rate,
            momentum=before.momentum,
            residual_decay=before.residual_decay,
        )
    boundaries = all_boundary_slots(config.site.stages, choice.fragments, choice.slots)
    landed = config.outer.overlap == "none" and boundaries == {choice.slots}
    return replace(choice, momentum=0.0) if landed else choice


def _of_what_was_withheld(before: RoundPlan | None, codec: str, decay: float) -> float:
    """What of its residual a site adds to what it sends: `decay`, but where a sparse codec is
    followed by one that sends all there is.

    Then, as in the flush, most of what is withheld is out of date. A residual of which a share of
    beta stays from round to round has 1 - beta of it from its last round: so much goes (from 2.24,
    the loss of a small model at two sites went to 2.82 with all of it, to 2.38 with this). With a
    beta of 1, which only a run file or a method sets, nothing may ever be lost: all of it goes.
    """
    if before is None or parse_spec(before.codec).kind not in SPARSE:
        return decay
    if before.residual_decay == 1.0:
        return decay
    return decay if parse_spec(codec).kind in SPARSE else 1.0 - before.residual_decay


def _left(before: RoundPlan | None, site: str) -> int:
    """Thousandths of a step of `site` that the round before has left."""
    if before is None or site not in before.members:
        return 0
    member = before.members[site]
    return carried(member.pace, member.carry, before.inner_steps)[1]
