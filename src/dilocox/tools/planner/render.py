"""Renders a `RunPlan` as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilocox.config.methods import exchanges_gradients
from dilocox.config.site import SiteSection
from dilocox.inner.memory import GIB, inner_bytes_per_parameter, outer_bytes_per_parameter
from dilocox.tools.planner.bottleneck import sentence, shares
from dilocox.tools.planner.comparison import Comparison
from dilocox.tools.planner.host_memory import HostMemory
from dilocox.tools.planner.memory_footprint import Footprint
from dilocox.tools.planner.memory_parts import parts_json, parts_text
from dilocox.tools.planner.options import Option, loss_rise
from dilocox.tools.planner.plan import MethodRow, RunPlan
from dilocox.tools.planner.predict import Prediction
from dilocox.tools.planner.record_size import record_size, record_text
from dilocox.utils.formatting import number, size

SCHEMA = 1
"""Version of the JSON form. It is raised when a key changes its meaning or is removed."""


def as_text(plan: RunPlan) -> str:
    """Return the whole plan as one page of text."""
    parts = [_headline(plan), _memory(plan), _exchange(plan), _methods(plan), _costs(plan)]
    return "\n\n".join([*parts, sentence(plan)])


def _headline(plan: RunPlan) -> str:
    site, hf = plan.config.site, plan.outline.hf_config
    tokens = plan.prediction.tokens_per_step
    outline, sites = plan.outline, _plural(len(plan.places), "site")
    lines = [
        f"{plan.config.run.name}: {hf.model_type}, {_count(outline.parameters)} parameters"
        f"{_of_adapters(outline.frozen)}, {sites} x {_layout(site)}"
    ]
    names = list(plan.config.sites)
    told: dict[str, list[str]] = {}
    for name, place, link in zip(names, plan.places, plan.links, strict=True):
        used = "" if place.device.shared else f", {site.ranks} of {place.gpus} GPUs used"
        text = f"{place.text}{used}; link {link.name or 'given'}, round trip {link.rtt * 1e3:g} ms"
        told.setdefault(text, []).append(name)
    lines += [f"  {_some(sites)}: {text}" for text, sites in told.items()]
    step = plan.step
    lines.append(
        f"inner step: {_seconds(step.seconds)} ({_seconds(step.compute)} computing, "
        f"{_seconds(step.bubble)} pipeline bubbles, {_seconds(step.traffic)} traffic inside the "
        f"site, {_seconds(step.optimizer)} optimizer) for {number(tokens)} tokens"
    )
    return "\n".join(lines)


def _layout(site: SiteSection) -> str:
    """Return a text such as `2 replicas x 4 stages x 1 shard`; a single replica is left out."""
    layout = f"{_plural(site.stages, 'stage')} x {_plural(site.shards, 'shard')}"
    return layout if site.replicas == 1 else f"{_plural(site.replicas, 'replica')} x {layout}"


def _memory(plan: RunPlan) -> str:
    lines = [
        "GiB per rank  layers  parameters  weights  gradients  optimizer  copies  activations"
        "   total    host"
    ]
    for first, last, each in grouped(plan.footprints):
        stages = f"stage {first}" if first == last else f"stages {first}-{last}"
        lines.append(
            f"{stages:12s}  {each.layers[0]:6d}  {_count(each.parameters):>10s}  "
            f"{each.weights / GIB:7.2f}  {each.gradients / GIB:9.2f}  {each.optimizer / GIB:9.2f}  "
            f"{each.copies / GIB:6.2f}  {each.activations / GIB:11.2f}  {each.device / GIB:6.2f}  "
            f"{each.host / GIB:6.2f}"
        )
    device = plan.fullest.device
    lines.append("")
    first, last, each = max(grouped(plan.footprints), key=lambda group: group[2].device)
    who = f"stage {first}" if first == last else f"stages {first}-{last}"
    lines += [*parts_text(who, each, device.reserved), ""]
    shared = device.shared
    where = "the machine's memory, for all ranks" if shared else "a GPU"
    outer = "on the GPU" if plan.footprints[0].outer_on_device else "in the host's memory"
    outer = "in the same memory" if shared else outer
    lines.append(
        f"{'fits' if plan.fits_devices else 'DOES NOT FIT'}: {plan.needed / GIB:.1f} GiB of the "
        f"{plan.available / GIB:.1f} GiB that training may use of {where}; outer state "
        f"({outer_bytes_per_parameter(plan.config)} bytes per parameter) {outer}"
        + ("" if plan.exact else "; activations are a lower bound")
    )
    for change in plan.advice:
        verdict = "fits" if change.fits else "still does not fit"
        lines.append(
            f"  {change.text}: {change.needed / GIB:.1f} of {change.available / GIB:.1f} GiB of "
            f"{change.device}, {verdict}"
        )
    if not plan.fits_devices and not plan.advice:
        lines.append("  no change of the run file makes it fit; use more GPUs or larger ones")
    if plan.host is not None:
        lines.append(_host(plan.host, plan.config.outer.momentum_dtype))
    return "\n".join(lines)


def _host(host: HostMemory, momentum: str) -> str:
    need = f"{host.needed / GIB:.1f} GiB per machine for {_plural(host.ranks, 'rank')}"
    if host.available is None:
        return f"host memory: {need} (give --host-memory GIB to check that it fits)"
    told = f"{need}, of {host.available / GIB:.1f} GiB at {host.place.text}"
    if host.fits:
        return f"host memory fits: {told}"
    less = "--set outer.momentum_dtype=bf16, " if momentum == "fp32" else ""
    mend = f"try {less}or spread the site over more nodes"
    return f"host memory DOES NOT FIT: {told}; {mend}"


def _exchange(plan: RunPlan) -> str:
    prediction = plan.prediction
    choice = prediction.choice
    rounds = (
        f"a round of H = {choice.inner_steps} inner steps, F = {choice.fragments} fragments, tau = "
        f"{choice.delay} of {choice.slots} slots, codec {choice.codec}"
    )
    parts = 1
    if plan.config.exchanges_gradients:
        rounds, parts = f"a step, codec {choice.codec}", choice.inner_steps
    lines = [
        f"exchange: {rounds}",
        f"  each site sends and receives {size(prediction.payload_bytes / parts)}, "
        f"{_seconds(prediction.exchange_seconds / parts)} of link time in "
        f"{_seconds(prediction.round_seconds / parts)}",
    ]
    record = record_size(plan)
    if record is not None:
        lines.append(f"  record: {record_text(plan, record)}")
    if choice.reason:
        lines.append(f"  controller: {choice.reason}")
    lines.append(
        f"predicted: {number(prediction.tokens_per_second)} tokens/s, {prediction.share:.1%} of "
        f"the same sites without exchanges, {prediction.tokens_per_second / plan.limit:.1%} of the "
        f"compute limit of {number(plan.limit)}"
    )
    lines += [f"  fits, too: {_option(each, plan)}" for each in plan.options]
    return "\n".join(lines)


def _option(option: Option, plan: RunPlan) -> str:
    """Return one line about the speed, loss and memory with a change of the run file."""
    found, choice = option.prediction, option.prediction.choice
    before = loss_rise(plan.config, plan.prediction.choice)
    loss = ""
    if option.loss is not None and before is not None:
        loss = (
            f", predicted loss +{option.loss:.1%} instead of +{before:.1%} (rough, from small "
            "models)"
        )
    return (
        f"{option.text}: {number(found.tokens_per_second)} tokens/s, {found.share:.1%} of the "
        f"speed without exchanges, rounds of H = {choice.inner_steps} with codec {choice.codec}, "
        f"{size(found.payload_bytes)} per round"
        f"{loss}; {option.needed / GIB:.1f} of {option.available / GIB:.1f} GiB"
    )


def _methods(plan: RunPlan) -> str:
    rows = [["method", "tokens/s", "of no network", "over allreduce", "H", "codec", "payload/step"]]
    base = next((r.prediction for r in plan.methods if r.method == "allreduce"), None)
    for row in plan.methods:
        found = row.prediction
        if found is None:
            continue
        speed = "-"
        if base is not None:
            speed = f"{_figure(found.tokens_per_second / base.tokens_per_second)}x"
        rows.append(
            [
                row.method,
                _figure(found.tokens_per_second),
                f"{found.share:.1%}",
                speed,
                _steps(row),
                found.choice.codec,
                size(found.payload_bytes / found.choice.inner_steps),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if index in (0, 5) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [
        f"{row.method}: cannot be used here ({row.problem})" for row in plan.methods if row.problem
    ]
    return "\n".join(lines)


def _figure(value: float) -> str:
    """Return `value` with at least three digits: `2.45`, `245`, `24,532`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _steps(row: MethodRow) -> str:
    assert row.prediction is not None
    gradients = exchanges_gradients(row.method)
    return "1" if gradients else str(row.prediction.choice.inner_steps)


