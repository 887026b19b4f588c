"""A whole plan: what it says, its JSON form, and its costs by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.planned_runs import ARCHITECTURE, TABLE, device, link, run

from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, load_run
from dilocox.errors import ConfigError
from dilocox.tools.planner import plan as planning
from dilocox.tools.planner.bottleneck import sentence, shares
from dilocox.tools.planner.hardware_table import GpuPlacement, Link
from dilocox.tools.planner.plan import RunPlan, flushed_bytes, plan_run
from dilocox.tools.planner.render import SCHEMA, as_json, as_text, grouped
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils.formatting import size

ROOT = Path(__file__).parents[3]
KEYS: dict[str, Any] = {
    "schema": None,
    "run": None,
    "model": {"type", "parameters", "flops_per_token"},
    "layout": {"sites", "stages", "shards", "schedule", "tokens_per_step"},
    "sites": None,
    "memory": {
        "fits", "needed_bytes", "available_bytes", "exact", "inner_bytes_per_parameter",
        "outer_bytes_per_parameter", "stages", "advice", "device", "host_ranks", "host_place",
    },
    "record": {"kept_bytes", "whole_bytes", "bytes_per_day", "limit_bytes"},
    "step": {"seconds", "compute", "bubble", "traffic", "optimizer"},
    "prediction": {
        "tokens_per_second", "share_of_no_network", "waited_share", "inner_steps", "slots",
        "delay", "fragments", "codec", "reason", "round_seconds", "exchange_seconds",
        "payload_bytes", "work_seconds",
    },
    "methods": None,
    "limit_tokens_per_second": None,
    "shares": {"compute", "bubble", "traffic", "optimizer", "network", "exchange"},
    "hybrid": None,
    "faster_link": None,
    "budget": {"tokens", "seconds", "usd", "compute_usd", "egress_usd", "egress_bytes"},
    "bottleneck": None,
    "sources": None,
}  # fmt: skip
"""The JSON form: keys may be added; one that goes or changes its meaning raises `SCHEMA`."""


def planned(place: GpuPlacement | None = None, rate: float = 1e6, **options: Any) -> RunPlan:
    sections = options.pop("sections", {})
    places = [place or GpuPlacement(device(), 4, 1)] * 2
    return plan_run(run(**sections), places, [link(rate)] * 2, 1e10, **options)


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return planned()


def test_the_json_form_is_stable(plan: RunPlan) -> None:
    assert SCHEMA == 1
    content = json.loads(json.dumps(as_json(plan)))
    assert content["schema"] == 1
    for key, inner in KEYS.items():
        assert key in content
        if inner is not None:
            assert inner <= set(content[key])
    assert [row["method"] for row in content["methods"]] == list(METHODS)
    site = content["sites"][0]
    assert {"name", "device", "up_bytes_per_second", "link"} <= set(site)
    assert (site["gpus"], site["gpus_used"], site["nodes"]) == (4, 1, 1)
    assert content["budget"]["usd"] == plan.budget.usd
    assert content["memory"]["device"] == "plain"
    assert (content["memory"]["host_ranks"], content["memory"]["host_place"]) == (1, "plain:4x1")
    assert (content["hybrid"], content["faster_link"]) == (None, None)
    assert {"stage", "parameters", "device", "host"} <= set(content["memory"]["stages"][0])
    assert sum(content["shares"].values()) == pytest.approx(1.0)
    own = next(row for row in content["methods"] if row["method"] == "dilocox")
    assert own["tokens_per_second"] == content["prediction"]["tokens_per_second"]


def test_the_text_says_all_of_it(plan: RunPlan) -> None:
    text = as_text(plan)
    assert "llama, 45.3k parameters, 2 sites x 1 stage x 1 shard" in text
    assert "lyon, paris: plain:4x1, 1 of 4 GPUs used" in text
    for method in METHODS:
        assert f"\n{method} " in text
    for said in ("fits:", "controller:", "predicted:", "tokens:", "egress for", "inner step:"):
        assert said in text
    assert text.endswith(sentence(plan))
    assert all(len(line) < 260 for line in text.splitlines())


def test_a_budget_by_hand(plan: RunPlan) -> None:
    # 4,000 steps of 2 x 8 sequences of 16 tokens.
    budget = plan.budget
    assert budget.tokens == 4000 * 2 * 8 * 16
    prediction = plan.prediction
    training = budget.tokens / prediction.tokens_per_second
    assert budget.seconds >= training
    assert budget.seconds == pytest.approx(training, rel=0.5)
    # Two sites of four GPUs at $2 an hour each.
    assert budget.compute_usd == pytest.approx(budget.seconds / 3600 * 8 * 2.0)
    rounds = 4000 / prediction.choice.inner_steps
    assert budget.egress_bytes >= 2 * rounds * prediction.payload_bytes
    assert budget.egress_usd == 0.0


@pytest.mark.parametrize(("exchange", "payloads"), [("gather", 7.0), ("reduce", 1.75)])
def test_the_end_of_a_run_is_exchanged_like_its_rounds(exchange: str, payloads: float) -> None:
    """Among eight sites, whose dense rounds are followed by one payload in eight bits."""
    config = run(outer={"method": "diloco", "exchange": exchange})
    outline = planned(methods=()).outline
    one = flushed_bytes(config, outline, "none", 2)
    assert one == pytest.approx(outline.parameters * 8.125 / 8, rel=0.03)  # whole blocks
    assert flushed_bytes(config, outline, "none", 8) == pytest.approx(payloads * one, rel=1e-3)


def test_a_short_run_pays_for_the_rounds_before_the_plan_has_settled() -> None:
    """All of it is simulated: what it takes and sends is known round by round."""
    found = planned(rate=2e3, methods=(), sections={"outer": {"steps": 300}})
    course, budget = found.prediction.course, found.budget
    assert course.choices[0].codec != found.prediction.choice.codec
    assert course.tokens == budget.tokens == 300 * 2 * 8 * 16
    assert sum(choice.inner_steps for choice in course.choices) == 300
    assert budget.seconds >= course.seconds
    assert budget.egress_bytes >= course.sent_bytes
    settled = found.prediction
    assert budget.egress_bytes > 1.2 * settled.payload_per_token * budget.tokens


def test_a_last_round_that_is_cut_says_nothing_of_the_plan() -> None:
    """1,040 steps are two rounds of 500 and one of 40, which is no plan of DiLoCo's."""
    diloco = {"method": "diloco"}
    cut = planned(rate=1e5, methods=(), sections={"outer": {**diloco, "steps": 1040}})
    whole = planned(rate=1e5, methods=(), sections={"outer": {**diloco, "steps": 1000}})
    assert cut.prediction.course.choices[-1].inner_steps == 40
    assert cut.prediction.choice.inner_steps == 500
    assert cut.prediction.tokens_per_second == pytest.approx(whole.prediction.tokens_per_second)
    assert cut.prediction.payload_bytes == whole.prediction.payload_bytes
    only = planned(rate=1e5, methods=(), sections={"outer": {**diloco, "steps": 40}})
    assert only.prediction.choice.inner_steps == 40


