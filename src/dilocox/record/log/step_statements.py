"""Parsed outer-step statements and commitments of the log."""

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
    """One outer step of one fragment, as the coordinator decided it."""

    key: ExchangeKey
    flush: bool
    attempt: int
    tick: int
    """Slots of the run that had ended at the step's boundary."""
    set: tuple[str, ...]
    """The contribution set."""
    owners: tuple[str, ...]
    weights: tuple[float, ...]
    """Weights w_i of the sites of `set`, in the same order."""
    codec: str
    exchange: str
    learning_rate: float
    momentum: float
    fragments: int
    payloads: Mapping[str, str]
    """SHA-256 of the payloads that count, by `SITE/SHARD`."""
    aggregation: str = "mean"
    shares: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Share of each site's contribution that counts, by site of `set` and shard, in 65,536ths.
    Empty: all contributions count whole."""
    delay: int = 0
    """Slots from the boundary to the landing. The step lands sooner if one of its pieces reaches
    its next boundary before."""
    said: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The whole predicate of the statement, with fields that no replay needs: token ranges,
    verdicts."""

    @classmethod
    def of(cls, statement: s.Statement) -> Step:
        """Parse a statement. Raises `RecordError` if it is malformed or contradicts itself."""
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
            raise RecordError("an outer-step statement is malformed") from None
        if named != (key.round, key.stage, key.fragment):
            raise RecordError(f"the outer-step statement of {key.text} names another round")
        if not 0 <= key.fragment < step.fragments:
            raise RecordError(f"{key.text}: no such fragment, of {step.fragments}")
        return step

    def pieces(self, number: int) -> range:
        """Return the pieces of the fragment, when its stage has `number` pieces.

        Raises `ConfigError` if a stage of so many pieces has no such fragment.
        """
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
    """A rank's signed commitment to its contribution, made before any payload is sent."""

    values: str
    """SHA-256 of u, flat fp32, in sealed form (`dilocox.record.log.digests.sealed`)."""
    payload: str | None
    """SHA-256 of the payload, in sealed form; None if the payload does not depend on u alone."""
    number: int
    """Index of the statement in the log, from 0."""
