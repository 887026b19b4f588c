"""Outer steps as they were decided, and commitments, as statements of the log say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text


@dataclass(frozen=True)
class Step:
    """One outer step of one fragment, as it was decided."""

    key: ExchangeKey
    flush: bool
    attempt: int
    tick: int
    """Slots that had ended at its boundary."""
    set: tuple[str, ...]
    owners: tuple[str, ...]
    weights: tuple[float, ...]
    """w_i of `set`, in its order."""
    codec: str
    exchange: str
    learning_rate: float
    momentum: float
    fragments: int
    payloads: Mapping[str, str]
    """SHA-256 of what counts, by `SITE/SHARD`."""
    aggregation: str = "mean"
    shares: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """What counts of each site of `set` by shard, in 65,536ths; empty: all of it."""
    delay: int = 0
    """Slots from its boundary to its landing, or to the next boundary of one of its pieces if that
    is sooner."""
    said: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The whole statement, with what no replay needs: token ranges, verdicts."""

    @classmethod
    def of(cls, statement: s.Statement) -> Step:
        """Raises `RecordError` for a statement that is not whole."""
        said = statement.predicate
        try:
            key = ExchangeKey.parse(said["exchange_key"])
            step = cls(
                key=key,
                flush=said["kind"] == "flush",
                attempt=int(said["attempt"]),
                tick=int(said["tick"]),
                set=tuple(said["set"]),
                owners=tuple(said["owners"]),
                weights=tuple(float(said["weights"][site]) for site in said["set"]),
                codec=str(said["codec"]),
                exchange=str(said["exchange"]),
                learning_rate=float(said["learning_rate"]),
                momentum=float(said["momentum"]),
                delay=int(said["delay"]),
                fragments=int(said["fragments"]),
                payloads={str(name): digest_text(one) for name, one in statement.subjects.items()},
                aggregation=str(said.get("aggregation", "mean")),
                shares=_shares(said),
                said=said,
            )
            named = (int(said["round"]), int(said["stage"]), int(said["fragment"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("an outer-step statement is not whole") from None
        if named != (key.round, key.stage, key.fragment):
            raise RecordError(f"the outer-step statement of {key.text} names another round")
        if not 0 <= key.fragment < step.fragments:
            raise RecordError(f"{key.text}: no such fragment, of {step.fragments}")
        return step

    def pieces(self, number: int) -> range:
        """Which pieces of its stage, of so many, it is of. Raises `ConfigError` if there is no such
        fragment."""
        return pieces_of(self.key.fragment, self.fragments, number)


def _shares(said: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    shares = said.get("shares")
    if not shares:
        return ()
    return tuple(
        tuple(tuple(int(share) for share in own) for own in shares[site]) for site in said["set"]
    )


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a rank has signed of its contribution before payloads were sent."""

    values: str
    """SHA-256 of u, flat fp32, `sealed`."""
    payload: str | None
    """Of what it would send, where that follows from u alone, likewise."""
    number: int
    """Which statement of the log this is, from 0."""
