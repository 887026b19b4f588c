"""Finds the bottleneck of a planned run, and describes it in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.outer import rate_text
from dilocox.inner.memory import GIB
from dilocox.tools.planner.hardware_table import WIRE_SHARE
from dilocox.tools.planner.plan import RunPlan

SMALL = 0.05
"""Shares of the time below this are not worth a sentence."""


@dataclass(frozen=True)
class Shares:
    """Shares of the slowest site's time by cause; they add up to 1."""

    compute: float
    bubble: float
    traffic: float
    optimizer: float
    network: float
    """Waiting for payloads of other sites."""
    exchange: float
    """Boundaries, landings and codecs, as far as they hold up training."""


def shares(plan: RunPlan) -> Shares:
    """Return the shares of the time from one inner step of the slowest site to its next."""
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
    """Return a sentence about the run's largest bottleneck, with figures and what would help."""
    if not plan.fits_devices:
        device = plan.fullest.device
        stage = max(plan.footprints, key=lambda each: each.device).stage
        who = "all ranks of a site need" if device.shared else f"stage {stage} needs"
        return (
            f"Memory: {who} {plan.needed / GIB:.1f} GiB, but a {device.name} has only "
            f"{plan.available / GIB:.1f} GiB for training."
        )
    host = plan.host
    if host is not None and host.available is not None and not host.fits:
        return (
            f"Memory: {host.ranks} ranks on one machine need "
            f"{host.needed / GIB:.1f} GiB of host memory, "
            f"but a machine at {host.place.text} has only {host.available / GIB:.1f} GiB."
        )
    found = shares(plan)
    site = plan.config.site
    lines = {
        "bubble": (
            found.bubble,
            f"Pipeline bubbles: stages wait for each other {found.bubble:.0%} of the time, because "
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
            f"The inner optimizer takes {found.optimizer:.0%} of the time; a larger "
            "site.batch_size spreads it over more tokens.",
        ),
        "exchange": (
            found.exchange,
            f"Exchange work: training stands still {found.exchange:.0%} of the time for "
            "boundaries, landings and codecs; longer rounds, a cheaper codec or outer.device = "
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
        "shards gather parameters between nodes. With shards inside one node and more replicas "
        f"(--set site.replicas={better.replicas} --set site.shards={better.shards}), a step takes "
        f"{better.step.seconds:.3g} s instead of {plan.step.seconds:.3g} s."
    )


def _network(plan: RunPlan, share: float) -> str:
    prediction = plan.prediction
    slowest = min(plan.links, key=lambda link: link.rate)
    if prediction.exchange_seconds < share * prediction.round_seconds / 2:
        return (
            f"The exchange between the sites: training stands still for it {share:.0%} of the "
            f"time, but payloads use the link for only {prediction.exchange_seconds:.3g} s of a "
            f"round of {prediction.round_seconds:.3g} s. Round trips and other fixed costs of an "
            "exchange hold training up. A faster link does not help; longer rounds or more "
            "computation per step do."
        )
    busy = prediction.exchange_seconds / max(1e-9, prediction.round_seconds)
    # Overlapped exchanges are hidden if they take no longer than computation; blocking ones must
    # be short.
    blocking = plan.config.exchanges_gradients or prediction.choice.delay == 0
    most = SMALL / (1 - SMALL) if blocking else 1.0
    enough = 8 * slowest.rate / WIRE_SHARE * busy / (most * max(1e-9, 1 - share))
    return (
        f"The link between the sites: training stands still for it {share:.0%} of the time "
        f"(payloads use it for {prediction.exchange_seconds:.3g} s of a round of "
        f"{prediction.round_seconds:.3g} s); a link of about {rate_text(enough)}, or a codec with "
        "smaller payloads, would be enough."
    )


def _uneven(plan: RunPlan) -> float:
    """Return the share of all GPUs' time that is lost because sites wait for the slowest one."""
    busy = plan.prediction.course.busy
    return 1 - sum(busy) / (len(busy) * max(busy))


def _uneven_text(plan: RunPlan) -> str:
    course = plan.prediction.course
    sites, busy = course.sites, course.busy
    if plan.config.declares_speeds:
        idle = sites[busy.index(min(busy))].name
        return (
            f"Declared speeds: {_uneven(plan):.0%} of all GPUs' time is lost, most at {idle}, "
            f"because this site is faster than sites.{idle}.speed says; raise that key, or declare "
            "no speeds."
        )
    slowest = sites[plan.slowest]
    return (
        f"Uneven sites: the others wait for {slowest.name} ({slowest.step:.3g} s a step) "
        f"{_uneven(plan):.0%} of the time; give it a smaller sites.{slowest.name}.batch_size."
    )
