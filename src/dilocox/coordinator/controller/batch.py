"""Shares the batch of absent sites among the members, so that the global batch stays the same.

Pure functions of integers from the run file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shared_batches(batches: Mapping[str, int], members: Sequence[str], unit: int) -> dict[str, int]:
    """Return the sequences per inner step of each member, whose sum is that of all `batches`.

    Args:
        batches: Sequences per inner step by site of the run file, each a multiple of `unit`.
        members: Sites that train.
        unit: Sequences of one micro-batch on all shards.

    The batch of absent sites is divided among the members in whole units, in proportion to their
    own batches; of equal remainders the first site's comes first. So members take more
    micro-batches of the same size, never larger ones.
    """
    own = {site: batches[site] for site in members}
    there = sum(own.values())
    spare = (sum(batches.values()) - there) // unit
    more = {site: spare * batch // there for site, batch in own.items()}
    rest = {site: spare * batch % there for site, batch in own.items()}
    left = spare - sum(more.values())
    for site in sorted(own, key=lambda site: -rest[site])[:left]:
        more[site] += 1
    return {site: batch + unit * more[site] for site, batch in own.items()}
