"""A site's contribution to an exchange, and the outcome of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dilocox.compression import FragmentCodec, FramePart, frame_bytes, pack_frame
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.outer.staging import HOST, Mark, Staging

Weights = Mapping[str, float]
"""Weight w_i by site."""


class Probe(Protocol):
    """Data by which the loss gate judges contributions, as of one boundary."""

    def opinions(
        self, sent: Mapping[str, torch.Tensor], found: Mapping[str, RankOpinion], weights: Weights
    ) -> dict[str, RankOpinion]:
        """Return opinions that also say how each contribution alone changes the held-out loss.

        `sent`: decoded contribution by site, flat fp32. `found`: opinions so far, at least of the
        sites in `sent`; the result has the sites in `sent`. `weights`: w_i by site.
        """

    def tensors(self, anchors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors from which a resumed run makes this probe again.

        `anchors` are the anchors as they are now: the checkpoint holds these already. The
        implementation chooses the names.
        """


@dataclass(frozen=True)
class Contribution:
    """Input of one rank to one exchange: the contribution, and the settings of the exchange."""

    key: ExchangeKey
    length: int
    """Values of the fragment at this rank."""
    values: torch.Tensor | None
    """u, flat fp32 [length] on the device that encodes, decodes and averages. None at a site that
    only receives."""
    compressor: FragmentCodec
    mode: str
    """`gather` or `reduce` (docs/algorithm.md §2)."""
    weights: Weights
    """w_i by site, of all members of the round's plan."""
    contributes: bool = True
    """False if this site's contribution must not count, for example because it is not finite."""
    warm: torch.Tensor | None = None
    """Q of a low-rank codec at the boundary, flat fp32. None for other codecs."""
    aggregation: str = "mean"
    """See `dilocox.config.admission`."""
    examines: bool = False
    """True if this rank compares the contributions with each other before the vote."""
    probe: Probe | None = None
    """Probe of the loss gate. None without a gate, or if the gate does not judge this exchange."""
    staging: Staging = HOST
    """Staging of the device of `values`. Payloads travel from host memory."""
    ready: Mark | None = None
    """Event after which `values` are complete. None if they are complete already."""

    @property
    def seed(self) -> int:
        """Seed from which codecs draw positions: equal at all sites, different in each exchange."""
        return self.key.seed

    def pack(self, part: FramePart, payload: torch.Tensor) -> torch.Tensor:
        """Frame a payload of the device (`pack_frame`), in host memory: pinned if on a GPU."""
        return pack_frame(part, payload, self.staging.empty(frame_bytes(part)))


@dataclass(frozen=True)
class Outcome:
    """Result of an exchange at one rank. Tensors other than `payloads` are on the device of the
    contribution."""

    average: torch.Tensor | None
    """Averaged pseudo-gradient, flat fp32 [length]. None if the contribution set is empty."""
    contributors: tuple[str, ...]
    """The contribution set, in its order."""
    sent: torch.Tensor | None
    """This site's contribution as the other sites decode it, flat fp32 [length]. None if this site
    was left out."""
    second_error: tuple[int, torch.Tensor] | None
    """Exchange `reduce`: start of this site's chunk, and (Σ w)·ε, which enters its residual. None
    in exchange `gather`."""
    payload_bytes: int
    """Bytes that this rank handed to the network."""
    seconds: float
    """Duration of the exchange; time in the queue before it is not included."""
    attempts: int
    """Number of tries that the exchange took."""
    missed: bool = False
    """True if the other sites began the exchange without this site."""
    link: tuple[tuple[float, float, int], ...] = ()
    """(start, end, bytes) of each swap in which this rank received messages of peers. Start and end
    are seconds of `time.time`, from the first byte received to the last byte. Time until the first
    peer begins to send is not included."""
    work_seconds: float = 0.0
    """Processor time of encoding, decoding and averaging."""
    advance: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Low-rank codecs: maps Q to the Q of the next exchange, which is equal at all sites. Call it
    at the landing. None for other codecs."""
    effective_rank: tuple[float, int] | None = None
    """Low-rank codecs: (effective rank of the averaged pseudo-gradient, number of values that it
    covers). None if no matrix is sent as low rank."""
    arrivals: Mapping[str, float] = field(default_factory=dict)
    """By site: time at which the site was ready for the exchange, by this process's
    `time.monotonic`."""
    payloads: tuple[torch.Tensor, ...] = ()
    """Payloads that a replay needs and this rank has, uint8 each, in host memory: the payloads that
    count, and the basis of a low-rank codec. In exchange `reduce`: the `chunk_index`, and the chunk
    payloads that passed through this rank. A landing may have less of them
    (`dilocox.outer.exchanger.for_landing`)."""
    ready: Mark | None = None
    """Event after which the tensors are complete. None if they are complete already."""
