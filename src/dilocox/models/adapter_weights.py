"""First values of adapters: A is drawn from the run's seed, B is zero.

So the model computes the same as its base when training begins. A run that starts from adapters, or
continues an earlier run, takes the trained tensors from a folder instead. The values do not depend
on how the model is cut into stages and shards. With `adapter.freeze_a`, A keeps these values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ModelError
from dilocox.models.adapter import adapter_shapes, is_adapter, is_trained
from dilocox.models.architecture import one_line
from dilocox.models.weight_source import WeightSource, read_rows, seeded
from dilocox.utils.adapter_files import ADAPTER_FILE

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class AdapterWeights:
    """A `RowSource` of a model with adapters: stored weights, and adapters from a seed.

    Args:
        hf_config: configuration of the model.
        adapter: section `[adapter]` of the run file.
        seed: the run's seed.
        base: source of the frozen weights; None if only the adapters are wanted.
        stored: PEFT folder that holds the trained tensors; None: they are drawn from the seed.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        adapter: AdapterSection,
        seed: int,
        base: WeightSource | None,
        stored: Path | None = None,
    ) -> None:
        self._all = adapter_shapes(hf_config, adapter)
        self.shapes = {n: s for n, s in self._all.items() if is_trained(n, adapter)}
        """Whole shapes of the trained tensors by full name, in model order."""
        self._seed, self._base, self._stored = seed, base, stored

    def tensor(self, full_name: str) -> torch.Tensor:
        """See `WeightSource`.

        Raises `ModelError` if the model has no such tensor, or if the folder has it not, or in
        another shape.
        """
        if full_name in self.shapes and self._stored is not None:
            return stored_values(self._stored, full_name, self.shapes[full_name])
        if full_name in self._all:
            first = first_values if full_name in self.shapes else fixed_values
            return first(full_name, self._all[full_name], self._seed)
        if self._base is None or is_adapter(full_name):
            raise ModelError(f"{full_name}: the model has no such adapter")
        return self._base.tensor(full_name)

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """See `RowSource`. Raises the errors of `tensor`."""
        if self._base is None or full_name in self._all:
            return self.tensor(full_name)[rows.start : rows.stop]
        return read_rows(self._base, full_name, rows)


def first_values(full_name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the first values of a trained tensor of an adapter, fp32, as PEFT initialises it.

    A has the uniform distribution of a linear layer's weight, and B is zero.
    """
    value = torch.zeros(shape)
    if ".lora_A." in full_name:
        with seeded(seed, full_name):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def stored_values(folder: Path, full_name: str, shape: torch.Size) -> torch.Tensor:
    """Return an adapter's tensor from a PEFT folder, converted to fp32.

    Raises `ModelError` if it cannot be read or has another shape.
    """
    path = folder.expanduser() / ADAPTER_FILE
    try:
        with safe_open(path, framework="pt") as file:
            found: torch.Tensor = file.get_tensor(full_name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: {full_name} cannot be read ({one_line(error)}); copy the folder again"
        ) from None
    if found.shape != shape or not found.is_floating_point():
        raise ModelError(
            f"{path}: {full_name} is {str(found.dtype).split('.')[1]} {list(found.shape)}, and "
            f"this run's has floating-point values {list(shape)}; name a folder with these adapters"
        )
    return found.float()


def fixed_values(full_name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the values of an A that is not trained, fp32 [rank, inputs].

    The values have the distribution of `first_values`. But these values have the same bits on every
    processor, since every product is rounded before anything is added to it. So a reader of the
    record finds the bits that all sites had.
    """
    with seeded(seed, full_name):
        uniform = torch.rand(shape)
    # Kaiming's bound for a = sqrt(5) is 1 / sqrt(inputs). The first line is exact.
    centred = uniform * 2.0 - 1.0
    return centred * float(shape[1] ** -0.5)


def with_fixed(
    trained: Mapping[str, torch.Tensor],
    hf_config: PretrainedConfig,
    adapter: AdapterSection,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return adapters by full name, with every A beside them that is not trained.

    `trained`: the trained tensors of some layers.
    """
    if not adapter.freeze_a:
        return dict(trained)
    source = AdapterWeights(hf_config, adapter, seed, None)
    fixed = (fixed_beside(name) for name in trained)
    return {**trained, **{name: source.tensor(name) for name in fixed}}


def fixed_beside(full_name: str) -> str:
    """Return the full name of the A that belongs to a B."""
    return full_name.replace(".lora_B.", ".lora_A.")
