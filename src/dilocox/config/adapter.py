"""Section `[adapter]` of the run file: small trained matrices beside a frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from dilocox.config.base import Positive, Section

if TYPE_CHECKING:
    from dilocox.config.model import ModelSection


class AdapterSection(Section):
    """`[adapter]`: train adapters (LoRA) and leave the weights of `model.path` as they are.

    Without this section all parameters of the model are trained.
    """

    kind: Literal["lora"] = "lora"
    """Type of adapter. `lora`: two matrices A and B beside a linear layer, whose product is added
    to the layer's weight (arXiv 2106.09685)."""
    rank: Positive = 16
    """Rank of the matrices' product."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The product is multiplied by `alpha` / `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the adapters' inputs that each step sets to zero."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: `all-linear` for all of them but the head, or a list of
    the last parts of their names, such as `["q_proj", "v_proj"]`."""
    use_rslora: bool = False
    """Multiply by `alpha` / sqrt(`rank`) instead (arXiv 2312.03732)."""
    freeze_a: bool = False
    """Leave A at its first values and train B alone (FFA-LoRA, arXiv 2403.12313). A is not sent.
    The mean of the sites' products is then exactly the product of A and the mean of B."""
    base: Literal["full", "nf4"] = "full"
    """How the frozen weights are kept. `full`: in `site.precision`. `nf4`: those of linear layers
    in four bits, which is QLoRA (arXiv 2305.14314); needs the package bitsandbytes."""

    path: str | None = None
    """PEFT folder whose adapters training starts from: of another program, or `model/` of an
    earlier run. `rank`, `alpha`, `use_rslora` and `targets` must be those of the folder. Without
    it the adapters are new, and change nothing at first."""
    handover: str | None = None
    """Folder that `dilocox handover` wrote of an earlier run with the same adapters on the same
    base model. This run continues that run: it takes over adapters, outer momentum, token ranges
    and inner steps, as with `model.handover`. `model.path` names the base model, as always."""

    @field_validator("targets")
    @classmethod
    def _named(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, list):
            if not targets:
                raise ValueError('names no layer: give names, or "all-linear"')
            twice = sorted({name for name in targets if targets.count(name) > 1})
            if twice:
                raise ValueError(f"names {twice[0]} twice: remove one")
        return targets

    @property
    def stored(self) -> str | None:
        """Folder that holds the first adapters; None if `run.seed` draws them."""
        return self.path if self.handover is None else self.handover

    @property
    def scaling(self) -> float:
        """Factor of the product of the two matrices."""
        return float(self.alpha / (self.rank**0.5 if self.use_rslora else self.rank))


def adapter_packages(adapter: AdapterSection | None) -> tuple[str, ...]:
    """Return the packages that compute adapters. Their versions must be equal at all sites."""
    if adapter is None:
        return ()
    return ("peft", "bitsandbytes") if adapter.base == "nf4" else ("peft",)


def compile_setting(adapter: AdapterSection | None, model: ModelSection) -> bool | Literal["auto"]:
    """Return `model.compile`. Layers in NF4 are not compiled, so `auto` is false for them."""
    automatic = model.compile == "auto"
    return False if automatic and adapter and adapter.base == "nf4" else model.compile


def adapter_problem(adapter: AdapterSection | None, model: ModelSection) -> str | None:
    """Returns why `[adapter]` does not fit `[model]`; None if it does, or if there is none."""
    if adapter is None:
        return None
    if model.path is None or not model.pretrained:
        return (
            "[adapter] leaves the model's weights as they are, so these cannot be fresh: set "
            "model.path to a trained model, with model.pretrained = true, or remove [adapter]"
        )
    if model.handover:
        return (
            "[adapter]: cannot be used with model.handover, which is for runs that train all "
            "parameters: name the handover's folder in adapter.handover and the base model in "
            "model.path, and set model.handover = false"
        )
    if adapter.path is not None and adapter.handover is not None:
        return (
            "adapter.path and adapter.handover both name the first adapters: keep handover to go "
            "on with a run, or path to start a new run from its adapters"
        )
    if adapter.path is not None and adapter.freeze_a:
        return (
            "adapter.freeze_a: leaves A at the values of run.seed, and adapter.path has others: "
            "set freeze_a = false, or leave path out"
        )
    if adapter.base == "nf4" and model.compile is True:
        return (
            'adapter.base = "nf4": layers in four bits are not compiled: set model.compile = '
            'false, or adapter.base = "full"'
        )
    return None
