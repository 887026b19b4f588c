"""`adapt = "link"`: the least lossy plan whose exchanges hide behind computation.

Nothing here swings: an estimate moves only when measurements leave its band (`link`), a plan in
force may use up what a new one has to leave free, and while it does no more than that it is kept
unless another promises at least `WORTH` less loss. The outer learning rate
and momentum are those that the loss table has for the chosen inner steps and codec.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dilocox.config.outer import Pin, rate_text
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller import loss_model
from dilocox.coordinator.controller.candidates import (
    LEAST_ROUNDS,
    Candidate,
    Menu,
    bytes_us,
    candidate,
    candidates,
    codecs,
    fragments_of,
    least_loss,
    lengths,
    most_us,
    of_length,
)
from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says
from dilocox.coordinator.controller.link_estimator import Estimate

Now = tuple[int, str, int]
"""(inner steps, codec, fragments) of a plan in force."""
WORTH = 0.003
"""A plan that still fits gives way only to one with so much less predicted loss, as a share."""
FEWER_WORTH = 0.005
"""Fewer fragments than pieces are taken for so much less predicted loss. For less than that they
were measured to gain nothing: a denser codec in two fragments had the loss of the other in four."""
NEAR = 5 / 4
"""Where nothing hides, what is at most so many times as slow as the fastest is chosen from by its
loss: of exchanges whose time does not depend on their bytes, the fewest bytes buy nothing."""


def starting_choice(config: RunConfig, reason: str, taken: int = 0) -> Choice:
    """What a run begins with, before anything is measured.

    The run file's or method's plan (for `dilocox` 20 inner steps and int4), with no more inner
    steps than leave `LEAST_ROUNDS` rounds (`taken`: as for `lengths`): cautious on a fast link, and
    on a slow one a first measurement that costs waiting once. Rates go with it as with any other.
    """
    choice = as_the_run_file_says(config, reason)
    allowed = lengths(config, LEAST_ROUNDS, taken)
    if choice.inner_steps not in allowed:
        steps = max(allowed)
        slots = steps * choice.slots // choice.inner_steps
        fragments = min(slots, config.outer.fragments)
        delay = choice.delay if "delay" in config.control.pinned else max(1, slots // fragments)
        choice = replace(choice, inner_steps=steps, slots=slots, delay=min(delay, slots))
    return _with_rates(config, choice)


def choose(
    config: RunConfig,
    menu: Menu,
    link: Estimate | None,
    sites: int,
    now: Now | None,
    taken: int = 0,
) -> Choice:
    """The plan of a round of `sites` sites.

    `menu` holds the payload sizes of `candidates.codecs(config)`; `now` is the plan in force, if
    there is one; `taken`: inner steps before a handover. Raises KeyError for
    a codec that is not in the menu.
    """
    if sites < 2:
        alone = starting_choice(config, "one site: nothing is exchanged", taken)
        if "codec" in config.control.pinned:
            return alone
        return _with_rates(config, replace(alone, codec="none"))
    if link is None:
        return starting_choice(config, "nothing is measured yet", taken)
    best = least_lossy_that_fits(config, menu, link, sites, taken)
    current = None if now is None else _current(config, menu, link, sites, now, taken)
    if best is None and current is not None and current.fits:
        return _choice(config, current, _why(current, link))
    if best is None:
        return _choice(config, *_next_best(config, menu, link, sites, taken))
    if now != (best.inner_steps, best.codec, best.fragments):
        if current is not None and current.fits:
            gain = current.loss - best.loss
            if gain < WORTH:
                return _choice(config, current, _why(current, link))
            return _choice(
                config, best, f"{_why(best, link)}, {gain:.1%} less than {_name(current)}"
            )
        if current is not None:
            return _choice(config, best, f"{_why(best, link)}; {_why_not(current, link)}")
    return _choice(config, best, _why(best, link))


def least_lossy_that_fits(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, taken: int = 0
) -> Candidate | None:
    """The choice among all `candidates` that fit, none if none does.

    To follow the exchanges of hundreds of plans in every round is what takes time here. So those
    are left out that cannot fit by their bytes or work alone, and those that lose more than a plan
    which was found, however early they land.
    """
    pieces = config.outer.fragments
    options = []
    for codec in codecs(config):
        least_us = _least_us(config, menu, link, sites, codec)
        work_us = link.work_of(codec)
        for steps in lengths(config, LEAST_ROUNDS, taken):
            round_us = steps * link.step_us
            if least_us <= most_us(config, round_us) and work_us <= config.control.work * round_us:
                options.append((least_loss(config, codec, steps), codec, steps))
    found: list[Candidate] = []
    enough = math.inf
    for least, codec, steps in sorted(options):
        # What fewer fragments have to be worth counts only where as many as can be fit as well.
        if least > enough and any(c.fragments == pieces for c in found):
            break
        plans = of_length(config, menu, link, sites, codec, steps)
        found += [c for c in plans if c.fits]
        enough = min((c.loss for c in found), default=math.inf) + FEWER_WORTH
    return _least_lossy(found)


def _least_lossy(every: list[Candidate]) -> Candidate | None:
    """Fewer fragments only where they promise clearly less loss: what they were measured to cost is
    the later landing alone."""
    most = max((c.fragments for c in every), default=1)

    def worth(c: Candidate) -> tuple[float, float, int, int]:
        return c.loss + FEWER_WORTH * (c.fragments < most), c.load, c.inner_steps, -c.fragments

    return min(every, key=worth, default=None)


def _next_best(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, taken: int
) -> tuple[Candidate, str]:
    """Where nothing fits: what is given up, in this order, and why."""
    usual = lengths(config, LEAST_ROUNDS, taken)
    for steps in reversed(usual):
        best = _least_lossy(_hiding(config, menu, link, sites, steps))
        if best is not None:
            work = f"its own work takes {link.work_of(best.codec) / best.round_us:.0%}"
            return best, f"{_why(best, link)}; {work} of computation, more than asked for"
    longer = [steps for steps in lengths(config, 2, taken) if steps not in usual]
    best = _least_lossy([c for h in longer for c in _hiding(config, menu, link, sites, h)])
    if best is not None:
        return best, f"{_why(best, link)}; fewer than {LEAST_ROUNDS} rounds, for nothing else hides"
    every = [
        c
        for rounds in (LEAST_ROUNDS, 2)
        for c in candidates(config, menu, link, sites, rounds, taken)
    ]
    most = NEAR * min(c.load for c in every)
    least = min((c for c in every if c.load <= most), key=lambda c: (c.loss, c.load))
    if "delay" not in config.control.pinned:
        least = replace(least, delay=least.slots)
    return least, f"nothing hides on this link, the least lossy of the fastest: {_why(least, link)}"


def _hiding(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, steps: int
) -> list[Candidate]:
    """Plans of so many inner steps that hide, whatever they take of the processor."""
    most = most_us(config, steps * link.step_us)
    return [
        plan
        for codec in codecs(config)
        if _least_us(config, menu, link, sites, codec) <= most
        for plan in of_length(config, menu, link, sites, codec, steps)
        if plan.hides
    ]


def _least_us(config: RunConfig, menu: Menu, link: Estimate, sites: int, codec: str) -> int:
    """What exchanges of a codec take at least, microseconds: with the fewest headers."""
    return bytes_us(config, menu[codec], link, sites, fragments_of(config, codec, menu)[-1])


def _current(
    config: RunConfig,
    menu: Menu,
    link: Estimate,
    sites: int,
    now: Now,
    taken: int,
) -> Candidate | None:
    """The plan in force under the present estimate; none if it may not be chosen (any more)."""
    steps, codec, fragments = now
    if codec not in menu or steps not in lengths(config, 2, taken):
        return None
    if fragments not in fragments_of(config, codec, menu):
        return None
    return candidate(config, menu[codec], codec, steps, link, sites, fragments, in_force=True)


def _choice(config: RunConfig, chosen: Candidate, reason: str) -> Choice:
    """A candidate with all that follows from it, but for what the run file pins."""
    plan = replace(
        as_the_run_file_says(config, reason),
        inner_steps=chosen.inner_steps,
        slots=chosen.slots,
        fragments=chosen.fragments,
        delay=chosen.delay,
        codec=chosen.codec,
    )
    return _with_rates(config, plan)


def _with_rates(config: RunConfig, plan: Choice) -> Choice:
    """A plan with the rates that the loss table has for it, but for those the run file pins."""

    def unless_pinned(key: Pin, found: float) -> float:
        return float(getattr(plan, key)) if key in config.control.pinned else found

    steps, codec = plan.inner_steps, plan.codec
    total, optimizer = config.total_steps, config.inner.optimizer
    rate, momentum = loss_model.outer_rates(steps, codec, total)
    decay = loss_model.residual_decay(steps, codec, total)
    view = loss_model.residual_view(steps, codec, total, optimizer)
    keep = loss_model.kept_progress(steps, plan.delay / plan.slots, codec)
    return replace(
        plan,
        learning_rate=unless_pinned("learning_rate", rate),
        momentum=unless_pinned("momentum", momentum),
        residual_decay=unless_pinned("residual_decay", decay),
        residual_view=unless_pinned("residual_view", view),
        keep=unless_pinned("keep", keep),
    )


def _why_not(current: Candidate, link: Estimate) -> str:
    """What a plan in force would take, now that it fits no more."""
    if current.hides:
        share = link.work_of(current.codec) / current.round_us
        return f"the own work of {_name(current)} would take {share:.1%}"
    if current.load <= 1:
        return f"{_name(current)} would land late"
    return f"{_name(current)} would take {current.load:.0%}"


def _name(chosen: Candidate) -> str:
    steps = "1 step" if chosen.inner_steps == 1 else f"{chosen.inner_steps} steps"
    parts = "1 fragment" if chosen.fragments == 1 else f"{chosen.fragments} fragments"
    return f"{steps} of {chosen.codec} in {parts}"


def _why(chosen: Candidate, link: Estimate) -> str:
    """Sizes, times and the prediction, in words."""
    beside = link.latency_us + link.overhead_of(chosen.fragments)
    overhead = f", {_seconds(beside)} beside that per exchange," if beside else ""
    taken, whole = _seconds(chosen.traffic.busy_us), _seconds(chosen.round_us)
    rate = rate_text(8 * link.rate)
    unknown = (
        "" if loss_model.is_known(chosen.codec) else f" and what {chosen.codec} adds, not known"
    )
    return (
        f"{_bytes(chosen.traffic.payload_bytes)} take {taken} of the round's {whole} "
        f"({chosen.load:.0%}) at {rate}{overhead} and {_seconds(link.step_us)} a step, "
        f"predicted loss +{chosen.loss:.1%} (rough, from small models){unknown}"
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _seconds(microseconds: int) -> str:
    for unit, size in (("s", 10**6), ("ms", 10**3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds} us"
