"""Model and text of the loss_length benchmark: several copies of a small transformer.

One batched computation serves all copies. The parameters of the copies are rows of one flat tensor,
with the engine's layout of a fragment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality import data as quality_data
from dilocox.outer.layout import Layout

SITES = 4
WIDTH, HEADS, HIDDEN, LAYERS = 48, 2, 96, 2
BATCH, LENGTH = 4, 48
"""Sequences of a site per step, and bytes of a sequence."""
HELD_OUT = 256
"""Number of held-out sequences of each site's text."""
EVERY = 50
"""One document of this number is held out."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors; two-dimensional ones are rows by columns."""
    found: dict[str, tuple[int, ...]] = {"embedding": (quality_data.VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        found |= {
            f"{layer}.norm1": (WIDTH,),
            f"{layer}.qkv": (3 * WIDTH, WIDTH),
            f"{layer}.out": (WIDTH, WIDTH),
            f"{layer}.norm2": (WIDTH,),
            f"{layer}.up": (2 * HIDDEN, WIDTH),
            f"{layer}.down": (WIDTH, HIDDEN),
        }
    return {**found, "norm": (WIDTH,)}


LAYOUT = Layout.of(shapes())


def first_weights(seed: int) -> Tensor:
    """Return the initial weights of one model, flat."""
    draw = torch.Generator().manual_seed(seed)
    flat = torch.zeros(LAYOUT.length)
    for name, view in LAYOUT.views(flat).items():
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            deep = name.endswith(("out", "down"))
            scale = 0.02 / math.sqrt(2 * LAYERS) if deep else 0.02
            view.copy_(scale * torch.randn(view.shape, generator=draw))
    return flat


def views(flat: Tensor) -> dict[str, Tensor]:
    """Return the tensors of all copies, [copies, ...] each, as views of `flat` [copies, length]."""
    return {
        name: flat[:, offset : offset + math.prod(shape)].view(len(flat), *shape)
        for name, shape, offset in zip(LAYOUT.names, LAYOUT.shapes, LAYOUT.offsets, strict=True)
    }


def _rotation() -> tuple[Tensor, Tensor]:
    half = WIDTH // HEADS // 2
    angle = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(half) / half)
    return angle.cos(), angle.sin()


_COS, _SIN = _rotation()


def losses(flat: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of each copy, [copies].

    `flat`: parameters [copies, length]. `ids`: sequences of each copy, int64 [copies, n, LENGTH +
    1].
    """
    tensors, (copies, n, _) = views(flat), ids.shape

    def times(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, tensors[name].mT)

    def normed(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * tensors[name][:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * _COS - second * _SIN, second * _COS + first * _SIN), -1)

    inputs, targets = ids[..., :-1].reshape(copies, -1), ids[..., 1:].reshape(-1)
    which = torch.arange(copies)[:, None]
    x = tensors["embedding"][which, inputs]
    for layer in range(LAYERS):
        qkv = times(normed(x, f"{layer}.norm1"), f"{layer}.qkv")
        parts = qkv.view(copies * n, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            turned(parts[0]), turned(parts[1]), parts[2], is_causal=True
        )
        x = x + times(seen.transpose(1, 2).reshape(copies, n * LENGTH, WIDTH), f"{layer}.out")
        gate, up = times(normed(x, f"{layer}.norm2"), f"{layer}.up").chunk(2, -1)
        x = x + times(functional.silu(gate) * up, f"{layer}.down")
    logits = torch.bmm(normed(x, "norm"), tensors["embedding"].mT)
    each = functional.cross_entropy(logits.reshape(len(targets), -1), targets, reduction="none")
    return each.view(copies, -1).mean(-1)


@dataclass(frozen=True)
class Text:
    """Bytes of each site's text, and held-out sequences on which no site trains."""

    parts: Sequence[Tensor]
    held_out: Tensor

    @classmethod
    def read(cls, iid: bool = False) -> Text:
        """Read the standard library: a contiguous part for each site, or with `iid` all of it for
        each.

        The held-out sequences are the same in both cases.
        """
        sites = []
        for documents in quality_data.contiguous(quality_data.read_corpus(None), SITES):
            kept = [text for number, text in enumerate(documents) if number % EVERY]
            sites.append((_joined(kept), _joined(documents[::EVERY])))
        return cls.of(sites, iid)

    @classmethod
    def of(cls, sites: Sequence[tuple[bytes, bytes]], iid: bool = False) -> Text:
        """Return the text of sites, given for each: bytes to train on, and bytes held out.

        With `iid` each site trains on the bytes of all. `HELD_OUT` sequences are spread evenly over
        the held-out bytes of each site.
        """
        parts, held = [], []
        for train_on, aside in sites:
            parts.append(_tensor(train_on))
            starts = torch.linspace(0, len(aside) - LENGTH - 1, HELD_OUT).long()
            held.append(_sequences(_tensor(aside), starts))
        return cls([torch.cat(parts)] * len(parts) if iid else parts, torch.cat(held))

    def batch(self, draw: torch.Generator) -> Tensor:
        """Return random sequences of every site, int64 [SITES, BATCH, LENGTH + 1]."""
        found = []
        for part in self.parts:
            starts = torch.randint(len(part) - LENGTH - 1, (BATCH,), generator=draw)
            found.append(_sequences(part, starts))
        return torch.stack(found)


def _joined(documents: Sequence[str]) -> bytes:
    return "\n".join(documents).encode("utf-8", "replace")


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _sequences(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()
