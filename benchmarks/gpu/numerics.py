"""Codecs, outer step and copies: bytes of the GPU against those of the CPU, and GB/s."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import median_seconds
from benchmarks.gpu.parts import CODECS

ROWS = {"gpu": 1 << 14, "cpu": 1 << 7, "tiny": 4}
COLUMNS = 1 << 12
COPIED = {"gpu": 1 << 30, "cpu": 1 << 26, "tiny": 1 << 16}
"""Number of bytes that are copied."""
SECONDS = {"gpu": 0.3, "cpu": 0.1, "tiny": 0.0}


def codecs(context: Context) -> None:
    """Measure one row for each codec, one for low rank and one for the outer step."""
    values = _inputs(ROWS[context.scale])
    device = torch.device("cuda" if context.cuda else "cpu")
    for name in CODECS:
        context.check(f"codec {name}", partial(_codec, name, values, device, context))
    context.check("codec lowrank:64", lambda: _low_rank(values["normal"], device, context))
    context.check("outer step", lambda: _outer_step(values, device))


def _inputs(rows: int) -> dict[str, Tensor]:
    """Return flat fp32 vectors: normal, heavy-tailed, and odd (zeros, subnormals, up to 2^±100)."""
    n = rows * COLUMNS
    draw = torch.Generator().manual_seed(1)
    normal = torch.randn(n, generator=draw) * 1e-3
    heavy = normal / (torch.rand(n, generator=draw) + 1e-3).sqrt()
    powers = 2.0 ** ((torch.arange(n) % 240) - 140).float()
    odd = torch.where(torch.arange(n) % 7 == 0, torch.zeros(()), normal * powers)
    return {"normal": normal, "heavy": heavy, "odd": odd}


def _geometry(values: Tensor) -> Any:
    from dilocox.compression import Geometry

    return Geometry(((values.numel() // COLUMNS, COLUMNS),), (0,), values.numel())


def _codec(name: str, inputs: dict[str, Tensor], device: torch.device, context: Context) -> Outcome:
    from dilocox.compression import compressor

    n = inputs["normal"].numel()
    codec: Any = compressor(name, _geometry(inputs["normal"]))
    part = codec.part(0, n, seed=3)
    wrong = []
    for kind, values in inputs.items():
        ours, theirs = part.encode(values), part.encode(values.to(device))
        if not torch.equal(ours, theirs.cpu()):
            apart = int((ours != theirs.cpu()).sum()) if ours.shape == theirs.shape else -1
            wrong.append(f"payload of {kind} values ({apart} bytes)")
        back = part.decode(ours.to(device)).cpu()
        if not torch.equal(_bits(part.decode(ours)), _bits(back)):
            wrong.append(f"decoded {kind} values")
    on = inputs["normal"].to(device)
    payload = part.encode(on).to(device)
    limit = SECONDS[context.scale]
    figures = {
        "encode_gb_s": 4e-9 * n / median_seconds(lambda: part.encode(on), context.cuda, limit),
        "decode_gb_s": 4e-9 * n / median_seconds(lambda: part.decode(payload), context.cuda, limit),
        "values": n,
    }
    said = f"differs from the CPU: {', '.join(wrong)}" if wrong else "equal to the CPU to the bit"
    return Outcome(not wrong, said, figures)


def _low_rank(normal: Tensor, device: torch.device, context: Context) -> Outcome:
    from dilocox.compression import compressor

    low: Any = compressor("lowrank:64", _geometry(normal))
    basis = low.orthonormalise([low.project(normal, low.first_warm())])
    payload = low.encode(normal, basis)
    there = low.decode(payload.to(device), basis.to(device)).cpu()
    same = torch.equal(_bits(low.decode(payload, basis)), _bits(there))
    on, base = normal.to(device), basis.to(device)

    def both() -> Tensor:
        coded: Tensor = low.decode(low.encode(on, base), base)
        return coded

    took = median_seconds(both, context.cuda, SECONDS[context.scale])
    said = "decoded values equal to the CPU to the bit" if same else "decoded values differ"
    return Outcome(same, said, {"encode_and_decode_gb_s": 4e-9 * normal.numel() / took})


def _outer_step(inputs: dict[str, Tensor], device: torch.device) -> Outcome:
    from dilocox.outer.outer_step import nesterov_step

    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        anchor, momentum = inputs["heavy"].clone(), inputs["normal"].to(dtype)
        average = inputs["odd"].clamp(-1, 1)
        # Make copies even if `device` is the CPU, because both sides are written in place.
        far, far_momentum, far_average = (
            each.to(device, copy=True) for each in (anchor, momentum, average)
        )
        for _ in range(3):
            nesterov_step(anchor, momentum, average, 0.8, 0.5)
            nesterov_step(far, far_momentum, far_average, 0.8, 0.5)
        pairs = ((anchor, far), (momentum, far_momentum))
        if not all(torch.equal(_bits(here), _bits(there.cpu())) for here, there in pairs):
            wrong.append(str(dtype).removeprefix("torch."))
    said = f"bits differ with a momentum in {', '.join(wrong)}" if wrong else "equal to the bit"
    return Outcome(not wrong, said)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def copies(context: Context) -> None:
    """Measure the row `copies`."""
    context.check("copies", lambda: _copies(context))


def _copies(context: Context) -> Outcome:
    size, limit = COPIED[context.scale], SECONDS[context.scale]
    on = torch.ones(size, dtype=torch.uint8, device="cuda" if context.cuda else "cpu")
    kept = torch.zeros(size, dtype=torch.uint8)
    hashed = kept[: min(size, 1 << 28)].numpy()

    def rate(call: Any, length: int = size) -> float:
        return 1e-9 * length / median_seconds(call, context.cuda, limit)

    figures = {
        "to_fresh_pageable_gb_s": rate(lambda: on.to("cpu", copy=True)),
        "to_kept_pageable_gb_s": rate(lambda: kept.copy_(on)),
        "from_pageable_gb_s": rate(lambda: on.copy_(kept)),
        "sha256_gb_s": rate(lambda: hashlib.sha256(hashed.data).digest(), hashed.nbytes),
    }
    if context.cuda:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        figures["to_pinned_gb_s"] = rate(lambda: pinned.copy_(on, non_blocking=True))
        figures["from_pinned_gb_s"] = rate(lambda: on.copy_(pinned, non_blocking=True))
        other = torch.empty_like(on)
        figures["on_device_gb_s"] = rate(lambda: other.copy_(on))
    return Outcome(None, "", figures)
