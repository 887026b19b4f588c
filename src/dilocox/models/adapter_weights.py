"""First values of adapters: A is drawn from the run's seed, B is zero.

So the model computes the same as its base when training begins. The values do not depend on how
the model is cut into stages and shards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ModelError
from dilocox.models.adapter import adapter_shapes, is_adapter
from dilocox.models.weight_source import WeightSource, read_rows, seeded

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class AdapterWeights:
    """A `RowSource` of a model with adapters: stored weights, and adapters from a seed.

    Args:
        hf_config: configuration of the model.
        adapter: section `[adapter]` of the run file.
        seed: the run's seed.
        base: source of the frozen weights; None if only the adapters are wanted.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        adapter: AdapterSection,
        seed: int,
        base: WeightSource | None,
    ) -> None:
        self.shapes = adapter_shapes(hf_config, adapter)
        """Whole shapes of the adapters' tensors by full name, in model order."""
        self._seed, self._base = seed, base

    def tensor(self, full_name: str) -> torch.Tensor:
        """See `WeightSource`. Raises `ModelError` if the model has no such tensor."""
        if full_name in self.shapes:
            return first_values(full_name, self.shapes[full_name], self._seed)
        if self._base is None or is_adapter(full_name):
            raise ModelError(f"{full_name}: the model has no such adapter")
        return self._base.tensor(full_name)

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """See `RowSource`. Raises the errors of `tensor`."""
        if self._base is None or full_name in self.shapes:
            return self.tensor(full_name)[rows.start : rows.stop]
        return read_rows(self._base, full_name, rows)


def first_values(full_name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the first values of an adapter's tensor, fp32, as PEFT initialises it.

    A has the uniform distribution of a linear layer's weight, and B is zero.
    """
    value = torch.zeros(shape)
    if ".lora_A." in full_name:
        with seeded(seed, full_name):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value
