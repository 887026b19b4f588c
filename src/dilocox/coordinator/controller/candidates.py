"""Plans from which the controller may choose, with their cost on the link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilocox.config.admission import BY_VALUE
from dilocox.config.codec_kinds import BUILT_IN, CodecKind
from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller import loss_model
from dilocox.coordinator.controller.exchange_timing import Crowd, Sizes, Traffic, together, traffic
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.protocol.fragment_groups import fragment_counts

INNER_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 125, 200, 320, 500)
LEAST_ROUNDS = 8
"""Least number of rounds of a run, where possible: outer momentum and error feedback need some."""
SLACK = 5 / 4
"""The current plan may take this many times the work that a new plan may take."""
APART = 16
"""Step times vary randomly and differently at every site. So the delay leaves one extra slot for
this many slots of a round, and sites that are slightly apart do not wait for each other."""

TOGETHER = 1 << 26
"""Largest number of values of a fragment of several pieces. In larger fragments, fewer headers and
messages save nothing, and an exchange in flight takes 4 bytes of memory per value."""

_WHOLE = 1_000_000
"""Shares are counted in millionths."""

Menu = Mapping[str, Sizes]
"""Bytes of one site's payload by codec, stage and piece, summed over shards."""


@dataclass(frozen=True)
class Candidate:
    """A possible plan, with its predicted cost."""

    inner_steps: int
    slots: int
    fragments: int
    delay: int
    codec: str
    loss: float
    """Predicted rise of the loss over synchronous training, as a share of it."""
    traffic: Traffic
    round_us: int
    """Microseconds of a round."""
    hides: bool
    """Whether its exchanges end in time behind computation, so that training does not wait."""
    light: bool
    """Whether its exchanges take little training time, waits not counted: on CPUs by their
    computation, on GPUs by boundaries and landings."""

    @property
    def fits(self) -> bool:
        """Whether the plan is allowed: `hides` and `light`."""
        return self.hides and self.light

    @property
    def load(self) -> float:
        """Time of the exchanges as a share of the round's time."""
        return self.traffic.busy_us / self.round_us


def codecs(config: RunConfig) -> list[str]:
    """Return the codecs from which the controller may choose, the least lossy first.

    The controller needs their payload sizes. The codec of the method or run file is included if it
    is pinned (then it is the only one), or if its loss is known.
    """
    own = config.compression.codec
    if "codec" in config.control.pinned:
        return [own]
    # Of other kinds than the built-in ones, that of the run file's own codec alone: every site has
    # it, since it has read the run file.
    kind = config.compression.kind
    kinds = BUILT_IN if kind in BUILT_IN else (*BUILT_IN, kind)
    steps, part = config.total_steps, loss_model.part_of(config)
    names = [
        codec
        for kind in kinds
        if _fits(kind, config)
        for codec in kind.offered
        if loss_model.is_offered(codec, steps, part)
    ]
    return names if own in names or not loss_model.is_known(own) else [*names, own]


def _fits(kind: CodecKind, config: RunConfig) -> bool:
    """Return whether the run file allows codecs of that kind."""
    feedback = config.compression.error_feedback or not kind.needs_feedback
    whole = config.outer.exchange == "gather" or kind.averages_in_parts
    return feedback and whole and not (kind.picks and config.admission.aggregation in BY_VALUE)


