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
"""(own u, the honest sites' u) -> the u that is contributed, flat fp32."""


OWN = 0.02
"""Share of the own contribution that colluding sites add, so that their payloads differ in their
bytes."""


@dataclass(frozen=True)
class Move:
    """One attack."""

    name: str
    values: Values | None = None
    labels: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """(honest labels int64 [rows, LENGTH], generator) -> labels on which the site trains."""
    payload: str | None = None
    """Change of the payload's bytes, or of the statements about them: see
    `benchmarks.attacks.sites`."""
    checks_copies: bool = True
    """Whether digests are compared, as the engine does. False shows the effect of this check."""


def _alie(z: float) -> Values:
    """Return the attack "a little is enough" (arXiv 1902.06156).

    All attackers shift in the same direction, within the spread of the honest sites.
    """

    def values(own: Tensor, honest: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(list(honest))
        return rows.mean(0) - z * rows.std(0) + OWN * own

    return values


def _inner_product(scale: float) -> Values:
    """Return an attack against the honest mean (arXiv 1903.03936)."""
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
    """Return a quantised payload whose first scale is not a number (bf16 0x7FC0, little-endian)."""
    changed = payload.clone()
    changed[0], changed[1] = 0xC0, 0x7F
    return changed


def of_wrong_shape(part: Part, payload: Tensor) -> Tensor:
    """Return a complete frame of half of the values."""

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
    """Return the contribution of every site: its own u, or the u that the attack makes of it."""
    if move.values is None:
        return dict(own)
    honest = [u for site, u in own.items() if site not in attackers]
    return {site: move.values(u, honest) if site in attackers else u for site, u in own.items()}
