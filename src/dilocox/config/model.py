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
    own: bool = False
    """`true`: the model of [loops of your own](own-loop.md#a-model-of-your-own). Its tensors are
    those of the sites' programs, and its first weights those of the site that begins the run."""
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
        if (self.path, self.architecture, self.own or None).count(None) != 2:
            raise ValueError("give exactly one of path and architecture, or own = true")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError('architecture needs model_type, for example "qwen3"')
        if self.handover and (self.path is None or not self.pretrained):
            raise ValueError("handover needs path, and pretrained = true")
        return self


def own_model_problem(
    model: ModelSection, adapts: bool, ranks: int, tasks: bool, checkpoints: bool
) -> str | None:
    """Return why a run cannot have a model of loops of the users' own; None if it can.

    Args:
        model: the section.
        adapts: whether plans adapt, which needs the model's shapes at the coordinator.
        ranks: ranks of a site.
        tasks: whether anchors are evaluated on tasks.
        checkpoints: whether checkpoints are written as Hugging Face folders.
    """
    if not model.own:
        return None
    if adapts:
        return (
            "model.own: plans cannot adapt, since the coordinator does not know the model: set "
            'control.adapt to "off"'
        )
    if ranks > 1:
        return "model.own: a loop of your own is one rank: set site.stages and site.shards to 1"
    if tasks or checkpoints:
        key = "evaluation.tasks" if tasks else "checkpoint.hugging_face"
        return f"model.own: {key} needs a Hugging Face model: leave the key out"
    return None