def test_a_site_with_a_larger_batch_needs_its_own_memory_and_time() -> None:
    site = {"stages": 2, "schedule": "gpipe"}
    found, every = (
        planned(methods=(), sections={"site": {**site, **own}, "sites": sites})
        for own, sites in (
            ({}, {"lyon": {"batch_size": 32}, "paris": {}}),
            ({"batch_size": 32}, {"lyon": {}, "paris": {}}),
        )
    )
    assert found.needed == every.needed
    assert found.step == every.step
    assert found.slowest == 0
    steps = [each.step for each in found.prediction.course.sites]
    assert steps[0] == every.prediction.course.sites[0].step > steps[1]


def test_a_declared_speed_that_is_too_low_is_named() -> None:
    sites = {"lyon": {"speed": 0.1}, "paris": {}}
    found = planned(
        GpuPlacement(device(memory_rate=1e18), 4, 1),
        1e12,
        methods=(),
        sections={"sites": sites, "outer": {"steps": 10**5}},
    )
    assert "most at lyon" in sentence(found)
    assert "sites.lyon.speed" in sentence(found)


def test_egress_is_paid_by_the_gigabyte() -> None:
    wire = Link(1e6, 1e6, 0.0, usd_per_gb=0.5)
    found = plan_run(run(), [GpuPlacement(device(), 1, 1)] * 2, [wire] * 2, 1e10, methods=())
    budget = found.budget
    assert budget.egress_usd == pytest.approx(budget.egress_bytes / 1e9 * 0.5)
    assert budget.usd == pytest.approx((budget.compute_usd or 0) + budget.egress_usd)
    unpriced = GpuPlacement(device(usd_per_hour=None), 1, 1)
    assert plan_run(run(), [unpriced], [wire], 1e10, methods=()).budget.usd is None


