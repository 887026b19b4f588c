"""`adapt = "link"`: chooses the least lossy plan whose exchanges hide behind computation.

The choice does not oscillate. An estimate changes only when measurements leave its band
(`link_estimator`). The current plan may use time and work that a new plan has to leave free. While
it fits, it is kept unless another plan has a predicted loss that is lower by `WORTH`. The outer
learning rate and momentum are those of the loss table for the chosen inner steps and codec.
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
"""(inner steps, codec, fragments) of the current plan."""
WORTH = 0.003
"""A plan that still fits is replaced only if the predicted loss falls by this share."""
FEWER_WORTH = 0.005
"""Fewer fragments than pieces are chosen only if the predicted loss falls by this share. Below it a
measurement showed no gain: a denser codec in two fragments had the same loss as a sparser codec in
four fragments."""
NEAR = 5 / 4
"""If no plan hides, the least lossy of the plans that are at most this many times as slow as the
fastest is chosen. If time does not depend on bytes, fewer bytes gain nothing."""


def starting_choice(config: RunConfig, reason: str, taken: int = 0) -> Choice:
    """Return the settings with which a run begins, before anything is measured.

    The settings are those of the run file or method (for `dilocox` 20 inner steps and int4), with
    few enough inner steps for `LEAST_ROUNDS` rounds. On a fast link these settings are cautious. On
    a slow link the first measurement costs waiting once. The rates fit the settings, as for any
    other plan. `lengths` explains `taken`.
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
    """Choose the settings of a round.

    Args:
        config: The run file.
        menu: Payload sizes of the codecs of `candidates.codecs(config)`.
        link: Estimate of link and steps; None: nothing is measured yet.
        sites: Number of sites in the round.
        now: The current plan; None: there is none.
        taken: Inner steps before a handover.

    Raises:
        KeyError: A codec is not in `menu`.
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
    """Return the best of all `candidates` that fit, or None if none fits.

    Simulating the exchanges of hundreds of plans in every round would take time. So plans are left
    out if they cannot fit because of their bytes or work alone. Plans are also left out if they
    lose more than a plan that was found, however early they land.
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
        # `FEWER_WORTH` counts only if a plan with a fragment for each piece fits as well.
        if least > enough and any(c.fragments == pieces for c in found):
            break
        plans = of_length(config, menu, link, sites, codec, steps)
        found += [c for c in plans if c.fits]
        enough = min((c.loss for c in found), default=math.inf) + FEWER_WORTH
    return _least_lossy(found)


def _least_lossy(every: list[Candidate]) -> Candidate | None:
    """Return the least lossy plan; fewer fragments only for clearly less predicted loss.

    By measurement, the only cost of fewer fragments is the later landing.
    """
    most = max((c.fragments for c in every), default=1)

    def worth(c: Candidate) -> tuple[float, float, int, int]:
        return c.loss + FEWER_WORTH * (c.fragments < most), c.load, c.inner_steps, -c.fragments

    return min(every, key=worth, default=None)


def _next_best(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, taken: int
) -> tuple[Candidate, str]:
    """Return a plan and its reason if no plan fits.

    Requirements are given up in this order: little work, `LEAST_ROUNDS` rounds, hiding.
    """
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
        for some in (usual, longer)
        for codec in codecs(config)
        for steps in some
        for c in of_length(config, menu, link, sites, codec, steps)
    ]
    most = NEAR * min(c.load for c in every)
    least = min((c for c in every if c.load <= most), key=lambda c: (c.loss, c.load))
    if "delay" not in config.control.pinned:
        least = replace(least, delay=least.slots)
    return least, f"nothing hides on this link, the least lossy of the fastest: {_why(least, link)}"


def _hiding(
    config: RunConfig, menu: Menu, link: Estimate, sites: int, steps: int
) -> list[Candidate]:
    """Return the plans with `steps` inner steps that hide, however much work they take."""
    most = most_us(config, steps * link.step_us)
    return [
        plan
        for codec in codecs(config)
        if _least_us(config, menu, link, sites, codec) <= most
        for plan in of_length(config, menu, link, sites, codec, steps)
        if plan.hides
    ]


def _least_us(config: RunConfig, menu: Menu, link: Estimate, sites: int, codec: str) -> int:
    """Return the least time of a codec's exchanges, in microseconds: with the fewest fragments."""
    return bytes_us(config, menu[codec], link, sites, fragments_of(config, codec, menu)[-1])


def _current(
    config: RunConfig,
    menu: Menu,
    link: Estimate,
    sites: int,
    now: Now,
    taken: int,
) -> Candidate | None:
    """Return the current plan under the current estimate; None if it may not be chosen any more."""
    steps, codec, fragments = now
    if codec not in menu or steps not in lengths(config, 2, taken):
        return None
    if fragments not in fragments_of(config, codec, menu):
        return None
    return candidate(config, menu[codec], codec, steps, link, sites, fragments, in_force=True)


def _choice(config: RunConfig, chosen: Candidate, reason: str) -> Choice:
    """Return the settings for a candidate, with the rates of the loss table."""
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
    """Return a plan with the rates of the loss table, except those that the run file pins."""

    def unless_pinned(key: Pin, found: float) -> float:
        return float(getattr(plan, key)) if key in config.control.pinned else found

    steps, codec = plan.inner_steps, plan.codec
    total, part = config.total_steps, loss_model.part_of(config)
    rate, momentum = loss_model.outer_rates(steps, codec, total, part)
    decay = loss_model.residual_decay(steps, codec, total, part)
    view = loss_model.residual_view(steps, codec, total, part)
    keep = loss_model.kept_progress(steps, plan.delay / plan.slots, codec, part)
    return replace(
        plan,
        learning_rate=unless_pinned("learning_rate", rate),
        momentum=unless_pinned("momentum", momentum),
        residual_decay=unless_pinned("residual_decay", decay),
        residual_view=unless_pinned("residual_view", view),
        keep=unless_pinned("keep", keep),
    )


def _why_not(current: Candidate, link: Estimate) -> str:
    """Return why the current plan no longer fits, as a part of the reason line."""
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
    """Return sizes, times and predicted loss of a plan in words, for the reason line."""
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
