"""Simulates how a run scales to 2 to 64 sites, with the planner's cost model.

The run has a 7B model, eight H100 per site, and 1 Gbit/s to each site. Sites are added in two ways:
`weak` gives each site the same batch, `strong` divides one batch of 1,024 sequences. Payloads go to
all sites (`gather`) or are averaged in parts (`reduce`). The outer state is in host memory, except
in `state on GPUs`. In `uneven` every second site has GPUs of half the speed and a quarter of the
link, and sites take steps by their speed, as dilocox does. In `uneven, equal steps` all sites take
the same number of steps.

The real controller makes the plans, round by round, from the measurements of the simulated sites.
`efficiency` is tokens/s over the sum of the sites' speeds alone. `loss` is the controller's
prediction over synchronous training. Nothing is measured. It takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import common
from benchmarks.scaling import plot as scaling_plot
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.controller.loss_model import loss_of, part_of
from dilocox.tools.planner.hardware_table import GpuPlacement, HardwareTable, Link
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.predict import predict
from dilocox.tools.planner.step_time import step_time

RESULTS = common.RESULTS / "scaling.json"
COUNTS = (2, 4, 8, 16, 32, 64)
QUICK_COUNTS = (2, 8, 64)
BATCH, WHOLE = 128, 1024
"""Sequences per step: of a site, and of all sites together in a strong scenario."""


@dataclass(frozen=True)
class Scenario:
    """A way of adding sites."""

    name: str
    strong: bool = False
    exchange: str = "gather"
    uneven: bool = False
    steps: str = "by-speed"
    device: str = "cpu"
    """Device of anchors, momentum and residuals."""


SCENARIOS = (
    Scenario("weak, gather"),
    Scenario("weak, reduce", exchange="reduce"),
    Scenario("weak, state on GPUs", device="model"),
    Scenario("strong, gather", strong=True),
    Scenario("strong, reduce", strong=True, exchange="reduce"),
    Scenario("uneven, gather", uneven=True),
    Scenario("uneven, equal steps", uneven=True, steps="equal"),
)


def run_of(scenario: Scenario, sites: int) -> RunConfig:
    """Return the run file: a 7B model (the shape of Qwen2.5-7B), one stage of eight shards per
    site."""
    batch = WHOLE // sites if scenario.strong else BATCH
    names = [f"site-{number + 1}" for number in range(sites)]
    return resolve_run(
        {
            "run": {"name": "scaling"},
            "model": {
                "activation_checkpointing": True,
                "architecture": {
                    "model_type": "qwen2",
                    "hidden_size": 3584,
                    "intermediate_size": 18944,
                    "num_hidden_layers": 28,
                    "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "vocab_size": 152064,
                    "tie_word_embeddings": False,
                },
            },
            "data": {"sequence_length": 4096, "tokenizer": "Qwen/Qwen2.5-7B"},
            "site": {"shards": 8, "batch_size": batch, "micro_batch_size": 1},
            "outer": {"steps": 20000, "exchange": scenario.exchange, "device": scenario.device},
            "control": {"steps": scenario.steps},
            "sites": {name: {} for name in names},
        }
    )


def row(scenario: Scenario, sites: int, outline: ModelOutline, table: HardwareTable) -> common.Row:
    """Simulate one scenario with `sites` sites, and return its row."""
    config = run_of(scenario, sites)
    fast = table.place("h100-80g:8")
    slow = GpuPlacement(replace(fast.device, utilisation=fast.device.utilisation / 2), 8, 1)
    wide = table.link("1gbit", rtt=0.03)
    narrow = Link(wide.up / 4, wide.down / 4, wide.rtt)
    odd = [scenario.uneven and number % 2 == 1 for number in range(sites)]
    places = [slow if other else fast for other in odd]
    links = [narrow if other else wide for other in odd]
    fabric = table.fabric(None)
    found = predict(config, places, links, list(config.sites), fabric=fabric, outline=outline)
    alone = 0.0
    for name, place in zip(config.sites, places, strict=True):
        batch = config.site_batch(name)
        seconds = step_time(config, outline, place, fabric).seconds * batch / config.site.batch_size
        alone += batch * config.data.sequence_length / seconds
    choice = found.choice
    return {
        "scenario": scenario.name,
        "sites": sites,
        "tokens_per_second": found.tokens_per_second,
        "efficiency": found.tokens_per_second / alone,
        "share_of_no_network": found.share,
        "inner_steps": choice.inner_steps,
        "delay_share": choice.delay / choice.slots,
        "codec": choice.codec,
        "loss": loss_of(
            choice.inner_steps,
            choice.codec,
            choice.delay / choice.slots,
            config.total_steps,
            part_of(config),
        ),
        "payload_gb": found.payload_bytes / 1e9,
        "round_seconds": found.round_seconds,
        "link_share": found.exchange_seconds / found.round_seconds,
        "work_share": found.work_seconds / found.round_seconds,
        "waited_share": found.waited_share,
        "step_seconds": found.step_seconds,
    }


def rows(counts: Sequence[int]) -> list[common.Row]:
    """Return the rows of all scenarios. `counts`: numbers of sites."""
    table = HardwareTable.load()
    outline = ModelOutline.of(run_of(SCENARIOS[0], 2))
    found = []
    for scenario in SCENARIOS:
        common.say(scenario.name)
        found += [row(scenario, sites, outline, table) for sites in counts]
    return found


HEAD = """\
| sites | tokens/s | efficiency | H | codec | predicted loss | payload per round | link busy | \
standing still |
|---|---|---|---|---|---|---|---|---|
"""
_MARKED = re.compile(r"(<!-- scaling: begin ([\w, ]+) -->\n).*?(<!-- scaling: end -->)", re.DOTALL)


def filled(text: str, known: Sequence[common.Row]) -> str:
    """Return the document `text` with the tables of the rows `known` between its marks."""

    def section(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        lines = [
            f"| {one['sites']} | {one['tokens_per_second']:,.0f} | {one['efficiency']:.0%} "
            f"| {one['inner_steps']} | {one['codec']} | {one['loss']:+.1%} "
            f"| {one['payload_gb']:.3g} GB | {one['link_share']:.0%} | {one['work_share']:.1%} |\n"
            for one in known
            if one["scenario"] == name
        ]
        return begin + HEAD + "".join(lines) + end

    return _MARKED.sub(section, text)


def main() -> int:
    """Simulate, print, write."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--docs", action="store_true", help="also fill docs/scaling.md")
    options = parser.parse_args()
    if options.docs and options.quick:
        parser.error("--docs: needs all numbers of sites; leave --quick out")
    found = rows(QUICK_COUNTS if options.quick else COUNTS)
    percent: Callable[[Any], str] = lambda value: f"{value:.1%}"  # noqa: E731
    print(common.table(found, {
        "scenario": "s", "sites": "d", "tokens_per_second": ",.0f", "efficiency": percent,
        "share_of_no_network": percent, "inner_steps": "d", "delay_share": ".2f", "codec": "s",
        "loss": "+.3f", "payload_gb": ".3g", "round_seconds": ".3g", "link_share": percent,
        "work_share": percent, "waited_share": percent, "step_seconds": ".3g",
    }))  # fmt: skip
    if options.json or options.docs:
        common.write_json(
            options.json or RESULTS, "scaling", common.machine(),
            {"batch_per_site": BATCH, "batch_shared": WHOLE, "link": "1gbit", "rtt_ms": 30}, found,
        )  # fmt: skip
    if options.docs:
        page = common.ROOT / "docs" / "scaling.md"
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        picture = scaling_plot.picture(found)
        (common.ROOT / "docs" / "scaling.svg").write_text(picture, encoding="utf-8")
    return 0
