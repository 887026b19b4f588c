"""Deterministic values for golden tests: no generator, the same bits on every machine.

Run as a script with a file of payloads (see `save`), in a fresh interpreter, it prints the digest
of every codec on these values, and of what it decodes from the file, and which instructions torch
used for that.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Compressor
from dilocox.compression.lowrank.codec import LowRank
from dilocox.compression.registry import CODECS, compressor

Result = TypeVar("Result")

TOPK = ("topk:1", "topk:64", "topk:77", "topk:2048")
TOP1 = ("top1:2", "top1:64", "top1:600")
SPARSE = (*TOPK, *TOP1, "cocktail")
SINGLE = (*CODECS, *SPARSE)
"""Specs with one phase."""
RANKS = ("lowrank:4", "lowrank:8:int8")

ODD = Geometry(
    ((300, 70), (128,), (100,), (3, 1000), (0, 9), (5, 999)),
    (128, 21248, 21376, 21504, 24576, 24704),
    29824,
)
"""Tensors that end in the middle of a block, small ones, 1-D ones, an empty one, and gaps."""

WIDE = Geometry(((512, 256), (1000,), (40, 3000)), (0, 131072, 132096), 252160)
"""Enough values for torch to share them among threads, which it does from 32,768 on."""


def with_threads(act: Callable[[], Result]) -> list[Result]:
    """What `act` returns with 1, 2 and 3 threads."""
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(act())
    finally:
        torch.set_num_threads(threads)
    return found


def patterns(n: int) -> Tensor:
    """n finite fp32 values: blocks between 2^-37 and 2^30, values within a factor 16 of another."""
    number = torch.arange(n, dtype=torch.int64)
    mixed = (number * 2654435761 + (number >> 7) * 40503) & 0xFFFFFFFF
    exponent = 90 + (number >> 7) % 64 + (mixed >> 9) % 4
    bits = ((mixed & 1) << 31) | (exponent << 23) | ((mixed >> 7) & 0x7FFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def filled(geometry: Geometry, values: Tensor) -> Tensor:
    """A buffer of that geometry with `values` [length] in its tensors and zeros in its gaps."""
    buffer = values.clone()
    for start, end in geometry.gaps():
        buffer[start:end] = 0
    return buffer


def single(spec: str, geometry: Geometry) -> Compressor:
    """The compressor of a spec with one phase."""
    made = compressor(spec, geometry)
    assert isinstance(made, Compressor)
    return made


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the tensors' bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.numpy().data)
    return total.hexdigest()


def digests(n: int = 1 << 18) -> dict[str, str]:
    """Digest of payload and decoded values, by spec; flat codecs on n values."""
    values = patterns(n)
    found = {}
    for name, codec in CODECS.items():
        payload = codec.encode(values)
        found[name] = digest(payload, codec.decode(payload, n))
    buffer = filled(ODD, patterns(ODD.length))
    for spec in SPARSE:
        part = single(spec, ODD).part(0, ODD.length, seed=3)
        payload = part.encode(buffer)
        found[spec] = digest(payload, part.decode(payload))
    return found


def save(file: Path, geometry: Geometry = ODD) -> None:
    """Write payloads of every codec on tensors of that geometry."""
    generator = torch.Generator().manual_seed(0)
    buffer = filled(geometry, torch.randn(geometry.length, generator=generator))
    messages: dict[str, list[Tensor]] = {}
    for spec in SINGLE:
        part = single(spec, geometry).part(0, geometry.length, seed=3)
        messages[spec] = [part.encode(buffer)]
    for spec in RANKS:
        low = compressor(spec, geometry)
        assert isinstance(low, LowRank)
        basis = low.orthonormalise([low.project(buffer, low.first_warm())])
        messages[spec] = [basis, low.encode(buffer, basis), low.encode(buffer * 0.75, basis)]
    torch.save(messages, file)


def decoded(file: Path, geometry: Geometry = ODD) -> dict[str, str]:
    """Digest of what is decoded from every payload of the file, by spec."""
    found = {}
    for spec, payloads in torch.load(file, weights_only=True).items():
        made = compressor(spec, geometry)
        low = made.agreement
        if low is None:
            values = [made.part(0, geometry.length, seed=3).decode(each) for each in payloads]
        else:
            basis, *sent = payloads
            warm = low.first_warm()
            values = [warm, *(low.decode(each, basis) for each in sent)]
            for count in (1, 2, 3):
                warm = low.next_warm(sent, [1.0, 0.5], basis, warm, count)
                values.append(warm)
        found[spec] = digest(*values)
    return found


def everything(file: Path) -> dict[str, str]:
    """All digests: `digests()`, and `decoded(file)` under names of its own."""
    return {**digests(), **{f"{spec} sent": text for spec, text in decoded(file).items()}}


if __name__ == "__main__":
    on = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"capability": on, "digests": everything(Path(sys.argv[1]))}))
