"""Finds the bottleneck of a planned run, and describes it in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.outer import rate_text
from dilocox.inner.memory import GIB
from dilocox.tools.planner.faster_link import SMALL
from dilocox.tools.planner.plan import RunPlan
from dilocox.tools.planner.step_time import reduces_once, stays_on_nodes


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
            f"Traffic inside the site: {found.traffic:.0%} of the time goes to "
            f"{_less_traffic(plan)}",
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
    """Return the main cause of traffic inside the slowest site, and what lowers this traffic."""
    better, step = plan.hybrid, plan.step
    if better is not None:
        return (
            "activations and FSDP; shards gather parameters between nodes. With shards inside one "
            f"node and more replicas (--set site.replicas={better.replicas} --set "
            f"site.shards={better.shards}), a step takes {better.step.seconds:.3g} s instead of "
            f"{step.seconds:.3g} s."
        )
    config, place = plan.config, plan.places[plan.slowest]
    site, gathers = config.site, step.traffic - step.hops - step.replicas
    if step.hops >= max(gathers, step.replicas):
        cause, mends = "activations between stages", ["fewer stages"]
        inside = stays_on_nodes(config, place, site.exchanging_ranks)
    elif step.replicas > gathers:
        cause, mends = "gradients between replicas", ["fewer replicas", "a larger site.batch_size"]
        inside = site.ranks <= place.per_node
    else:
        once = reduces_once(config, plan.outline, place.device)
        size = "site.batch_size" if once else "site.micro_batch_size"
        cause, mends = "FSDP", ["fewer shards", f"a larger {size}"]
        inside = stays_on_nodes(config, place, site.shards)
    if not inside:
        mends.append("a faster --fabric")
    if len(mends) == 1:
        return f"{cause}; {mends[0]} would lower it."
    return f"{cause}; {', '.join(mends[:-1])} or {mends[-1]} would lower it."


def _network(plan: RunPlan, share: float) -> str:
    prediction, better = plan.prediction, plan.faster_link
    still = f"training stands still for it {share:.0%} of the time"
    link, whole = f"{prediction.exchange_seconds:.3g} s", f"{prediction.round_seconds:.3g} s"
    if better is None:
        return (
            f"The exchange between the sites: {still}, but payloads use the link for only {link} "
            f"of a round of {whole}. Round trips and other fixed costs of an exchange hold "
            "training up. A faster link does not help; longer rounds or more computation per step "
            "do."
        )
    told = f"The link between the sites: {still} (payloads use it for {link} of a round of {whole})"
    rate = rate_text(8 * better.rate)
    if not better.enough:
        return (
            f"{told}; not even a link of {rate} would be enough, because round trips and other "
            "fixed costs of an exchange remain. Longer rounds or more computation per step help."
        )
    return f"{told}; a link of about {rate}, or a codec with smaller payloads, would be enough."


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