def test_a_token_budget_sets_the_length_of_the_run() -> None:
    found = planned(tokens=1e6, methods=())
    assert found.config.total_steps == round(1e6 / (2 * 8 * 16))
    assert found.budget.tokens == 1e6


def uneven(steps: str, tokens: float | None = None) -> RunPlan:
    """Two sites, one of a quarter of the other's speed."""
    places = [
        GpuPlacement(device(memory_rate=1e18, utilisation=share), 1, 1) for share in (1.0, 0.25)
    ]
    config = run(control={"steps": steps}, outer={"steps": 4000})
    return plan_run(config, places, [link(1e9)] * 2, 1e10, tokens=tokens, methods=())


@pytest.mark.parametrize(("steps", "both"), [("by-speed", 1.25), ("equal", 2.0)])
def test_a_slower_site_trains_on_fewer_tokens(steps: str, both: float) -> None:
    """The run file counts the fastest site's steps, of 8 sequences of 16 tokens."""
    found = uneven(steps)
    budget, course = found.budget, found.prediction.course
    assert budget.tokens == pytest.approx(4000 * both * 8 * 16, rel=0.02)
    fastest = course.step_seconds_of(0)
    assert budget.seconds == pytest.approx(4000 * fastest, rel=0.06)


@pytest.mark.parametrize(("steps", "both"), [("by-speed", 1.25), ("equal", 2.0)])
def test_a_token_budget_counts_what_each_site_trains_on(steps: str, both: float) -> None:
    found = uneven(steps, tokens=1e7)
    assert found.budget.tokens == 1e7
    assert found.config.total_steps == pytest.approx(1e7 / (both * 8 * 16), rel=0.02)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plain:2x1: 2 GPUs for site\.stages x site\.shards = 4"):
        planned(GpuPlacement(device(), 2, 1), sections={"site": {"stages": 4, "batch_size": 8}})


def test_what_does_not_fit_is_said_with_what_to_change() -> None:
    small = GpuPlacement(device(memory=800_000), 4, 1)
    found = planned(small, methods=(), sections={"site": {"micro_batch_size": 8}})
    assert not found.fits
    text = as_text(found)
    assert "DOES NOT FIT" in text
    assert "--set site.micro_batch_size=" in text
    assert sentence(found).startswith("Memory: stage 0 needs")
    content = as_json(found)["memory"]
    assert content["fits"] is False
    assert content["advice"][0]["set"]


def test_the_bottleneck_is_named() -> None:
    deep = {
        "site": {"stages": 4, "batch_size": 4, "micro_batch_size": 1},
        "outer": {"steps": 10**6},
    }
    assert "Pipeline bubbles" in sentence(
        planned(GpuPlacement(device(peer_rate=1e18), 4, 1), methods=(), sections=deep, rate=1e12)
    )
    # The whole model in fp32 every 500 steps, on a link of 1 B/s.
    slow = {"outer": {"method": "diloco", "steps": 10**6}}
    found = planned(methods=(), sections=slow, rate=1e3)
    assert "The link between the sites" in sentence(found)
    assert shares(found).network > 0.5
    # No exchange to speak of, no pipeline, an optimizer for nothing.
    quick = GpuPlacement(device(memory_rate=1e18), 1, 1)
    fast = {"outer": {"method": "diloco", "steps": 10**6, "overlap": "naive"}}
    assert sentence(planned(quick, methods=(), sections=fast, rate=1e12)).startswith("Computation:")


def test_no_faster_link_is_recommended_where_round_trips_hold_the_run_up() -> None:
    far = [replace(link(1e12), rtt=5.0)] * 2
    config = run(outer={"method": "diloco", "inner_steps": 10, "steps": 10**6})
    found = plan_run(config, [GpuPlacement(device(), 4, 1)] * 2, far, 1e10, methods=())
    assert shares(found).network > 0.5
    assert "bit/s" not in sentence(found)
    assert "Round trips" in sentence(found)


