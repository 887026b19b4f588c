"""How the notary judges a signed custody of pieces, and answers which cuts have a certificate."""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.custody import Certificates, Custody

ROUNDS = 64
"""Newest rounds whose custody the coordinator remembers. A certificate needs the statements of two
thirds of the sites within so many rounds; `verify` counts all statements of the log."""


def custody_problem(config: RunConfig, rank: RankId, statement: s.Statement) -> str | None:
    """Return why a rank's signed statement is no custody of this run's code; None if it is one."""
    if config.availability is None:
        return "the run has no [availability]"
    try:
        found = Custody.of(statement)
    except RecordError as error:
        return f"its signed {error}"
    if (found.site, found.stage, found.shard) != (rank.site, rank.stage, rank.shard):
        return "its signed custody is another rank's"
    problem = found.problem(config.availability.code(config.sites))
    return None if problem is None else f"its signed custody is of {problem}"


def certified_of(
    config: RunConfig, known: Certificates, shard: int, asked: Sequence[str]
) -> dict[str, str]:
    """Return the certified root of each exchange of `asked` that has one."""
    if config.availability is None:
        return {}
    quorum = config.availability.code(config.sites).quorum
    found = {each: known.certified(each, shard, quorum) for each in asked}
    return {exchange: root for exchange, root in found.items() if root is not None}
