"""What is said of a round: its plan, and what sites measured in it.

Part of the messages of `messages`, which names them all.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.step_share import FULL, MOST, step_within, steps_taken
from dilocox.utils.plain_text import plain

Count = Annotated[int, Field(ge=0, le=2**53)]
Line = Annotated[str, Field(max_length=500), AfterValidator(plain)]
"""A line of a member's for people: terminals and logs show it."""


class Message(BaseModel):
    """Base of all messages: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MemberPlan(Message):
    """What one site does in a round."""

    weight: float
    """w_i of docs/algorithm.md §2 among the plan's members."""
    batch: Count
    """Sequences per inner step."""
    ranges: list[tuple[Count, Count]]
    """(start, count) of sequence numbers in `space`; together batch x this site's inner steps, to
    be read in this order, `batch` of them per inner step."""
    space: Annotated[str, Field(max_length=64)]
    """`shared`, or `site/NAME` for a site with token files of its own."""
    pace: Annotated[int, Field(ge=1, le=MOST)] = FULL
    """Its speed in thousandths of the typical member's (`dilocox.coordinator.controller.pace`)."""
    carry: Count = 0
    """Thousandths of a step that it brings along from the round before."""

    def steps(self, count: int) -> int:
        """Inner steps of this site while the typical one takes `count` of the round."""
        return steps_taken(self.pace, self.carry, count)

    def place(self, number: int) -> int:
        """Which of the typical site's inner steps this site's step `number` ends with, from 0."""
        return step_within(self.pace, self.carry, number)


class LinkEstimate(Message):
    """What plans go by: the slowest site's link and steps, as agreed from measurements."""

    step_us: Count
    """Microseconds of an inner step."""
    rate: Count
    """Bytes per second that a site receives while payloads come in."""
    latency_us: Count
    """Microseconds per swap beside its bytes."""
    payload: Count
    """Bytes of a swap as they were measured last."""
    work_us: Count = 0
    """What training loses by a round's exchanges beside waiting, in the last one measured."""
    works: dict[str, Count] = {}
    """The same by codec."""
    overhead_us: Count = 0
    """Microseconds per exchange beside its transfers: rendezvous, votes, codec."""
    overheads: dict[int, Count] = {}
    """The same by the number of a round's fragments."""
    lag_us: Count = 0
    """Microseconds by which an inner step of the slowest site is longer than one of the fastest."""
    least: tuple[Count, Count] = (0, 0)
    """Bytes and microseconds of the smallest swap known; 0: none yet."""


class RoundPlan(Message):
    """All decisions of one round, made once. A "flush" has no inner steps and no slots, lands at
    once, and sends what is left of pseudo-gradients and residuals."""

    round: Count
    kind: Literal["train", "flush"]
    first_tick: Count
    """Slots before this round: its slot s (from 0) ends at tick first_tick + s + 1."""
    first_step: Count
    """Inner steps of the typical site before this round."""
    members: dict[SiteName, MemberPlan]
    inner_steps: Count
    """Of the typical member; `MemberPlan.steps` has the others'."""
    slots: Count
    fragments: Count
    delay: Count
    overlap: Literal["none", "naive", "keep", "eager"]
    keep: float
    learning_rate: float
    momentum: float
    codec: str
    residual_decay: float
    residual_view: float = 0.0
    exchange: Literal["gather", "reduce"]
    reason: Line = ""
    """Why this plan, in one line with numbers and units."""
    estimate: LinkEstimate | None = None
    """What the plan was made from; none where nothing was measured or declared yet."""
    checkpoint: bool
    """Write a checkpoint at the end of this round (always true of the flush)."""
    evaluate: bool
    """Evaluate the anchor at the end of this round (always true of the flush)."""
    last: bool
    """No training round follows: true of the last training round and of the flush."""

    def steps_of(self, site: str) -> int:
        """Inner steps of the round that a member takes; a slow one fewer than the typical one."""
        return self.members[site].steps(self.inner_steps)


class Measured(Message):
    """What one site measured in a round, over all of its ranks; plans are made from it. It is the
    site's own word, of which the coordinator's clock bounds `step_us` alone (`step_clock`)."""

    step_us: Count
    """Microseconds of an inner step, waits for the network not counted."""
    exchange_bytes: Count
    """Bytes of payloads that came in."""
    exchange_us: Count
    """Microseconds during which payloads came in; what overlaps counts once."""
    exchanges: Count
    """Swaps in which they came in, of all shards together: one per exchange in `gather`, two in
    `reduce`."""
    overhead_us: Count = 0
    """Microseconds per exchange, from hand-in to result, in which no payload came in. Of the site
    that comes last to an exchange this is what rendezvous, votes and codec take; the others wait
    for it besides."""
    work_us: Count = 0
    """Microseconds that training loses by its exchanges beside waiting, at the rank that loses
    most: on processors the processor time of all that they do, times the seconds in which training
    gets one of it, on GPUs boundaries and landings."""
    effective_rank_milli: Count | None = None
    """Effective rank of the averaged pseudo-gradients, in thousandths, if the codec knows it."""
