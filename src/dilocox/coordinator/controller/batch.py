"""Who takes over the batch of sites that are away, so that all together keep to one global batch.

Pure functions of whole numbers from the run file: every site would compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shared_batches(batches: Mapping[str, int], members: Sequence[str], unit: int) -> dict[str, int]:
    """Sequences per inner step of each of `members`, together those of all sites of `batches`.

    `batches`: of every site of the run file, each a multiple of `unit`, the sequences of one
    micro-batch on all shards. What the sites that are away would take is divided among the members
    in whole units, in proportion to their own batches; of equal claims the first site's comes
    first. So every member takes more micro-batches of the same size, never a larger one.
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
