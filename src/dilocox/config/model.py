"""Section `[model]` of the run file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dilocox.config.base import Section


class ModelSection(Section):
    """`[model]`: a Hugging Face causal language model, by folder, by hub name, or inline."""

    path: str | None = None
    """A local folder, or the name of a model on the Hugging Face hub."""
    revision: str | None = None
    pretrained: bool = True
    """With `path`. `true`: start from the model's weights. `false`: use only its configuration."""
    handover: bool = False
    """`true`: `path` is a folder that `dilocox handover` wrote, and this run continues the run that
    the folder comes from. It takes over that run's outer momentum, token ranges and inner steps;
    these inner steps count towards this run's length. Sites, stages and shards may differ."""
    architecture: dict[str, Any] | None = None
    """Inline architecture: `model_type` and the keys of that type's configuration."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    activation_checkpointing: bool | Literal["selective"] = False
    """Activations that the backward pass recomputes. `false`: none. `true`: all of a layer but its
    input. `selective`: all of a layer but its attention and every second matrix product."""
    compile: bool | Literal["auto"] = "auto"
    """Compile every layer with `torch.compile`. `auto`: compile on GPUs, unless the schedule is a
    zero-bubble one; a layer that cannot be compiled runs uncompiled, with a warning. `true`: such a
    layer is an error; a zero-bubble schedule is refused."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("give exactly one of path and architecture")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError('architecture needs model_type, for example "qwen3"')
        if self.handover and (self.path is None or not self.pretrained):
            raise ValueError("handover needs path, and pretrained = true")
        return self
