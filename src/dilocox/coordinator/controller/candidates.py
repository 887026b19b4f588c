"""What the controller may choose from, and which of it the link allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilocox.config.admission import BY_VALUE
from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller import loss_model
from dilocox.coordinator.controller.exchange_timing import Crowd, Sizes, Traffic, together, traffic
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.protocol.fragment_groups import fragment_counts

INNER_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 125, 200, 320, 500)
KEPT = (328, 232, 164, 116, 82, 58, 41, 35, 29, 24, 20, 17, 15, 13, 12, 11, 10, 9, 8, 7, 6, 5)
BLOCKS = (12, 18, 25, 35, 50, 70, 100, 118, 140, 170, 205, 240, 290, 340, 410, 490, 590, 700, 850,
          1000, 1200, 1500, 1800, 2200, 2600)  # fmt: skip
"""B of `top1`, which is taken instead of `topk` where the loss table knows that it loses less."""
LEAST_ROUNDS = 8
"""Outer momentum and error feedback need some rounds: so many at least, where possible."""
SLACK = 5 / 4
"""A plan in force may take so many times the work that a new one may."""
APART = 16
"""Steps vary by chance, at every site in its own way: a landing leaves room for one step in so many
of a round, so that sites which are a little apart do not wait for each other."""

TOGETHER = 1 << 26
"""Values of a fragment made of several pieces, at most. Larger ones would save nothing by fewer
headers and messages, and what is under way takes 4 bytes of memory per value."""

_WHOLE = 1_000_000
"""Shares are counted in so many parts."""

Menu = Mapping[str, Sizes]
"""By codec: bytes of one site's payload by stage and piece, summed over shards."""


@dataclass(frozen=True)
class Candidate:
    """A plan that could be made, with what it costs."""

    inner_steps: int
    slots: int
    fragments: int
    delay: int
    codec: str
    loss: float
    """Predicted rise over synchronous training."""
    traffic: Traffic
    round_us: int
    hides: bool
    """Its exchanges are over in time, beside computation."""
    light: bool
    """What training loses by them beside waiting is small: on processors their own computation, on
    GPUs boundaries and landings."""

    @property
    def fits(self) -> bool:
        """All that is asked of a plan."""
        return self.hides and self.light

    @property
    def load(self) -> float:
        """Time of the exchanges over the round's."""
        return self.traffic.busy_us / self.round_us


def codecs(config: RunConfig) -> list[str]:
    """Codecs whose payload sizes the controller needs: those it may choose, least lossy first.

    The method's or run file's own is one of them if it is pinned, or if its loss is known.
    """
    own = config.compression.codec
    if "codec" in config.control.pinned:
        return [own]
    names = ["none", "int8", "int4"]
    if config.compression.error_feedback:
        names.append("int2")
        if config.outer.exchange == "gather" and config.admission.aggregation not in BY_VALUE:
            names += _largest(loss_model.top1_up_to(config.total_steps, config.inner.optimizer))
    return names if own in names or not loss_model.is_known(own) else [*names, own]


def _largest(top1_up_to: float) -> list[str]:
    """Codecs that send the largest values, densest first: `top1` of so many of 4,096 and fewer."""
    topk = [f"topk:{kept}" for kept in KEPT]
    top1 = [f"top1:{block}" for block in BLOCKS]
    return [
        *(codec for codec in topk if parse_spec(codec).density > top1_up_to),
        *(codec for codec in top1 if parse_spec(codec).density <= top1_up_to),
    ]


def lengths(config: RunConfig, rounds: int, taken: int = 0) -> list[int]:
    """Numbers of inner steps per round, rising, that leave at least `rounds` rounds if any does.

    A slot keeps its length, so that they are multiples of it. `taken`: inner steps of the run that
    were made before its handover.
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
    """Every plan that may be chosen for rounds of `sites` sites, with the delay it needs.

    `rounds` and `taken` as for `lengths`. Fewer fragments than there are pieces are of use only
    where as many as that do not hide, or land late.
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
    """Those of `candidates` that have this codec and so many inner steps."""
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
    """Numbers of fragments that rounds of `codec` may have, falling.

    All of the run's pieces apart if the run file says how many, where contributions are judged
    (what is usual is known by fragment), for low-rank codecs (each piece has a basis), and where a
    fragment would hold more than `TOGETHER` values. The menu's `none` says how many it holds.
    """
    pieces = config.outer.fragments
    judged = config.admission.gate or config.admission.examines
    if "fragments" in config.control.pinned or judged or parse_spec(codec).kind == "lowrank":
        return [pieces]
    dense = menu.get("none")
    if dense is None:
        return [pieces]
    return [
        number
        for number in fragment_counts(pieces)
        if number == pieces or max(max(row) for row in together(dense, number, 1)) <= 4 * TOGETHER
    ]


def bytes_us(config: RunConfig, sizes: Sizes, link: Estimate, sites: int, fragments: int) -> int:
    """Microseconds that the bytes alone take if pieces of `sizes` travel as so many fragments: the
    least that their exchanges do."""
    payload = sum(map(sum, together(sizes, fragments, config.site.shards)))
    count, size = Crowd(sites, config.outer.exchange).swaps(payload)
    return count * size * _WHOLE // link.rate


def most_us(config: RunConfig, round_us: int) -> float:
    """The most that the exchanges of a new plan may take of a round, microseconds."""
    return config.control.utilisation * round_us


def least_loss(config: RunConfig, codec: str, inner_steps: int) -> float:
    """What plans of this codec and so many inner steps lose at least: landing as soon as can be."""
    slots = inner_steps * config.outer.slots // config.outer.inner_steps
    delay = min(config.outer.delay, slots) if "delay" in config.control.pinned else 1
    return loss_model.loss_of(
        inner_steps, codec, delay / slots, config.total_steps, config.inner.optimizer
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
    """One plan: its traffic, the smallest delay that hides it, and its predicted loss.

    `sizes`: of the run's pieces; `fragments`: that they travel as, without it each by itself.

    A plan that is `in_force` may use up what a new one has to leave free: all of the time, and
    `SLACK` times the work. So a plan that was only just possible is not given up at once. Its delay
    stays that of a new one while the round is long enough for it: what is left free, and in long
    rounds a slot in `APART` more, is what sites may be apart without waiting for each other.
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
            inner_steps, codec, delay / slots, config.total_steps, config.inner.optimizer
        ),
        traffic=cost,
        round_us=slots * slot_us,
        hides=needed <= delay and _WHOLE * cost.busy_us <= used * slots * slot_us,
        light=link.work_of(codec) <= work * slots * slot_us,
    )
