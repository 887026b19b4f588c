"""The plan of a round: a pure function of run file, controller's choice, members and ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.batch import shared_batches
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.pace import limited, site_weights
from dilocox.coordinator.protocol.messages import LinkEstimate, MemberPlan, RoundPlan
from dilocox.coordinator.protocol.round_plan import all_boundary_slots
from dilocox.coordinator.protocol.step_share import FULL, carried, steps_taken
from dilocox.coordinator.server.ledger import Ledger, Range

FLUSH_CODEC = "int8"
"""Codec of the flush (docs/algorithm.md §2): pending contributions are sent in 8 bits.

Sparse codecs stay in use for the flush. Their residual holds what many rounds have withheld, and
much of it is out of date. Sending all of it undid training in a measurement, and costs more bytes
than hundreds of rounds (docs/notes/quality.md)."""


def space_of(config: RunConfig, site: str) -> str:
    """Return the space of a site's sequence numbers: `shared`, or one of its own."""
    return f"site/{site}" if config.sites[site].data is not None else "shared"


@dataclass(frozen=True)
class RoundInputs:
    """The facts from which the plan of one round is made, beside run file and ledger."""

    round: int
    """Number of the round."""
    first_tick: int
    """Slots before the round."""
    first_step: int
    """Inner steps of the typical site before the round."""
    members: Sequence[str]
    """Sites of the round, in run file order."""
    choice: Choice
    """Settings that the controller chose; the plan shortens them to the steps that are left."""
    estimate: LinkEstimate | None = None
    """The estimate behind the choice, for the plan."""
    paces: Mapping[str, int] | None = None
    """Pace by member; None: all take the same steps."""
    before: RoundPlan | None = None
    """Plan of the round before, for carried parts of a step and the residual decay."""
    ends_early: str = ""
    """Why the run ends early; empty if it does not."""


def make_plan(config: RunConfig, inputs: RoundInputs, ledger: Ledger) -> RoundPlan:
    """Return the plan of a round; the flush if no steps are left or the run ends early.

    Args:
        config: The run file.
        inputs: The facts about the round.
        ledger: Token ranges so far; it is not changed.
    """
    left = config.total_steps - inputs.first_step
    flush = left <= 0 or bool(inputs.ends_early)
    outer = config.outer
    choice = inputs.choice.shortened(left, outer.overlap)
    if flush:
        choice = _of_the_flush(config, choice, inputs.before)
    steps = 0 if flush else choice.inner_steps
    last = steps >= left
    whole = flush and not parse_spec(choice.codec).record.sparse
    codec = config.sent_as(choice.codec)
    if flush:
        codec = FLUSH_CODEC if whole else choice.codec
    decay = 1.0 if whole else choice.residual_decay

    def due(every: int) -> bool:
        # Intervals count rounds of the run file's length, since chosen ones may be one step long.
        interval, first = every * outer.inner_steps, inputs.first_step
        return every > 0 and (first + steps) // interval > first // interval

    return RoundPlan(
        round=inputs.round,
        kind="flush" if flush else "train",
        first_tick=inputs.first_tick,
        first_step=inputs.first_step,
        members=_members(config, inputs, ledger, steps),
        inner_steps=steps,
        slots=0 if flush else choice.slots,
        fragments=outer.fragments if flush else choice.fragments,
        delay=0 if flush else choice.delay,
        overlap="none" if flush else outer.overlap,
        keep=choice.keep,
        learning_rate=choice.learning_rate,
        momentum=choice.momentum,
        codec=codec,
        residual_decay=_of_what_was_withheld(inputs.before, codec, decay),
        residual_view=0.0 if flush else choice.residual_view,
        exchange=outer.exchange,
        reason=("" if left <= 0 else inputs.ends_early) if flush else choice.reason,
        estimate=inputs.estimate,
        checkpoint=flush or (not last and due(config.checkpoint.every_rounds)),
        evaluate=flush or (not last and due(config.evaluation.every_rounds)),
        last=last,
    )


def _members(
    config: RunConfig, inputs: RoundInputs, ledger: Ledger, steps: int
) -> dict[str, MemberPlan]:
    """Return weight, batch, token ranges and pace of each member in a round of `steps` steps."""
    members = inputs.members
    paces = inputs.paces or dict.fromkeys(members, FULL)
    batches = {site: config.site_batch(site) for site in members}
    if config.outer.global_batch == "fixed":
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
        carry, _ = carried(pace, _left(inputs.before, site), steps)
        free = spare.setdefault(space, list(ledger.pool.get(space, [])))
        there = sum(count for _, count in free)
        needed = batch * steps_taken(pace, carry, steps)
        ranges = ledger.allocate(space, needed, offsets.get(space, 0), free)
        pooled = there - sum(count for _, count in free)
        offsets[space] = offsets.get(space, 0) + needed - pooled
        planned[site] = MemberPlan(
            weight=weights[site], batch=batch, ranges=ranges, space=space, pace=pace, carry=carry
        )
    return planned


def _of_the_flush(config: RunConfig, choice: Choice, before: RoundPlan | None) -> Choice:
    """Return the settings of the flush: codec and outer rates of the round before it.

    The flush sends this round's pseudo-gradients and residuals. With overlap `none` and all
    boundaries at the round's end, nothing was trained since the last landing. The flush then takes
    an outer step with the residuals only, without momentum, which would go on in the old direction.
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
    """Return the share of the residual that a site adds to its contribution: usually `decay`.

    When a round switches from a sparse codec to a dense one, most of the residual is out of date,
    as in the flush. If a share beta of the residual stays from round to round, 1 - beta of it comes
    from the last round, so 1 - beta is sent. In a measurement, the loss of a small model at two
    sites rose from 2.24 to 2.82 with the whole residual, to 2.38 with this share. A beta of 1,
    which only a run file or a method sets, means that nothing may be lost: then `decay` is
    returned.
    """
    if before is None or not parse_spec(before.codec).record.sparse:
        return decay
    if before.residual_decay == 1.0:
        return decay
    return decay if parse_spec(codec).record.sparse else 1.0 - before.residual_decay


def _left(before: RoundPlan | None, site: str) -> int:
    """Return the thousandths of a step that `site` carries over from the round before."""
    if before is None or site not in before.members:
        return 0
    member = before.members[site]
    return carried(member.pace, member.carry, before.inner_steps)[1]
