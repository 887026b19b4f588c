"""Attacks of dishonest sites in the attacks benchmark, each at the place where it acts.

Some attacks train on bad text (`labels`). Others change the contribution, knowing those of all
honest sites (`values`), the bytes of the payload (`payload`), or the statements about payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attacks.lm import SYMBOLS
from dilocox.compression import pack_frame
from dilocox.compression.compressor import Part

Values = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""(own u, the honest sites' u) to the u that is contributed, flat fp32."""


OWN = 0.02
"""What colluding sites mix in of their own, so that their payloads are not the same bytes."""


@dataclass(frozen=True)
class Move:
    """One attack."""

    name: str
    values: Values | None = None
    labels: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """(labels int64 [rows, LENGTH], generator) to those that the site trains on."""
    payload: str | None = None
    """What is done to the bytes, or said about them: see `attacks_sites`."""
    checks_copies: bool = True
    """The engine compares digests; off shows what that is for."""


def _alie(z: float) -> Values:
    """A little is enough (arXiv 1902.06156): inside the honest sites' spread, all the same way."""

    def values(own: Tensor, honest: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(list(honest))
        return rows.mean(0) - z * rows.std(0) + OWN * own

    return values


def _inner_product(scale: float) -> Values:
    """Against the honest mean (arXiv 1903.03936)."""
    return lambda own, honest: OWN * own - scale * torch.stack(list(honest)).mean(0)


def _copy_with_noise(own: Tensor, honest: Sequence[Tensor]) -> Tensor:
    draw = torch.Generator().manual_seed(honest[0].numel())
    noise = torch.randn(own.shape, generator=draw)
    return honest[0] + OWN * own + 0.1 * honest[0].std() * noise * (honest[0] != 0)


def _shifted(labels: Tensor, draw: torch.Generator) -> Tensor:
    return (labels + 1) % SYMBOLS


def _random(labels: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randint(0, SYMBOLS, labels.shape, generator=draw)


NONE = Move("none")
MOVES = (
    Move("sign flip x1", values=lambda own, honest: -own),
    Move("sign flip x10", values=lambda own, honest: -10 * own),
    Move("scale x100", values=lambda own, honest: 100 * own),
    Move("huge scale", values=lambda own, honest: 1e25 * own),
    Move("ALIE z=1", values=_alie(1.0)),
    Move("ALIE z=1.5", values=_alie(1.5)),
    Move("inner product", values=_inner_product(1.0)),
    Move("label shift", labels=_shifted),
    Move("random labels", labels=_random),
    Move("zero", values=lambda own, honest: torch.zeros_like(own)),
    Move("copy", payload="copy"),
    Move("copy, unchecked", payload="copy", checks_copies=False),
    Move("copy + noise", values=_copy_with_noise),
    Move("stale", payload="stale"),
    Move("NaN", payload="nan"),
    Move("wrong shape", payload="shape"),
    Move("duplicate identity", payload="identity"),
    Move("replayed signature", payload="replay"),
    Move("equivocation", payload="equivocation"),
)


def with_nan(payload: Tensor) -> Tensor:
    """A quantised payload whose first scale is not a number (bf16 0x7FC0, little-endian)."""
    changed = payload.clone()
    changed[0], changed[1] = 0xC0, 0x7F
    return changed


def of_wrong_shape(part: Part, payload: Tensor) -> Tensor:
    """A whole frame of half the values."""

    @dataclass(frozen=True)
    class Half:
        identifier: int = part.identifier
        numbers: tuple[int, int] = part.numbers
        name: str = part.name
        values: int = part.values // 2
        payload_bytes: int = part.payload_bytes // 2

    return pack_frame(Half(), payload[: part.payload_bytes // 2].clone())


def contributed(
    move: Move, own: Mapping[str, Tensor], attackers: Sequence[str]
) -> dict[str, Tensor]:
    """What every site encodes: its u, or what the move makes of it."""
    if move.values is None:
        return dict(own)
    honest = [u for site, u in own.items() if site not in attackers]
    return {site: move.values(u, honest) if site in attackers else u for site, u in own.items()}