@pytest.mark.parametrize("rate", [2e3, 1e5, 1e6])
def test_the_link_that_is_recommended_does(rate: float) -> None:
    """DiLoCo stands still while it exchanges, however long its rounds are."""
    blocking = {"outer": {"method": "diloco", "steps": 10**6}}
    quick = GpuPlacement(device(memory_rate=1e18), 1, 1)
    found = planned(quick, methods=(), sections=blocking, rate=rate)
    assert shares(found).network > 0.1
    told = re.search(r"about ([0-9.e+]+) ([kMG]?)bit/s", sentence(found))
    assert told is not None
    assert "e" not in told[1]
    wire = float(told[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[told[2]] / 8
    better = planned(quick, methods=(), sections=blocking, rate=0.95 * wire)
    assert shares(better).network == pytest.approx(0.05, abs=0.01)


WINDOW = {
    "control": {"adapt": "off"},
    "outer": {"inner_steps": 20, "slots": 20, "fragments": 1, "delay": 2, "steps": 10**5},
}
"""A payload has a tenth of a round on the link, from its boundary to its landing."""


def test_a_payload_has_no_more_of_the_link_than_its_window() -> None:
    quick = GpuPlacement(device(memory_rate=1e18), 1, 1)
    found = planned(quick, methods=(), sections=WINDOW, rate=5e7)
    assert shares(found).network > 0.1
    told = re.search(r"about ([0-9.]+) ([kMG])bit/s", sentence(found))
    assert told is not None
    wire = float(told[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[told[2]] / 8
    assert wire >= 1.25 * found.links[0].up
    assert as_json(found)["faster_link"] == {
        "bytes_per_second": pytest.approx(wire), "enough": True
    }  # fmt: skip
    better = planned(quick, methods=(), sections=WINDOW, rate=0.95 * wire)
    assert shares(better).network <= 0.051
    assert better.prediction.tokens_per_second > found.prediction.tokens_per_second


def test_no_link_is_named_as_enough_if_round_trips_fill_the_window() -> None:
    quick = GpuPlacement(device(memory_rate=1e18), 1, 1)
    wires = [replace(link(5e7), rtt=1e-4)] * 2
    found = plan_run(run(**WINDOW), [quick] * 2, wires, 1e10, methods=())
    assert "The link between the sites" in sentence(found)
    assert "not even a link of" in sentence(found)
    assert "would be enough, because round trips and other fixed costs" in sentence(found)
    assert found.faster_link is not None
    fast = [replace(link(0.95 * found.faster_link.rate), rtt=1e-4)] * 2
    assert shares(plan_run(run(**WINDOW), [quick] * 2, fast, 1e10, methods=())).network > 0.05


def traffic(place: GpuPlacement, fabric: float = 1e10, **site: Any) -> tuple[str, float]:
    """The last sentence of a plan, and the share of the traffic inside a site."""
    config = run(site={"batch_size": 64, "micro_batch_size": 1, **site}, outer={"steps": 10**6})
    found = plan_run(config, [place] * 2, [link(1e12)] * 2, fabric, methods=())
    text = sentence(found)
    assert text.startswith("Traffic inside the site: ")
    assert text.endswith(" would lower it.")
    return text, shares(found).traffic


def test_traffic_between_stages_is_lowered_by_fewer_stages_alone() -> None:
    slow = device(memory_rate=1e18, peer_rate=1e9)
    text, share = traffic(GpuPlacement(slow, 4, 1), stages=4)
    assert "activations between stages; fewer stages would" in text
    assert traffic(GpuPlacement(slow, 4, 1), stages=2)[1] < share
    nodes = GpuPlacement(device(memory_rate=1e18), 1, 4)
    text, share = traffic(nodes, 1e9, stages=4)
    assert "activations between stages; fewer stages or a faster --fabric would" in text
    assert traffic(nodes, 5e8, stages=4)[1] > share


def test_traffic_of_shards_is_lowered_where_it_arises() -> None:
    slow = device(memory_rate=1e18, peer_rate=1e8)
    for sync, key in (("micro-batch", "micro_batch_size"), ("step", "batch_size")):
        text, share = traffic(GpuPlacement(slow, 4, 1), shards=4, gradient_sync=sync)
        assert f"FSDP; fewer shards or a larger site.{key} would" in text
        larger = {"micro_batch_size": 2} if sync == "micro-batch" else {"batch_size": 128}
        assert traffic(GpuPlacement(slow, 4, 1), shards=4, gradient_sync=sync, **larger)[1] < share
        assert traffic(GpuPlacement(slow, 4, 1), shards=2, gradient_sync=sync)[1] < share


def test_traffic_of_replicas_is_named() -> None:
    slow = GpuPlacement(device(memory_rate=1e18, peer_rate=1e8), 4, 1)
    text, share = traffic(slow, replicas=4)
    assert "gradients between replicas; fewer replicas or a larger site.batch_size would" in text
    assert traffic(slow, replicas=4, batch_size=128)[1] < share
    assert traffic(slow, replicas=2)[1] < share


@pytest.mark.parametrize(("keep", "states"), [(0, 100), (3, 4)])
def test_the_record_has_states_and_the_start(keep: int, states: int) -> None:
    """States of every second of 200 rounds: all of them, or three and one that is written."""
    fixed = {"control": {"adapt": "off"}, "outer": {"inner_steps": 20, "steps": 4000}}
    record = {"states_every": 2, "states_keep": keep}
    plain = planned(methods=(), sections=fixed)
    found = planned(methods=(), sections={**fixed, "record": record})
    parameters = found.outline.parameters
    sizes = [as_json(each)["record"] for each in (plain, found)]
    payloads = sizes[0]["kept_bytes"] - 4 * parameters
    # The own payloads and those of the other site.
    assert payloads == pytest.approx(2 * 200 * plain.prediction.payload_bytes, rel=0.02)
    assert sizes[1]["kept_bytes"] - sizes[0]["kept_bytes"] == pytest.approx(
        32 * states * parameters
    )
    assert f"  record: {size(sizes[1]['kept_bytes'])} at each site" in as_text(found)
    more = sizes[1]["bytes_per_day"] - sizes[0]["bytes_per_day"]
    by_day = 86_400 / (2 * found.prediction.round_seconds) * 32 * parameters
    assert more == pytest.approx(0 if keep else by_day)


def test_advice_names_the_device_that_is_fullest_with_the_change() -> None:
    """A smaller micro-batch empties the GPU more than the processors, which keep more beside it."""
    site = {"site": {"micro_batch_size": 8}, "outer": {"steps": 10**6}}

    def needs(place: GpuPlacement) -> int:
        return planned(place, methods=(), sections=site, rate=1e12).needed

    gpu, cores = device(memory=10**12), device(memory=10**12, name="cores", shared=True)
    places = [
        GpuPlacement(replace(each, memory=int(needs(GpuPlacement(each, 1, 1)) / share)), 1, 1)
        for each, share in ((gpu, 1.1), (cores, 1.05))
    ]
    found = plan_run(run(**site), places, [link(1e12)] * 2, 1e10, methods=())
    assert found.fullest == places[0]
    change = found.advice[0]
    assert (change.device, change.available) == ("cores", places[1].device.memory)
    told = f"{change.needed / 2**30:.1f} of {change.available / 2**30:.1f} GiB of cores, fits"
    assert told in as_text(found)
    data = as_json(found)["memory"]["advice"][0]
    assert (data["device"], data["available_bytes"]) == ("cores", change.available)


def test_a_run_that_keeps_its_states_is_compared_with_all_methods() -> None:
    """Gradients cannot be kept like that; the comparison is about speed."""
    kept = {"record": {"states_every": 1}, "outer": {"steps": 10**6}}
    found = planned(methods=("allreduce", "cocktailsgd"), sections=kept)
    assert [row.prediction is not None for row in found.methods] == [True, True]


def test_memory_is_that_of_the_fullest_site_of_all() -> None:
    """A GPU that is hardly smaller than another site's processors, which hold all ranks at once."""
    config = run(site={"stages": 2, "batch_size": 8}, outer={"steps": 10**6})
    roomy = planned(
        GpuPlacement(device(memory=10**9), 2, 1), methods=(), sections={"site": {"stages": 2}}
    )
    enough = roomy.needed + 1
    gpus = GpuPlacement(device(memory=enough), 2, 1)
    processors = GpuPlacement(device(memory=enough + 1, shared=True), 1, 1)
    for places in ([gpus, processors], [processors, gpus]):
        found = plan_run(config, places, [link(1e12)] * 2, 1e10, methods=())
        assert not found.fits
        assert found.available == enough + 1


def test_host_memory_is_that_of_gpus_although_processors_are_fuller() -> None:
    """Processors have nothing in host memory, and are the fullest device of the run."""
    gpus = GpuPlacement(device(memory=10**12), 2, 1)
    processors = GpuPlacement(device(memory=10**7, shared=True), 1, 1)
    config = run(outer={"steps": 10**6})
    alone, *mixed = (
        plan_run(config, places, [link(1e12)] * 2, 1e10, methods=())
        for places in ([gpus, gpus], [gpus, processors], [processors, gpus])
    )
    assert alone.host is not None
    assert alone.host.needed > 0
    for found in mixed:
        assert found.fullest == processors
        assert found.host == alone.host


def test_precision_auto_is_what_each_site_multiplies_natively() -> None:
    """Older GPUs compute in fp32: slower, without casts, with wider activations."""
    older = GpuPlacement(device(multiplies_bf16=False), 4, 1)
    newer = GpuPlacement(device(), 4, 1)
    by_precision = {
        precision: planned(older, sections={"site": {"precision": precision}}, methods=())
        for precision in ("auto", "fp32", "bf16")
    }
    assert by_precision["auto"].needed == by_precision["fp32"].needed
    assert by_precision["auto"].step == by_precision["fp32"].step
    assert by_precision["auto"].limit == by_precision["fp32"].limit
    assert by_precision["auto"].step != by_precision["bf16"].step
    mixed = plan_run(
        run(site={"precision": "auto"}), [newer, older], [link(1e6)] * 2, 1e10, methods=()
    )
    assert mixed.slowest == 1
    assert mixed.step == by_precision["fp32"].step


def test_advice_is_for_the_site_with_fewest_gpus() -> None:
    config = run(site={"shards": 2, "batch_size": 8}, outer={"steps": 10**6})
    small, big = (
        GpuPlacement(device(memory=size), count, 1) for size, count in ((1, 8), (10**9, 2))
    )
    found = plan_run(config, [small, big], [link(1e12)] * 2, 1e10, methods=())
    assert not found.fits
    assert found.advice
    for change in found.advice:
        stages = change.values.get("site.stages", 1)
        assert stages * change.values.get("site.shards", 2) <= 2, change.values


def test_uneven_sites_are_named() -> None:
    places = [GpuPlacement(device(memory_rate=1e18), 1, 1),
              GpuPlacement(device(memory_rate=1e18, utilisation=0.25), 1, 1)]  # fmt: skip
    config = run(outer={"method": "diloco", "steps": 10**6, "overlap": "naive"})
    found = plan_run(config, places, [link(1e12)] * 2, 1e10, methods=())
    assert found.slowest == 1
    assert "Uneven sites: the others wait for paris" in sentence(found)


def test_stages_that_need_the_same_are_shown_once() -> None:
    found = planned(methods=(), sections={"site": {"stages": 4, "batch_size": 8}})
    runs = grouped(found.footprints)
    assert [(first, last) for first, last, _ in runs] == [(0, 0), (1, 2), (3, 3)]
    text = as_text(found)
    assert "stages 1-2" in text


def test_a_method_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> RunConfig:
        raise ConfigError("no such luck")

    monkeypatch.setattr(planning, "with_method", refuses)
    found = planned(methods=("dilocox", "diloco"))
    assert [row.problem for row in found.methods] == [None, "no such luck"]
    assert "diloco: cannot be used here (no such luck)" in as_text(found)
    assert as_json(found)["methods"][1] == {"method": "diloco", "problem": "no such luck"}


def test_the_two_site_example_can_be_planned() -> None:
    config = load_run(ROOT / "examples" / "two-sites.toml")
    place = TABLE.place("h100-80g:2")
    found = plan_run(config, [place] * 2, [TABLE.link("1gbit")] * 2, 12.5e9, methods=())
    assert found.fits
    assert found.prediction.share > 0.5


def test_the_budget_of_a_run_that_goes_on_is_of_the_steps_that_are_left(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    keys = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    CONFIG_MAPPING["llama"](**keys).save_pretrained(tmp_path)
    Handover(
        run="first", tick=1500, steps=1500, seed=0, sequence_length=16, data_digest="",
        momentum="", ledger={},
    ).write(tmp_path)  # fmt: skip
    model = {"architecture": None, "path": str(tmp_path)}
    whole = planned(sections={"model": model})
    rest = planned(sections={"model": {**model, "handover": True}})
    assert rest.budget.tokens == whole.budget.tokens * (4000 - 1500) / 4000
    assert rest.budget.seconds < whole.budget.seconds
    over = {"model": {**model, "handover": True}, "outer": {"steps": 1500}}
    with pytest.raises(ConfigError, match=r"has taken 1500 already; raise outer\.steps"):
        planned(sections=over)
