"""What a planned run spends its time on, and the one sentence about it."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.outer import rate_text
from dilocox.inner.memory import GIB
from dilocox.tools.planner.hardware_table import WIRE_SHARE
from dilocox.tools.planner.plan import RunPlan

SMALL = 0.05
"""Shares below this are not worth a sentence."""


@dataclass(frozen=True)
class Shares:
    """Where the time of the slowest site goes, as shares of it; they add up to 1."""

    compute: float
    bubble: float
    traffic: float
    optimizer: float
    network: float
    """Waiting for payloads."""
    exchange: float
    """Boundaries, landings and codecs, as far as training stands still for them."""


def shares(plan: RunPlan) -> Shares:
    """Of the time from one inner step of the slowest site to its next."""
    prediction, step = plan.prediction, plan.step
    whole = prediction.course.step_seconds_of(plan.slowest)
    network = prediction.course.waited_share_of(plan.slowest)
    parts = (step.compute, step.bubble, step.traffic, step.optimizer)
    own = [part / whole for part in parts]
    left = max(0.0, 1 - sum(own) - network)
    total = sum(own) + network + left
    compute, bubble, traffic, optimizer = (part / total for part in own)
    return Shares(compute, bubble, traffic, optimizer, network / total, left / total)


def sentence(plan: RunPlan) -> str:
    """What holds the run back most, in numbers, and what would help."""
    if not plan.fits_devices:
        device = plan.fullest.device
        stage = max(plan.footprints, key=lambda each: each.device).stage
        who = "all ranks of a site need" if device.shared else f"stage {stage} needs"
        return (
            f"Memory: {who} {plan.needed / GIB:.1f} GiB, a {device.name} has "
            f"{plan.available / GIB:.1f} GiB for training."
        )
    host = plan.host
    if host is not None and host.available is not None and not host.fits:
        return (
            f"Memory: what {host.ranks} ranks keep beside their GPUs takes "
            f"{host.needed / GIB:.1f} GiB of "
            f"a machine at {host.place.text}, which has {host.available / GIB:.1f} GiB."
        )
    found = shares(plan)
    site = plan.config.site
    lines = {
        "bubble": (
            found.bubble,
            f"Pipeline bubbles: {found.bubble:.0%} of the time stages wait for each other, because "
            f"{site.micro_batches} micro-batches are few for {site.stages} stages; raise "
            "site.batch_size, or use an interleaved schedule or fewer stages.",
        ),
        "network": (found.network, _network(plan, found.network)),
        "traffic": (
            found.traffic,
            f"Traffic inside the site: {found.traffic:.0%} of the time goes to activations and "
            f"FSDP; {_less_traffic(plan)}",
        ),
        "optimizer": (
            found.optimizer,
            f"The inner optimizer: {found.optimizer:.0%} of the time; a larger site.batch_size "
            "spreads it over more tokens.",
        ),
        "exchange": (
            found.exchange,
            f"Work of the exchange: {found.exchange:.0%} of the time training stands still for "
            "boundaries, landings and codecs; longer rounds, a lighter codec or outer.device = "
            '"model" help.',
        ),
        "sites": (_uneven(plan), _uneven_text(plan)),
    }
    share, text = max(lines.values())
    if share < SMALL:
        return (
            f"Computation: {found.compute:.0%} of the time; nothing else takes more than "
            f"{max(share, 0.01):.0%}. Faster or more GPUs would make it faster."
        )
    return text


def _less_traffic(plan: RunPlan) -> str:
    better = plan.hybrid
    if better is None:
        return "fewer shards, a faster --fabric or a larger site.micro_batch_size help."
    return (
        "its shards gather parameters between nodes. Shards inside of nodes, and replicas of them "
        f"(--set site.replicas={better.replicas} --set site.shards={better.shards}), make a step "
        f"of {plan.step.seconds:.3g} s one of {better.step.seconds:.3g} s."
    )


def _network(plan: RunPlan, share: float) -> str:
    prediction = plan.prediction
    slowest = min(plan.links, key=lambda link: link.rate)
    if prediction.exchange_seconds < share * prediction.round_seconds / 2:
        return (
            f"The exchange between the sites: training stands still for it {share:.0%} of the "
            f"time, but a round's payloads take {prediction.exchange_seconds:.3g} s only of its "
            f"{prediction.round_seconds:.3g} s. Round trips and what else an exchange takes beside "
            "its bytes hold it up, which no faster link changes; more to compute per step or "
            "longer rounds help."
        )
    busy = prediction.exchange_seconds / max(1e-9, prediction.round_seconds)
    # Hidden if exchanges take no longer than computation does; what nothing hides has to be short.
    blocking = plan.config.exchanges_gradients or prediction.choice.delay == 0
    most = SMALL / (1 - SMALL) if blocking else 1.0
    enough = 8 * slowest.rate / WIRE_SHARE * busy / (most * max(1e-9, 1 - share))
    return (
        f"The link between the sites: training stands still for it {share:.0%} of the time "
        f"(a round's payloads take {prediction.exchange_seconds:.3g} s of its "
        f"{prediction.round_seconds:.3g} s); about {rate_text(enough)} or a smaller codec would do."
    )


def _uneven(plan: RunPlan) -> float:
    """Share of all GPUs' time lost because the other sites wait for the slowest."""
    busy = plan.prediction.course.busy
    return 1 - sum(busy) / (len(busy) * max(busy))


def _uneven_text(plan: RunPlan) -> str:
    course = plan.prediction.course
    sites, busy = course.sites, course.busy
    if plan.config.declares_speeds:
        idle = sites[busy.index(min(busy))].name
        return (
            f"Declared speeds: {_uneven(plan):.0%} of all GPUs' time is lost, most at {idle}, "
            f"which is faster than sites.{idle}.speed says; raise it, or declare no speeds."
        )
    slowest = sites[plan.slowest]
    return (
        f"Uneven sites: the others wait for {slowest.name} ({slowest.step:.3g} s a step) "
        f"{_uneven(plan):.0%} of the time; give it a smaller sites.{slowest.name}.batch_size."
    )
