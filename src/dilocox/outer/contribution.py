"""A site's contribution to an exchange, and the outcome of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dilocox.compression import Compressor, FramePart, LowRank, frame_bytes, pack_frame
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.outer.staging import HOST, Mark, Staging

Weights = Mapping[str, float]
"""w_i by site."""


class Probe(Protocol):
    """The gate's model as it was at a boundary."""

    def opinions(
        self, sent: Mapping[str, torch.Tensor], found: Mapping[str, RankOpinion], weights: Weights
    ) -> dict[str, RankOpinion]:
        """`found`, with what each contribution alone does to the held-out loss."""

    def tensors(self, anchors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a checkpoint needs of it where the anchors are now `anchors`, by any names."""


@dataclass(frozen=True)
class Contribution:
    """What a site brings to an exchange. `values`: u, flat fp32 [length] on the device that
    encodes, decodes and averages; none for a site that only receives."""

    key: ExchangeKey
    length: int
    values: torch.Tensor | None
    compressor: Compressor | LowRank
    mode: str
    weights: Weights
    """w_i by site, of all members of the round's plan."""
    contributes: bool = True
    warm: torch.Tensor | None = None
    """Q of a low-rank codec at the boundary, flat fp32; none for other codecs."""
    aggregation: str = "mean"
    """See `dilocox.config.admission`."""
    examines: bool = False
    """The contributions are compared with each other before the vote."""
    probe: Probe | None = None
    """The gate; none if there is none, or it does not judge this exchange."""
    staging: Staging = HOST
    """Of that device. Payloads are swapped from host memory."""
    ready: Mark | None = None
    """From when on the values are there; none if they are."""

    @property
    def seed(self) -> int:
        """What codecs draw their positions from: the same at all sites, another every time."""
        return self.key.seed

    def pack(self, part: FramePart, payload: torch.Tensor) -> torch.Tensor:
        """`pack_frame` of a payload of the device, into host memory that it copies to fast."""
        return pack_frame(part, payload, self.staging.empty(frame_bytes(part)))


@dataclass(frozen=True)
class Outcome:
    """What came of an exchange."""

    average: torch.Tensor | None
    """Averaged pseudo-gradient, flat fp32 [length], on the contribution's device as all tensors
    but `payloads`; none if nobody contributed."""
    contributors: tuple[str, ...]
    sent: torch.Tensor | None
    """What the others saw of this site; none if it was left out."""
    second_error: tuple[int, torch.Tensor] | None
    """`reduce`: start of this site's chunk and (sum of w)·epsilon, to enter its residual."""
    payload_bytes: int
    """Bytes that this rank handed to the network."""
    seconds: float
    """From its beginning to its end; waiting for its turn is not in it."""
    attempts: int
    missed: bool = False
    """The exchange was begun before this site was there."""
    link: tuple[tuple[float, float, int], ...] = ()
    """(start, end, bytes): payloads of peers, by `time.time`, from the first byte of the first to
    the last of the last. Waiting for the first peer to begin is not in it."""
    work_seconds: float = 0.0
    """Processor time of encoding, decoding and averaging."""
    advance: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Low-rank codecs: Q to Q of the next exchange, the same at all sites; due at the landing."""
    effective_rank: tuple[float, int] | None = None
    """Low-rank codecs: of the averaged pseudo-gradient, and of how many values; none if no matrix
    goes as low rank."""
    arrivals: Mapping[str, float] = field(default_factory=dict)
    """When each site was there for it, by this process's `time.monotonic`."""
    payloads: tuple[torch.Tensor, ...] = ()
    """What a replay needs, as far as it is here, uint8 each: payloads that count, a low-rank
    codec's basis; of `reduce` the `chunk_index` and the payloads of chunks that passed here. In
    host memory."""
    ready: Mark | None = None
    """From when on its tensors are there; none if they are."""
