"""A small causal model in chunks, with the interface that the site room asks of chunks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 33
WIDTH = 16
LAYERS = 5
"""Chunks of four have one layer, but the last has two."""
LENGTH = 6
OWNER, COPY = "model.embed_tokens.weight", "lm_head.weight"


class Block(nn.Module):
    """Causal mean mixing and an MLP. `gain` has one row: fewer than two shards can share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device="meta")
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
        self.up = nn.Linear(WIDTH, 2 * WIDTH, device="meta")
        self.down = nn.Linear(2 * WIDTH, WIDTH, device="meta")
        self.gain = nn.Parameter(torch.empty(1, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        x = x + self.mix(x.cumsum(1) / count)
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class ToyChunk(nn.Module):
    """Chunk `number` of `total` of the toy model, on the meta device."""

    def __init__(
        self,
        number: int,
        total: int,
        *,
        checkpointing: bool = False,
        unused: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.numbers = range(number * LAYERS // total, (number + 1) * LAYERS // total)
        self.layers = nn.ModuleList(Block() for _ in self.numbers)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, device="meta") if number == 0 else None
        last = number == total - 1
        self.norm = nn.LayerNorm(WIDTH, device="meta") if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta") if last else None
        self.unused = nn.Parameter(torch.empty(3, device="meta")) if unused else None
        self.checkpointing = checkpointing
        self.parts = 0
        self.share = tied and total == 1
        self.retie()

    @property
    def embedding(self) -> nn.Module | None:
        return self.embed

    @property
    def closing(self) -> list[nn.Module]:
        return [each for each in (self.norm, self.head) if each is not None]

    def retie(self) -> None:
        """In one chunk, tied tensors are one parameter (`to_empty` makes two of it)."""
        if self.share and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def full_names(self) -> dict[str, str]:
        names = {}
        for name, _ in self.named_parameters(remove_duplicate=False):
            part, _, rest = name.partition(".")
            if part == "layers":
                index, _, rest = rest.partition(".")
                names[name] = f"model.layers.{self.numbers[int(index)]}.{rest}"
            else:
                full = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
                names[name] = f"{full.get(part, part)}.{rest}" if rest else f"model.{part}"
        return names

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        if self.head is not None and self.norm is not None:
            x = self.norm(x)
            if self.parts == 0:
                return self.head(x)
            # The weight is used without a call of the head.
            x = torch.cat([F.linear(part, self.head.weight) for part in x.chunk(self.parts, 1)], 1)
        return x


def value(name: str, shape: Sequence[int]) -> Tensor:
    """The start value of a tensor: a pure function of its full name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    base = torch.randn(tuple(shape), generator=generator) * 0.3
    return base + 1.0 if len(shape) == 1 else base


def rows_of_shard(full: Tensor, shards: int, shard: int) -> Tensor:
    """The rows of `full` that FSDP gives to a shard."""
    parts = full.chunk(shards)
    return parts[shard] if shard < len(parts) else full[:0]


def fill(chunk: nn.Module, device: torch.device) -> None:
    """Values by full name, into whole tensors or shards."""
    assert isinstance(chunk, ToyChunk)
    chunk.to_empty(device=device)
    chunk.retie()
    names = chunk.full_names()
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            full = value(names[name], parameter.shape)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                own = rows_of_shard(full, mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
                parameter.to_local().copy_(own)
            else:
                parameter.copy_(full)


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """input_ids and labels of a whole site, int64 [rows, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
