"""The determinism class of a rank: all facts, besides the input, that decide inner steps' bits."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from dilocox.config.adapter import adapter_packages, compile_setting
from dilocox.config.run_config import RunConfig
from dilocox.inner import determinism_facts, resolve_precision
from dilocox.record.writer.notary import code_digest


def facts_here(
    config: RunConfig, device: torch.device, whole_gradients: bool = False
) -> dict[str, Any]:
    """Return the determinism class of this process: machine, libraries, settings, dilocox's code.

    `whole_gradients`: see `SiteModel`. The class only names it if it is True, since records of
    earlier versions do not have it.
    """
    precision = resolve_precision(config.site, device)
    compiled = compile_setting(config.adapter, config.model)
    model = config.model.model_copy(update={"compile": compiled})
    facts = determinism_facts(config.site, model, device, precision)
    if whole_gradients:
        facts["layout"]["gradient_sync"] = "step"
    for name in adapter_packages(config.adapter):
        facts["packages"][name] = importlib.metadata.version(name)
    if config.adapter is not None and config.adapter.base != "full":
        facts["base"] = config.adapter.base
    return {**facts, "code": code_digest()}
