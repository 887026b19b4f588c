"""Compilation of layers, and a check whether `torch.compile` really compiled them.

`torch.compile` falls back to eager execution silently. Dynamo's counters after the first step show
whether it did.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

import torch
from torch import nn

from dilocox.config.site import ZERO_BUBBLE, SiteSection
from dilocox.errors import ConfigError

Compile = bool | Literal["auto"]
"""`model.compile` of the run file."""


def compiles(setting: Compile, site: SiteSection, device: torch.device) -> bool:
    """Return True if a rank on `device` compiles its layers.

    `auto` compiles on a GPU, unless the schedule splits the backward pass: compiled layers cannot
    be split.
    """
    if setting == "auto":
        return device.type == "cuda" and site.schedule not in ZERO_BUBBLE
    return setting


class Compilation:
    """Compiles layers, and reports once whether `torch.compile` worked.

    With `required`, an error of the compiler ends the run. Otherwise the layer runs eagerly.
    """

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._before = _counts()
        self._told = False
        self._layers = 0
        self._errors = _Errors()
        _DYNAMO_LOG.addHandler(self._errors)
        if not required:
            # This setting holds for the whole process, in which one rank trains one model.
            torch._dynamo.config.suppress_errors = True

    def compile(self, layer: nn.Module) -> None:
        """Compile `layer` in place; the compiler runs at its first forward pass."""
        layer.compile()
        self._layers += 1

    def problem(self) -> str | None:
        """Return the reason why layers run eagerly; None if all are compiled.

        Call this after the first step. Later calls return None. If compilation is required, this
        raises `ConfigError` instead of returning a reason.
        """
        if self._told or self._layers == 0:
            return None
        self._told = True
        _DYNAMO_LOG.removeHandler(self._errors)
        counts = _counts()
        if self._before["frames ok"] and counts["frames total"] == self._before["frames total"]:
            return None  # cached code ran: an equal model was compiled in this process before
        reason = fallback(counts - self._before, self._errors.first)
        if reason is None:
            return None
        if self._required:
            raise ConfigError(
                f'model.compile: {reason}; set it to "auto" or false to train without compilation'
            )
        return f'model.compile "auto": {reason}; such layers run without being compiled'


def fallback(counts: Counter[str], error: str | None) -> str | None:
    """Return the reason, by Dynamo's counters, why layers were not compiled. May be None.

    `counts`: see `_counts`. `error`: the first error that Dynamo suppressed.
    """
    because = [error] if error else []
    because += [key.partition("/")[2] for key in counts if key.startswith("graph break/")]
    reason = f" ({because[0]})" if because else ""
    for key in counts:
        if "recompile limit" in key:
            return "torch.compile reached its limit of recompilations (torch._dynamo.config)"
    if counts["frames ok"] == 0:
        return f"torch.compile compiled no layer{reason}"
    if counts["frames ok"] < counts["frames total"] and error:
        return f"torch.compile did not compile all of the layers{reason}"
    return None


def _counts() -> Counter[str]:
    """Return Dynamo's counters: frames tried, frames compiled, and graph breaks by reason."""
    counters = torch._dynamo.utils.counters
    found = Counter({f"frames {key}": counters["frames"][key] for key in ("ok", "total")})
    for kind in ("graph_break", "unimplemented"):
        for text, count in counters[kind].items():
            found[f"graph break/{_line(str(text))}"] += count
    return found


_DYNAMO_LOG = logging.getLogger("torch._dynamo.convert_frame")


class _Errors(logging.Handler):
    """Keeps the first exception that Dynamo suppresses."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self.first is None:
            self.first = _line(f"{type(error).__name__}: {error}", lines=2)


def _line(text: str, lines: int = 1) -> str:
    """Join the first non-empty lines of `text` into one line of at most 160 characters."""
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(found[:lines])[:160]
