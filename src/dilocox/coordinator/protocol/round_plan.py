"""Messages about a round: its plan, and the measurements of sites from which plans are made.

`messages` describes the protocol and re-exports these classes.

A tick is the number of slots that have ended since the run began. A fragment has its boundary at
the end of one slot of every round (`boundary_slots`). The contribution taken there lands `delay`
slots later, possibly in the next round; `delay` is that of the plan of the boundary's round.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.step_share import FULL, MOST, step_within, steps_taken
from dilocox.errors import ConfigError
from dilocox.utils.plain_text import plain

AT_ONCE = 2
"""Number of exchanges of a rank that may be in flight at the same time. One exchange transfers its
first payloads. The other is encoded before its transfer, or is voted on and decoded afterwards."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Line = Annotated[str, Field(max_length=500), AfterValidator(plain)]
"""A line for people, written by a member. Control characters are removed, because terminals and
logs show the line."""


class Message(BaseModel):
    """Base of all messages: immutable, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MemberPlan(Message):
    """One site's part in a round."""

    weight: float
    """Weight of the site's contribution among the plan's members: w_i of docs/algorithm.md §2."""
    batch: Count
    """Sequences per inner step."""
    ranges: list[tuple[Count, Count]]
    """Ranges (start, count) of sequence numbers in `space`. The site reads them in this order,
    `batch` sequences per inner step; in all they hold batch times its inner steps."""
    space: Annotated[str, Field(max_length=64)]
    """`shared`, or `site/NAME` for a site with token files of its own."""
    pace: Annotated[int, Field(ge=1, le=MOST)] = FULL
    """Speed of the site in thousandths of the typical member's
    (`dilocox.coordinator.controller.pace`)."""
    carry: Count = 0
    """Thousandths of an inner step carried over from the round before."""

    def steps(self, count: int) -> int:
        """Return this site's inner steps while the typical site takes the round's first `count`."""
        return steps_taken(self.pace, self.carry, count)

    def place(self, number: int) -> int:
        """Return the typical site's inner step, from 0, in which this site's step `number` ends."""
        return step_within(self.pace, self.carry, number)


class LinkEstimate(Message):
    """Link and inner steps of the slowest site, estimated from the sites' measurements. Plans are
    made from it."""

    step_us: Count
    """Microseconds of an inner step."""
    rate: Count
    """Bytes per second that a site receives while payloads come in."""
    latency_us: Count
    """Microseconds of a swap in addition to the time of its bytes."""
    payload: Count
    """Bytes of a swap in the latest measurement."""
    work_us: Count = 0
    """Microseconds that the exchanges of the last measured round took from training, waits not
    counted."""
    works: dict[str, Count] = {}
    """`work_us` by codec."""
    overhead_us: Count = 0
    """Microseconds of an exchange in addition to its transfers: rendezvous, votes, codec."""
    overheads: dict[int, Count] = {}
    """`overhead_us` by the number of fragments in a round."""
    lag_us: Count = 0
    """Microseconds by which an inner step of the slowest site is longer than one of the fastest."""
    least: tuple[Count, Count] = (0, 0)
    """Bytes and microseconds of the smallest swap measured so far. Zeros: no measurement yet."""


class RoundPlan(Message):
    """All decisions about one round; a plan never changes.

    A "flush" has no inner steps and no slots, lands at once, and sends the rest of the
    pseudo-gradients and residuals.
    """

    round: Count
    kind: Literal["train", "flush"]
    first_tick: Count
    """Number of slots before this round: its slot s (from 0) ends at tick first_tick + s + 1."""
    first_step: Count
    """Inner steps of the typical site before this round."""
    members: dict[SiteName, MemberPlan]
    inner_steps: Count
    """Inner steps of the typical member; `MemberPlan.steps` returns those of another member."""
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
    """Why the plan is as it is, in one line with numbers and units."""
    estimate: LinkEstimate | None = None
    """The estimate from which the plan was made. None: no link was measured or declared yet."""
    checkpoint: bool
    """Write a checkpoint at the end of this round (always true for the flush)."""
    evaluate: bool
    """Evaluate the anchor at the end of this round (always true for the flush)."""
    last: bool
    """No training round follows: true for the last training round and for the flush."""

    def steps_of(self, site: str) -> int:
        """Return the inner steps that member `site` takes in the round.

        A slow site takes fewer steps than the typical one, a fast site more.
        """
        return self.members[site].steps(self.inner_steps)


class Measured(Message):
    """Measurements of one site in a round, over all of its ranks. Plans are made from them.

    The values are claims of the site. The coordinator checks only `step_us` against its own clock
    (`step_clock`).
    """

    step_us: Count
    """Microseconds of an inner step, waits for the network not counted."""
    exchange_bytes: Count
    """Bytes of the payloads that the site received."""
    exchange_us: Count
    """Microseconds during which the site received payloads; overlapping transfers count once."""
    exchanges: Count
    """Number of swaps in which the site received payloads, of all shards together. An exchange is
    one swap in `gather` and two in `reduce`."""
    overhead_us: Count = 0
    """Microseconds per exchange, from submission to result, in which no payload arrived.

    At the site that joins an exchange last, this is the time of rendezvous, votes and codec. At
    the other sites it includes their wait for the last one."""
    work_us: Count = 0
    """Microseconds of training time that the exchanges took, waits not counted, at the rank that
    lost most.

    On CPUs: CPU time of the exchanges times the wall-clock seconds that training needs per CPU
    second. On GPUs: time of boundaries and landings."""
    effective_rank_milli: Count | None = None
    """Effective rank of the averaged pseudo-gradients, in thousandths, if the codec knows it."""


def boundary_slots(stage: int, stages: int, fragments: int, slots: int) -> list[int]:
    """Return, per fragment of `stage`, the slot (1 to `slots`) at whose end its boundary is.

    The boundaries of all fragments of all stages are spread evenly over the round, because the
    stages of a site share its uplink. Boundaries are ordered by fragment, then by stage. The last
    boundary is at the end of the round. Raises `ConfigError` if a number is out of range.
    """
    if not 0 <= stage < stages or fragments < 1 or slots < 1:
        raise ConfigError(
            f"no boundaries for stage {stage} of {stages}, {fragments} fragments and {slots} slots"
        )
    count = fragments * stages
    return [-(-(number * stages + stage + 1) * slots // count) for number in range(fragments)]


def all_boundary_slots(stages: int, fragments: int, slots: int) -> set[int]:
    """Return the slots that `boundary_slots` gives for any stage."""
    return {
        slot for stage in range(stages) for slot in boundary_slots(stage, stages, fragments, slots)
    }
