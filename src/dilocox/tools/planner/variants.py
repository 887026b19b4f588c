"""Variants of a run: with changed keys, another method, or the settings of one site or device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.tools.planner.hardware_table import Device

KEPT_OUTER = ("rounds", "steps", "device", "min_sites")
"""Keys of `[outer]` that do not depend on the method."""


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return `config` with keys such as `site.stages` set; a value of None removes the key.

    Raises `ConfigError` if the changed run is not valid.
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
    """Return the run with the batch size of site `name` as `site.batch_size`."""
    batch = config.site_batch(name)
    site = config.site.model_copy(update={"batch_size": batch})
    return config.model_copy(update={"site": site})


def on_device(config: RunConfig, device: Device) -> RunConfig:
    """Return the run with `auto` in `site.precision` and `site.device` resolved for `device`."""
    found: dict[str, str] = {}
    if config.site.precision == "auto":
        found["precision"] = "bf16" if device.multiplies_bf16 else "fp32"
    if config.site.device == "auto":
        found["device"] = "cpu" if device.shared else "cuda"
    if not found:
        return config
    return config.model_copy(update={"site": config.site.model_copy(update=found)})


def with_method(config: RunConfig, method: str, hidden_size: int) -> RunConfig:
    """Return the run with another method, that method's own settings, and the same length.

    The run file's own method returns `config` unchanged. `allreduce` sends as many bytes as a ring
    (`outer.exchange = "reduce"`). `dilocox-paper` gets a rank of a quarter of `hidden_size`, as in
    the paper (2,048 of 8,192). Raises `ConfigError` if the run cannot use the method.
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
    # Methods that exchange gradients refuse this key, and it hardly changes the speed.
    raw["record"]["states_every"] = 0
    if method == "allreduce":
        raw["outer"]["exchange"] = "reduce"
    if str(METHODS[method].compression["codec"]).startswith("lowrank"):
        raw["compression"]["codec"] = f"lowrank:{max(1, hidden_size // 4)}"
    return resolve_run(raw, where=f"the planned run with method {method}")
