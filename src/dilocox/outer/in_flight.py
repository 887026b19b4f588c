"""Exchanges of a rank that are in flight, and what the exchanges of a round cost."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.outer.contribution import Outcome, Probe


@dataclass
class Pending:
    """An exchange between its boundary and its landing."""

    key: ExchangeKey
    plan: RoundPlan
    lands_at: int
    """Tick of the landing: slots since the start of the run."""
    outcome: Future[Outcome]
    contribution: torch.Tensor | None
    """u, kept for the residual. None if this site only receives."""
    contributes: bool
    """See `Contribution.contributes`."""
    probe: Probe | None = None
    """Probe of the loss gate. None before the exchange is submitted, or without a gate."""
    moments: torch.Tensor | None = None
    """`row_means` at the boundary, uint8. None if the payload carries no second moments."""
    counted: bool = False
    """True once a piece of the exchange has landed and `Counts` includes the exchange."""

    @classmethod
    def waiting(
        cls,
        key: ExchangeKey,
        plan: RoundPlan,
        lands_at: int,
        contribution: torch.Tensor | None,
        contributes: bool,
        probe: Probe | None = None,
        moments: torch.Tensor | None = None,
    ) -> Pending:
        """Return an exchange that is not submitted yet.

        `probe`: the probe of an exchange that was submitted before a checkpoint; otherwise None.
        """
        return cls(key, plan, lands_at, Future(), contribution, contributes, probe, moments)


@dataclass
class Counts:
    """Costs of the exchanges of a round. Reset when the round is reported."""

    wait_seconds: float = 0.0
    """Seconds in which training stood still because an exchange had not ended."""
    waited_for: dict[str, float] = field(default_factory=dict)
    """By peer site: seconds of `wait_seconds` until this peer was ready for the exchange. Each wait
    counts against the peer that was ready last. The rest of `wait_seconds` is due to the link."""
    exchange_seconds: float = 0.0
    exchanges: int = 0
    payload_bytes: int = 0
    values: int = 0
    """Number of fp32 values that the payloads encode."""
    attempts: int = 0
    contributors: list[int] = field(default_factory=list)
    link: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, end, bytes) of received payloads; see `Outcome.link`."""
    work_seconds: float = 0.0
    """Processor time of the exchanges."""
    effective_ranks: list[tuple[float, int]] = field(default_factory=list)
    """(effective rank, number of values) of each landing with a low-rank codec."""
