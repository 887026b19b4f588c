"""The plan of a round, as a pure function of the run file, the members and the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.config import RunConfig
from dilocox.outer.coordinator.ledger import Ledger, Range
from dilocox.outer.coordinator.messages import MemberPlan, RoundPlan

FLUSH_CODEC = "int8"
"""ALGORITHM.md §2: what is pending at the end of training goes through the 8-bit codec."""
AHEAD = 2
"""A round is planned at most this many rounds ahead of the slowest active site's."""


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
) -> RoundPlan:
    """Plan of round `round_` for `members` (run file order). Round `outer.rounds` is the flush."""
    flush = round_ == config.outer.rounds
    outer = config.outer
    steps = 0 if flush else outer.inner_steps
    weights = config.weights(members)
    offsets: dict[str, int] = {}
    spare: dict[str, list[Range]] = {}
    planned: dict[str, MemberPlan] = {}
    for site in members:
        space, batch = space_of(config, site), config.site_batch(site)
        free = spare.setdefault(space, list(ledger.pool.get(space, [])))
        before = sum(count for _, count in free)
        needed = batch * steps
        ranges = ledger.allocate(space, needed, offsets.get(space, 0), free)
        pooled = before - sum(count for _, count in free)
        offsets[space] = offsets.get(space, 0) + needed - pooled
        planned[site] = MemberPlan(weight=weights[site], batch=batch, ranges=ranges, space=space)
    last = round_ >= outer.rounds - 1
    return RoundPlan(
        round=round_,
        kind="flush" if flush else "train",
        first_tick=first_tick,
        first_step=first_step,
        members=planned,
        inner_steps=steps,
        slots=0 if flush else outer.slots,
        fragments=outer.fragments,
        delay=0 if flush else outer.delay,
        overlap="none" if flush else outer.overlap,
        keep=outer.keep,
        learning_rate=outer.learning_rate,
        momentum=outer.momentum,
        codec=FLUSH_CODEC if flush else config.compression.codec,
        residual_decay=1.0 if flush else config.compression.residual_decay,
        exchange=outer.exchange,
        checkpoint=flush or (not last and _due(round_, config.checkpoint.every_rounds)),
        evaluate=flush or (not last and _due(round_, config.evaluation.every_rounds)),
        last=last,
    )


def _due(round_: int, every: int) -> bool:
    return every > 0 and (round_ + 1) % every == 0
