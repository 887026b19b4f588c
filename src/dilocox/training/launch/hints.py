"""Advice on settings that work and suit this machine badly. No start is refused for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.inner.device import cpu_multiplies_bf16
from dilocox.models.start_adapters import named_base
from dilocox.training.launch.cuda_driver import ranks_use_gpu
from dilocox.transport.link.tcp import congestion_hint


def hints(config: RunConfig, alone: bool) -> Iterator[str]:
    """Yield lines of advice on a run whose ranks train on this machine.

    `alone`: the machine holds one site of several, and exchanges over a network.
    """
    advice = congestion_hint(len(config.sites), config.network.congestion) if alone else None
    if advice is not None:
        yield advice
    yield from _first_adapters(config)
    if config.site.precision == "bf16" and not ranks_use_gpu(config) and not cpu_multiplies_bf16():
        yield (
            'site.precision = "bf16": this machine\'s processor has no instructions for bf16 '
            "(AVX-512 BF16, AMX or Arm's BF16), so steps may take many times as long as in fp32; "
            'leave site.precision at "auto", which takes fp32 here'
        )


def _first_adapters(config: RunConfig) -> Iterator[str]:
    """Yield lines about the adapters in `adapter.path`: they may be of another model or template.

    One model has many names, so that this is no error. Shapes are compared elsewhere.
    """
    if config.adapter is None or config.adapter.path is None:
        return
    path, ours = config.adapter.path, str(config.model.path)
    theirs = named_base(path)
    if theirs is not None and Path(theirs).name != Path(ours).name:
        yield (
            f"adapter.path {path}: names {theirs} as its base model, and model.path is {ours}; "
            "make sure that they are the same model"
        )
    data = config.data
    if data.format == "text" or data.chat_template is not None:
        return
    wanted, place = _template(Path(path).expanduser()), Path(data.tokenizer).expanduser()
    if wanted is not None and place.is_dir() and _template(place) != wanted:
        yield (
            f"adapter.path {path}: has another chat template than data.tokenizer {data.tokenizer}; "
            f'to write conversations as these adapters know them, set data.tokenizer = "{path}"'
        )


def _template(folder: Path) -> str | None:
    """Return the chat template in a tokenizer's folder, None if there is none that can be read."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = found.get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None