def _costs(plan: RunPlan) -> str:
    budget = plan.budget
    usd = "rent unknown" if budget.compute_usd is None else f"${budget.compute_usd:,.0f} rent"
    total = "" if budget.usd is None else f", ${budget.usd:,.0f} in total"
    free = not any(link.usd_per_gb for link in plan.links)
    hint = (
        " (--egress USD sets a price per GB; so does --link with the name of a cloud)"
        if free and len(plan.links) > 1
        else ""
    )
    return (
        f"{number(budget.tokens)} tokens: {_duration(budget.seconds)}, {usd}, "
        f"${budget.egress_usd:,.2f} egress for {size(budget.egress_bytes)}{hint}{total}"
    )


def compared(found: Comparison) -> str:
    """Return a comparison as one line."""
    where = (
        f"one cluster: {found.gpus} such GPUs at ${found.usd_per_hour:g} an hour, where exchanges "
        f"take no time: {_duration(found.seconds)}, ${found.usd:,.0f}"
    )
    if found.equal_usd_per_hour is None:
        return f"{where}; the rent of this run is unknown (--rent USD)"
    if found.saved is None:
        return f"{where}; this run costs the same if a GPU there cost {_per_hour(found)}"
    less = f"{abs(found.saved):.1%} {'less' if found.saved >= 0 else 'more'}"
    return f"{where}; this run costs {less}, and the same if a GPU there cost {_per_hour(found)}"


