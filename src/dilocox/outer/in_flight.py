"""What a rank has under way between its sites, and what a round of it cost."""

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
    """Tick of the landing."""
    outcome: Future[Outcome]
    contribution: torch.Tensor | None
    """u, kept for the residual; none if this site only received."""
    contributes: bool
    probe: Probe | None = None
    """What its gate goes by, once it is handed in."""
    moments: torch.Tensor | None = None
    """`row_means` at its boundary, if they travel along."""
    counted: bool = False
    """Some of it has landed."""

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
        """An exchange that has not been handed in yet. `probe`: if it was handed in before."""
        return cls(key, plan, lands_at, Future(), contribution, contributes, probe, moments)


@dataclass
class Counts:
    """What a round cost, reset when it is reported."""

    wait_seconds: float = 0.0
    """Training stood still for data that had not come."""
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds of it until the last site was there, by that site; the rest is the link's."""
    exchange_seconds: float = 0.0
    exchanges: int = 0
    payload_bytes: int = 0
    values: int = 0
    """fp32 values that the payloads stand for."""
    attempts: int = 0
    contributors: list[int] = field(default_factory=list)
    link: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, end, bytes) of what came in, as `Outcome.link` has them."""
    work_seconds: float = 0.0
    """Processor time of the exchanges."""
    effective_ranks: list[tuple[float, int]] = field(default_factory=list)
    """(effective rank, values) of landings with a low-rank codec."""
