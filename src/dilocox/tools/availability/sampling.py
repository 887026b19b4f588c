"""Samples pieces: asks stores for random pieces, and says what the answers show."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dilocox.errors import RecordError
from dilocox.record.pieces.chance import pass_chance
from dilocox.record.verify.piece_stores import PieceStores
from dilocox.record.verify.signed_cuts import SignedCut, SignedCuts


@dataclass
class Sampled:
    """What a sample has shown."""

    cuts: int
    """Number of cuts that were sampled from."""
    needed: int
    pieces: int
    samples: int
    uncertified: int = 0
    """Cuts that have no certificate, and were not sampled."""
    answered: Counter[str] = field(default_factory=Counter)
    """Samples that were answered, by site."""
    asked: Counter[str] = field(default_factory=Counter)
    """Samples by site."""
    lost: list[str] = field(default_factory=list)
    """One line for each cut of a sample that cannot be rebuilt from the stores."""
    wrong: list[str] = field(default_factory=list)
    """One line for each file that is not the signed piece."""
    dead: dict[str, str] = field(default_factory=dict)
    """Why a store was not asked any more, by its place."""

    @property
    def passed(self) -> bool:
        """True if every sampled cut can be rebuilt, and no store has shown a wrong piece."""
        return not self.lost and not self.wrong

    def chance(self, share: float = 1.0) -> float:
        """Return how likely this sample passes if a share of the cuts cannot be rebuilt."""
        return pass_chance(self.samples, self.needed, self.pieces, share)


def sample(
    signed: SignedCuts,
    stores: PieceStores,
    samples: int,
    draw: random.Random,
    round_: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Sampled:
    """Ask for random pieces of certified cuts, each drawn independently of the others.

    If no store has a piece, all other pieces of its cut are asked for until enough are there.

    Args:
        signed: The cuts of the run.
        stores: Stores that are asked.
        samples: Number of pieces.
        draw: Source of randomness, which no store may know in advance.
        round_: Only cuts of this round; None: of all rounds.
        progress: Called with the share of samples done, from 0 to 1.

    Raises:
        RecordError: No cut has a certificate.
    """
    cuts = [each for each in signed.certified if round_ in (None, each.round)]
    if not cuts:
        where = "" if round_ is None else f" of round {round_}"
        raise RecordError(
            f"no cut{where} has a certificate: fewer than {signed.code.quorum} of "
            f"{signed.code.pieces} sites have signed that they hold their pieces"
        )
    code = signed.code
    found = Sampled(len(cuts), code.needed, code.pieces, samples)
    found.uncertified = sum(round_ in (None, each.round) for each in signed.cuts) - len(cuts)
    judged: set[str] = set()
    for number in range(samples):
        cut, index = draw.choice(cuts), draw.randrange(code.pieces)
        site = code.sites[index]
        found.asked[site] += 1
        if stores.has(cut, index):
            found.answered[site] += 1
        elif cut.root not in judged:
            judged.add(cut.root)
            found.lost += _lost(cut, stores, code.needed, code.sites)
        progress((number + 1) / samples)
    found.wrong, found.dead = list(stores.wrong), dict(stores.dead)
    return found


def _lost(cut: SignedCut, stores: PieceStores, needed: int, sites: Sequence[str]) -> list[str]:
    """Return a line if the stores have too few pieces of a cut, else nothing."""
    there = []
    for index, site in enumerate(sites):
        if stores.has(cut, index):
            there.append(site)
            if len(there) == needed:
                return []
    missing = [site for site in sites if site not in there]
    return [
        f"{cut.name}: {needed} pieces are needed, {len(there)} are there "
        f"({', '.join(there) or 'none'}); no store has those of {', '.join(missing)}"
    ]
