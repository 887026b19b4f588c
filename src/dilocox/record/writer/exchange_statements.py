"""Builds the statements on one exchange: commitment, contribution, outer step. Pure."""

from __future__ import annotations

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId
from dilocox.record.log import statements as s
from dilocox.record.log.digests import sealed


def commitment(
    run: str, rank: RankId, key: ExchangeKey, values: str, payload: str | None
) -> s.Statement:
    """Build the commitment that a rank signs before any payload of an exchange is sent.

    `values`: SHA-256, hex, of u, flat fp32. `payload`: SHA-256, hex, of the payload; None if it
    does not depend on u alone. The statement holds both in sealed form, and no attempt number.
    """
    digests = {"values": values} | ({} if payload is None else {"payload": payload})
    return s.Statement(
        s.COMMITMENT,
        {
            name: sealed(digest, run, key.text, rank.site, rank.shard)
            for name, digest in digests.items()
        },
        {
            "run": run,
            "site": rank.site,
            "shard": rank.shard,
            "round": key.round,
            "exchange_key": key.text,
        },
    )


def contribution(
    run: str, rank: RankId, key: ExchangeKey, attempt: int, digest: str
) -> s.Statement:
    """Build the statement that a rank signs when it votes with a payload of SHA-256 `digest`."""
    return s.Statement(
        s.CONTRIBUTION,
        {"payload": digest},
        {
            "run": run,
            "site": rank.site,
            "shard": rank.shard,
            "round": key.round,
            "exchange_key": key.text,
            "attempt": attempt,
        },
    )