def _per_hour(found: Comparison) -> str:
    return f"${found.equal_usd_per_hour:.2f} an hour"


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain values for JSON, in bytes, seconds, tokens and US dollars."""
    prediction, budget = plan.prediction, plan.budget
    return {
        "schema": SCHEMA,
        "run": plan.config.run.name,
        "model": {
            "type": plan.outline.hf_config.model_type,
            "parameters": plan.outline.parameters,
            **({"frozen": plan.outline.frozen} if plan.outline.frozen else {}),
            "flops_per_token": plan.outline.flops_per_token,
        },
        "layout": {
            "sites": len(plan.places),
            "stages": plan.config.site.stages,
            "shards": plan.config.site.shards,
            "replicas": plan.config.site.replicas,
            "schedule": plan.config.site.schedule,
            "tokens_per_step": prediction.tokens_per_step,
        },
        "sites": [
            {
                "name": name,
                "device": place.device.name,
                "gpus": place.gpus,
                "gpus_used": None if place.device.shared else plan.config.site.ranks,
                "nodes": place.nodes,
                "link": link.name,
                "up_bytes_per_second": link.up,
                "down_bytes_per_second": link.down,
                "rtt_seconds": link.rtt,
            }
            for name, place, link in zip(plan.config.sites, plan.places, plan.links, strict=True)
        ],
        "memory": _memory_json(plan),
        "record": _record(plan),
        "step": {
            "seconds": plan.step.seconds,
            "compute": plan.step.compute,
            "bubble": plan.step.bubble,
            "traffic": plan.step.traffic,
            "optimizer": plan.step.optimizer,
        },
        "hybrid": _hybrid(plan),
        "faster_link": _faster_link(plan),
        "prediction": _prediction(prediction),
        "methods": [
            {"method": row.method, "problem": row.problem, **_prediction(row.prediction)}
            for row in plan.methods
        ],
        "options": [
            {
                "set": {option.key: option.value},
                "predicted_loss": option.loss,
                "needed_bytes": option.needed,
                "available_bytes": option.available,
                **_prediction(option.prediction),
            }
            for option in plan.options
        ],
        "limit_tokens_per_second": plan.limit,
        "shares": vars(shares(plan)),
        "budget": {
            "tokens": budget.tokens,
            "seconds": budget.seconds,
            "usd": budget.usd,
            "compute_usd": budget.compute_usd,
            "egress_usd": budget.egress_usd,
            "egress_bytes": budget.egress_bytes,
        },
        "bottleneck": sentence(plan),
        "sources": sorted(
            {place.device.source for place in plan.places}
            | {place.device.price_source for place in plan.places}
            | {link.source for link in plan.links}
            | {place.device.host.source for place in plan.places}
        ),
    }


def _memory_json(plan: RunPlan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "needed_bytes": plan.needed,
        "available_bytes": plan.available,
        "host_needed_bytes": None if plan.host is None else plan.host.needed,
        "host_available_bytes": None if plan.host is None else plan.host.available,
        "host_ranks": None if plan.host is None else plan.host.ranks,
        "host_place": None if plan.host is None else plan.host.place.text,
        "device": plan.fullest.device.name,
        "exact": plan.exact,
        "inner_bytes_per_parameter": inner_bytes_per_parameter(plan.config),
        "outer_bytes_per_parameter": outer_bytes_per_parameter(plan.config),
        "stages": [_footprint(each, plan.fullest.device.reserved) for each in plan.footprints],
        "advice": [
            {
                "set": dict(change.values),
                "needed_bytes": change.needed,
                "available_bytes": change.available,
                "device": change.device,
                "fits": change.fits,
            }
            for change in plan.advice
        ],
    }


def _record(plan: RunPlan) -> dict[str, Any] | None:
    """Return the disk space of the record at each site. None if the run keeps no record."""
    found = record_size(plan)
    if found is None:
        return None
    return {
        "kept_bytes": found.kept,
        "whole_bytes": found.whole,
        "bytes_per_day": found.by_day,
        "limit_bytes": found.limit,
    }


def _hybrid(plan: RunPlan) -> dict[str, Any] | None:
    """Return the faster layout of the slowest site. None if no faster layout was found."""
    found = plan.hybrid
    if found is None:
        return None
    layout = {"site.replicas": found.replicas, "site.shards": found.shards}
    return {"set": layout, "step_seconds": found.step.seconds}


def _faster_link(plan: RunPlan) -> dict[str, Any] | None:
    """Return the link that the last sentence names. None if a faster link does not help."""
    found = plan.faster_link
    return None if found is None else {"bytes_per_second": found.rate, "enough": found.enough}


def _footprint(each: Footprint, reserved: int) -> dict[str, Any]:
    return {
        "stage": each.stage,
        "layers": each.layers[0],
        "parameters": each.parameters,
        "weights": each.weights,
        "gradients": each.gradients,
        "optimizer": each.optimizer,
        "copies": each.copies,
        "activations": each.activations,
        "outer": each.outer,
        "under_way": each.under_way,
        "device": each.device,
        "host": each.host,
        "parts": parts_json(each, reserved),
    }


def _prediction(found: Prediction | None) -> dict[str, Any]:
    if found is None:
        return {}
    choice = found.choice
    return {
        "tokens_per_second": found.tokens_per_second,
        "share_of_no_network": found.share,
        "waited_share": found.waited_share,
        "inner_steps": choice.inner_steps,
        "slots": choice.slots,
        "fragments": choice.fragments,
        "delay": choice.delay,
        "codec": choice.codec,
        "reason": choice.reason,
        "round_seconds": found.round_seconds,
        "exchange_seconds": found.exchange_seconds,
        "payload_bytes": found.payload_bytes,
        "work_seconds": found.work_seconds,
    }


def grouped(every: Sequence[Footprint]) -> list[tuple[int, int, Footprint]]:
    """Group neighbouring stages with the same number of parameters and layers.

    Returns (first stage, last stage, footprint of the group's fullest stage) per group. Stages of
    a group differ in their activations alone.
    """
    runs: list[tuple[int, int, Footprint]] = []
    for each in every:
        if runs:
            first, last, known = runs[-1]
            if (known.parameters, known.layers[0]) == (each.parameters, each.layers[0]):
                fullest = max(known, each, key=lambda one: one.device)
                runs[-1] = (first, last + 1, fullest)
                continue
        runs.append((each.stage, each.stage, each))
    return runs


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _some(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)})"


def _of_adapters(frozen: int) -> str:
    """Return a phrase about the base model of adapters; empty without adapters."""
    return f" of adapters on {_count(frozen)} frozen ones" if frozen else ""


def _count(parameters: int) -> str:
    return number(parameters).replace("G", "B")


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return _seconds(seconds)
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 3 * 86400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:,.1f} days"
