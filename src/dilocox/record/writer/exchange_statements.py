"""Builds the statements on one exchange: commitment, contribution, outer step. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId
from dilocox.coordinator.protocol.schedule import boundary_slots
from dilocox.coordinator.server.notary import Decision
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


def outer_step(decision: Decision, stages: int, behind: Collection[str]) -> dict[str, Any]:
    """Return the predicate of an outer step: all inputs of its replay except the payloads.

    The predicate also names the token ranges of the sites that are `behind` the step."""
    key, plan = decision.key, decision.plan
    flush = plan.kind == "flush"
    slot = (
        0 if flush else boundary_slots(key.stage, stages, plan.fragments, plan.slots)[key.fragment]
    )
    return {
        "round": key.round,
        "kind": plan.kind,
        "exchange_key": key.text,
        "stage": key.stage,
        "fragment": key.fragment,
        "attempt": decision.attempt,
        "tick": plan.first_tick + slot,
        "set": list(decision.set),
        "owners": list(decision.owners),
        "members": list(plan.members),
        "weights": {site: plan.members[site].weight for site in decision.set},
        "codec": plan.codec,
        "exchange": plan.exchange,
        "overlap": plan.overlap,
        "keep": plan.keep,
        "delay": plan.delay,
        "fragments": plan.fragments,
        "inner_steps": plan.inner_steps,
        "first_tick": plan.first_tick,
        "slots": plan.slots,
        "spaces": {site: plan.members[site].space for site in behind},
        "ranges": {site: [list(each) for each in plan.members[site].ranges] for site in behind},
        "learning_rate": plan.learning_rate,
        "momentum": plan.momentum,
        "residual_decay": plan.residual_decay,
        "residual_view": plan.residual_view,
        "verdicts": {
            site: verdict.model_dump(exclude_none=True)
            for site, verdict in decision.verdicts.items()
        },
        "shares": {site: [list(own) for own in by_shard]
                   for site, by_shard in decision.shares.items()},
    }  # fmt: skip