def lengths(config: RunConfig, rounds: int, taken: int = 0) -> list[int]:
    """Return the allowed numbers of inner steps per round, in ascending order.

    With each number the run has at least `rounds` rounds. If no number allows this, the smallest is
    returned. All numbers are multiples of a slot's length, which does not change. `taken` is the
    number of inner steps before a handover.
    """
    outer = config.outer
    if "inner_steps" in config.control.pinned:
        return [outer.inner_steps]
    slot, left = outer.inner_steps // outer.slots, config.total_steps - taken
    found = sorted({-(-steps // slot) * slot for steps in (*INNER_STEPS, outer.inner_steps)})
    return [steps for steps in found if steps * rounds <= left] or found[:1]


def candidates(
    config: RunConfig,
    menu: Menu,
    link: Estimate,
    sites: int,
    rounds: int = LEAST_ROUNDS,
    taken: int = 0,
) -> list[Candidate]:
    """Return every plan that may be chosen for rounds of `sites` sites, with the delay it needs.

    `lengths` explains `rounds` and `taken`. Fewer fragments than pieces are included only if a
    fragment for each piece does not hide, or lands late.
    """
    return [
        plan
        for codec in codecs(config)
        for steps in lengths(config, rounds, taken)
        for plan in of_length(config, menu, link, sites, codec, steps)
    ]


def of_length(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, codec: str, inner_steps: int
) -> list[Candidate]:
    """Return the plans of `candidates` with this codec and this number of inner steps."""
    sizes = menu[codec]
    whole, *fewer = fragments_of(config, codec, menu)
    found = [candidate(config, sizes, codec, inner_steps, link, sites, whole)]
    each = found[0]
    early = each.hides and each.delay <= max(1, each.slots // whole)
    for fragments in fewer if each.light and not early else ():
        if bytes_us(config, sizes, link, sites, fragments) <= most_us(config, each.round_us):
            found.append(candidate(config, sizes, codec, inner_steps, link, sites, fragments))
    return found


def fragments_of(config: RunConfig, codec: str, menu: Menu) -> list[int]:
    """Return the numbers of fragments that rounds of `codec` may have, in descending order.

    Every piece is a fragment of its own in three cases: the run file pins the number, contributions
    are judged, or the codec is a low-rank one. Usual gains are known by fragment, and each piece
    has a low-rank basis. A fragment of several pieces holds at most `TOGETHER` values, by the sizes
    of `none` in `menu`.
    """
    pieces = config.outer.fragments
    judged = config.admission.gate or config.admission.examines
    if "fragments" in config.control.pinned or judged or parse_spec(codec).record.agrees_first:
        return [pieces]
    dense = menu.get("none")
    if dense is None:
        return [pieces]
    counts = fragment_counts(pieces)
    if max(map(sum, dense)) <= 4 * TOGETHER:
        return counts
    return [
        number
        for number in counts
        if number == pieces or max(max(row) for row in together(dense, number, 1)) <= 4 * TOGETHER
    ]


def bytes_us(config: RunConfig, sizes: Sizes, link: Estimate, sites: int, fragments: int) -> int:
    """Return the microseconds that the bytes of a round take on the link, without latency.

    `sizes` are those of the pieces, which travel as `fragments` fragments. The exchanges of a round
    take at least this long.
    """
    payload = sum(map(sum, together(sizes, fragments, config.site.shards)))
    count, size = Crowd(sites, config.outer.exchange).swaps(payload)
    return count * size * _WHOLE // link.rate


def most_us(config: RunConfig, round_us: int) -> float:
    """Return the longest time, in microseconds, that exchanges of a new plan may take."""
    return config.control.utilisation * round_us


def least_loss(config: RunConfig, codec: str, inner_steps: int) -> float:
    """Return the least predicted loss of plans with this codec and number of inner steps.

    It is the loss with the smallest possible delay.
    """
    slots = inner_steps * config.outer.slots // config.outer.inner_steps
    delay = min(config.outer.delay, slots) if "delay" in config.control.pinned else 1
    return loss_model.loss_of(
        inner_steps, codec, delay / slots, config.total_steps, loss_model.part_of(config)
    )


def candidate(
    config: RunConfig,
    sizes: Sizes,
    codec: str,
    inner_steps: int,
    link: Estimate,
    sites: int,
    fragments: int | None = None,
    in_force: bool = False,
) -> Candidate:
    """Return one plan with its traffic, the smallest delay that hides it, and its predicted loss.

    `sizes` are those of the run's pieces, which travel as `fragments` fragments (None: one each).

    A new plan has to leave a part of the time free (`control.utilisation`). A plan that is
    `in_force` may use all of the time, and `SLACK` times the work. So a plan that was only just
    possible is not dropped at once. Its delay is that of a new plan while the round is long enough.
    Sites may be apart by the free time, and in long rounds by one more slot per `APART` slots,
    without waiting for each other.
    """
    outer, control = config.outer, config.control
    slot = outer.inner_steps // outer.slots
    slots, slot_us = inner_steps // slot, slot * link.step_us
    usual = max(1, round(_WHOLE * control.utilisation))
    used = _WHOLE if in_force else usual
    work = control.work * (SLACK if in_force else 1)
    latency_us = round(control.latency * 1_000_000)
    fragments = fragments or outer.fragments
    sizes = together(sizes, fragments, config.site.shards)
    cost = traffic(sizes, slots, slot_us, link, Crowd(sites, outer.exchange), latency_us)
    roomy, needed = (
        max(1, -(-(_WHOLE * cost.latest_us // share + link.lag_us) // slot_us))
        for share in (usual, used)
    )
    pinned = "delay" in control.pinned
    delay = min(outer.delay if pinned else roomy + slots // APART, slots)
    return Candidate(
        inner_steps=inner_steps,
        slots=slots,
        fragments=fragments,
        delay=delay,
        codec=codec,
        loss=loss_model.loss_of(
            inner_steps, codec, delay / slots, config.total_steps, loss_model.part_of(config)
        ),
        traffic=cost,
        round_us=slots * slot_us,
        hides=needed <= delay and _WHOLE * cost.busy_us <= used * slots * slot_us,
        light=link.work_of(codec) <= work * slots * slot_us,
    )
