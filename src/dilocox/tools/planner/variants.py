"""The same run with something changed: another number of sites, another method, another key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.tools.planner.hardware_table import Device

KEPT_OUTER = ("rounds", "steps", "device", "min_sites")
"""Keys of `[outer]` that have nothing to do with the method."""


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with keys such as `site.stages` set, or taken out where the value is None.

    Raises `ConfigError` if that cannot be.
    """
    raw = config.model_dump(mode="json", exclude_none=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        if value is None:
            raw[section].pop(name, None)
        else:
            raw[section][name] = value
    return resolve_run(raw, where="the changed run")


def at_site(config: RunConfig, name: str) -> RunConfig:
    """The run with the batch of one of its sites as that of `[site]`."""
    batch = config.site_batch(name)
    site = config.site.model_copy(update={"batch_size": batch})
    return config.model_copy(update={"site": site})


def on_device(config: RunConfig, device: Device) -> RunConfig:
    """The run with what `auto` of `site.precision` and `site.device` is on `device`."""
    found: dict[str, str] = {}
    if config.site.precision == "auto":
        found["precision"] = "bf16" if device.multiplies_bf16 else "fp32"
    if config.site.device == "auto":
        found["device"] = "cpu" if device.shared else "cuda"
    if not found:
        return config
    return config.model_copy(update={"site": config.site.model_copy(update=found)})


def with_method(config: RunConfig, method: str, hidden_size: int) -> RunConfig:
    """The run with another method and that method's own settings; its length stays.

    `allreduce` sends what a ring would (`outer.exchange = "reduce"`), `dilocox-paper` has its rank
    at a quarter of `hidden_size`, as the paper's 2,048 is of 8,192. The run file's own method is
    left as it is. Raises `ConfigError` if the method cannot be used with this run.
    """
    if method == config.outer.method:
        return config
    raw = config.model_dump(mode="json", exclude_none=True)
    outer = {key: raw["outer"][key] for key in KEPT_OUTER if key in raw["outer"]}
    if "rounds" in outer:
        outer["steps"] = outer.pop("rounds") * config.outer.inner_steps
    raw["outer"] = {**outer, "method": method}
    raw["compression"] = {}
    raw["control"] = {
        key: raw["control"][key]
        for key in ("link", "latency", "step_seconds", "utilisation", "work")
        if key in raw["control"]
    }
    # Methods that exchange gradients refuse it; of the speed it says next to nothing.
    raw["record"]["states_every"] = 0
    if method == "allreduce":
        raw["outer"]["exchange"] = "reduce"
    if str(METHODS[method]["compression"]["codec"]).startswith("lowrank"):
        raw["compression"]["codec"] = f"lowrank:{max(1, hidden_size // 4)}"
    return resolve_run(raw, where=f"the planned run with method {method}")
