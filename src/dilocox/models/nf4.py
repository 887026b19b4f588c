"""Linear layers whose frozen weights are kept in four bits: NF4 with double quantisation.

This is the base of QLoRA (arXiv 2305.14314, section 3). Each block of 64 weights has a scale of
eight bits, and each block of 256 scales has an fp32 scale of its own. The package bitsandbytes
quantises and dequantises, on CPUs and on GPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.errors import ConfigError, ModelError
from dilocox.models.architecture import one_line

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
"""Weights that share a scale."""
SCALES = 256
"""Scales that share a scale."""


def nf4_bytes(values: int) -> int:
    """Return the bytes of `values` weights in NF4 with their scales: about 0.516 each."""
    scales = -(-values // BLOCK)
    return scales * BLOCK // 2 + scales + 4 * -(-scales // SCALES)


def check_bitsandbytes() -> None:
    """Raise `ConfigError` if the package bitsandbytes is missing, or does not work here."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            'adapter.base = "nf4": needs the package bitsandbytes, which is not installed here; '
            "run: pip install 'dilocox[nf4]', or set "
            'adapter.base = "full"'
        )
    try:
        packed, scales = quantised(torch.linspace(-1.0, 1.0, BLOCK))
        dequantised(packed, scales, (1, BLOCK))
    except Exception as error:  # a missing kernel is an error of any kind
        raise ConfigError(
            f'adapter.base = "nf4": the package bitsandbytes does not work here '
            f'({one_line(error)}); install another release, or set adapter.base = "full"'
        ) from None


def quantised(weight: Tensor) -> tuple[Tensor, Any]:
    """Return a weight in NF4: packed values, uint8, and bitsandbytes' scales.

    Blocks follow one another as in the flattened weight; zeros fill the last one. Each block is a
    row here, since the package's kernel for AVX-512 (0.50.2) takes the scales of wrong blocks if
    rows are no multiple of them.
    """
    flat = weight.reshape(-1)
    rows = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    found: tuple[Tensor, Any] = _library().quantize_4bit(
        rows, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return found


def dequantised(packed: Tensor, scales: Any, shape: tuple[int, int]) -> Tensor:
    """Return the weight of `quantised`, rounded to NF4's values, in its `shape` and dtype."""
    rows: Tensor = _library().dequantize_4bit(packed, scales)
    return rows.view(-1)[: shape[0] * shape[1]].view(shape)


def linear_layers(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers inside one of the model's layers, with their paths.

    Linear layers of adapters are left out.
    """
    return [
        (path, module)
        for path, module in layer.named_modules()
        if type(module) is nn.Linear and not {"lora_A", "lora_B"} & set(path.split("."))
    ]


def pack_layers(layer: nn.Module) -> None:
    """Replace the linear layers inside one of the model's layers by `Nf4Linear`, in place."""
    for path, module in linear_layers(layer):
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, Nf4Linear(module))


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is kept in NF4.

    The weight is dequantised in every forward and in every backward pass, and is not kept between
    them. `fill` sets it.

    Args:
        linear: the layer that this one replaces. Its weight's values are not used.
    """

    packed: Tensor
    """NF4 values, uint8 [bytes, 1]. A buffer: it is neither trained, cast nor sharded."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """Data type of the dequantised weight."""
        self.bias = linear.bias
        size = -(-linear.weight.numel() // BLOCK) * BLOCK // 2
        packed = torch.empty(size, 1, dtype=torch.uint8, device=linear.weight.device)
        self.register_buffer("packed", packed)
        self._scales: Any = None
        self._blank = False

    def fill(self, weight: Tensor) -> None:
        """Quantise `weight` [outputs, inputs] and keep it, on the device of the layer."""
        moved = weight.to(self.packed.device, self.dtype)
        packed, self._scales = quantised(moved)
        self.packed.copy_(packed)

    def leave_blank(self) -> None:
        """Compute with an empty weight from now on: for tensors without memory."""
        self._blank = True

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [outputs, inputs]. Raises `ModelError` before `fill`."""
        shape = (self.out_features, self.in_features)
        if self._blank:
            return torch.empty(shape, dtype=dtype, device=self.packed.device)
        if self._scales is None:
            raise ModelError("a layer in NF4 has no weight yet: load the model's weights first")
        return dequantised(self.packed, self._scales, shape).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [..., inputs] times the weight, plus the bias: [..., outputs]."""
        found: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias.to(found.dtype)


class _Product(torch.autograd.Function):
    """A product with a frozen weight, which is dequantised again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight(gradient.dtype), None


def ignore_optional_kernels() -> None:
    """Keep bitsandbytes from logging that it lacks a kernel that is not used here.

    peft imports bitsandbytes wherever it is installed, so this is for all adapters.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _library() -> Any:
    """Return bitsandbytes' functions."""
    ignore_optional_kernels()
    return importlib.import_module("bitsandbytes.functional")
