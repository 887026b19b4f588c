"""Tiny language model of the attacks benchmark: one batched computation for all sites' copies.

It is a decoder of two layers on bytes. The first dimension of every parameter is the site, so that
one matrix product serves all sites. The sites' computations do not mix.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, LENGTH, SYMBOLS = 64, 2, 4, 48, 256
TEXT_BYTES = 3_000_000
HELD_OUT = 64
"""Number of held-out windows on which losses are reported. The gate has as many others."""


def read_text() -> Tensor:
    """Return the bytes of Python's standard library, uint8, in order of path."""
    found, size = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data = file.read_bytes()
        found.append(data)
        size += len(data)
        if size >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)


class Text:
    """Training and held-out windows."""

    def __init__(self) -> None:
        data = read_text()
        kept = 2 * HELD_OUT * (LENGTH + 1)
        # Held out from the middle, because the beginning and the end are of one kind each.
        middle = len(data) // 2
        held = data[middle : middle + kept].view(2 * HELD_OUT, LENGTH + 1).long()
        self.train = torch.cat([data[:middle], data[middle + kept :]])
        self.held_out, self.gate = held[:HELD_OUT], held[HELD_OUT:]

    def batch(self, site: int, step: int, rows: int, seed: int) -> Tensor:
        """Return windows, int64 [rows, LENGTH + 1]: a pure function of the arguments."""
        draw = torch.Generator().manual_seed(seed * 1_000_003 + site * 100_003 + step)
        starts = torch.randint(0, len(self.train) - LENGTH - 1, (rows,), generator=draw)
        return torch.stack([self.train[int(s) : int(s) + LENGTH + 1] for s in starts]).long()


def initial(seed: int) -> dict[str, Tensor]:
    """Return the weights of one model, fp32 by name, in model order."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * (0.02 if shape[0] > WIDTH else shape[0] ** -0.5)

    found = {"embed": normal(SYMBOLS, WIDTH), "position": torch.zeros(LENGTH, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        found[prefix + "attention_in"] = normal(WIDTH, 3 * WIDTH)
        found[prefix + "attention_out"] = normal(WIDTH, WIDTH) * 0.5
        found[prefix + "up"] = normal(WIDTH, 4 * WIDTH)
        found[prefix + "down"] = torch.randn(4 * WIDTH, WIDTH, generator=draw) * WIDTH**-0.5 * 0.25
    found["head"] = normal(WIDTH, SYMBOLS) * 0.5
    return found


def losses(models: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of each site's model, [sites]. Both ids are int64 [sites, rows,
    LENGTH]."""
    sites, rows, _ = inputs.shape
    at = torch.arange(sites).view(-1, 1)
    x = models["embed"][at, inputs.reshape(sites, -1)]
    x = x + models["position"].repeat(1, rows, 1)
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        mixed = torch.bmm(_normal(x), models[prefix + "attention_in"])
        heads = mixed.view(sites * rows, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        seen = seen.transpose(1, 2).reshape(sites, rows * LENGTH, WIDTH)
        x = x + torch.bmm(seen, models[prefix + "attention_out"])
        wide = F.gelu(torch.bmm(_normal(x), models[prefix + "up"]))
        x = x + torch.bmm(wide, models[prefix + "down"])
    logits = torch.bmm(_normal(x), models["head"])
    each = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none")
    return each.view(sites, -1).mean(1)


def loss_of(model: Mapping[str, Tensor], windows: Tensor) -> float:
    """Return the loss of one model over windows int64 [rows, LENGTH + 1]; NaN if it is not
    finite."""
    with torch.no_grad():
        one = {name: each.unsqueeze(0) for name, each in model.items()}
        found = losses(one, windows[None, :, :-1], windows[None, :, 1:])
    return float(found) if math.isfinite(float(found)) else math.nan


def slope_of(model: Mapping[str, Tensor], windows: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one model over windows int64 [rows, LENGTH + 1], and its gradients by
    name."""
    one = {name: each.detach().unsqueeze(0).requires_grad_() for name, each in model.items()}
    loss = losses(one, windows[None, :, :-1], windows[None, :, 1:]).sum()
    found = torch.autograd.grad(loss, list(one.values()))
    return float(loss.detach()), {name: each[0] for name, each in zip(one, found, strict=True)}


def _normal(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))
