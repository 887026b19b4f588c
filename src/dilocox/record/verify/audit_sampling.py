"""Random selection of the rounds and sites to audit.

Anybody can compute the selection, but not before the round is over. The selection point of a
round is the end of the shortest prefix of the log that decides all of the round's exchanges.

    beacon = H(size of the prefix, root of the prefix, public randomness)
    draw   = the first 48 bits of H(beacon, round, site), as a fraction of 2^48

H is SHA-256 with a prefix that names its use. A site is selected if its draw is below the rate. By
then the log holds the signed state in which the round began, and every payload of the round.
Without public randomness the holder of the log's key could try several logs until one selects as
wished. Public randomness prevents that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.step_statements import Step
from dilocox.record.log.transparency_log import leaves_of
from dilocox.record.verify.run_history import RunHistory

BEACON, DRAW = b"dilocox/beacon/v1\0", b"dilocox/draw/v1\0"


@dataclass(frozen=True)
class Point:
    """The selection point of a round."""

    round: int
    size: int
    """Number of statements of the prefix."""
    root: str
    """Merkle root of the prefix, hex."""

    def beacon(self, randomness: bytes) -> bytes:
        """Return the beacon, 32 bytes.

        `randomness`: public, and unknown before the prefix was complete; may be empty.
        """
        size = self.size.to_bytes(8, "big")
        return hashlib.sha256(BEACON + size + bytes.fromhex(self.root) + randomness).digest()

    def draw(self, randomness: bytes, site: str) -> float:
        """Return a site's draw, uniform over [0, 1)."""
        data = DRAW + self.beacon(randomness) + f"{self.round}/{site}".encode()
        return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48


def exchanges_of(course: RunHistory, round_: int) -> list[str]:
    """List the keys of all exchanges whose boundaries are in a round."""
    fragments = int(course.plans[round_]["fragments"])
    return [
        ExchangeKey.outer(round_, stage, fragment).text
        for stage in range(course.stages)
        for fragment in range(fragments)
    ]


def decided(course: RunHistory, round_: int) -> bool:
    """Return True if the log has the plan of a round (or flush) and decides all its exchanges."""
    plan = course.plans.get(round_)
    if plan is None:
        return False
    number = plan["fragments"]
    # Check the claimed number first, because a stranger's log may claim any number of fragments.
    if not 1 <= number * course.stages <= len(course.steps):
        return False
    keys = exchanges_of(course, round_)
    return all(key in course.steps and course.steps[key].fragments == number for key in keys)


def size_of(course: RunHistory, round_: int) -> int:
    """Return the number of statements up to the selection point of a `decided` round."""
    return 1 + max(course.numbers[key] for key in exchanges_of(course, round_))


def points_of(
    course: RunHistory, entries: Sequence[str], rounds: Collection[int]
) -> dict[int, Point]:
    """Return the selection points of `decided` rounds.

    `entries`: all entries of the log, which are read once.
    """
    sizes = {round_: size_of(course, round_) for round_ in rounds}
    roots = roots_at(leaves_of(entries), set(sizes.values()))
    return {round_: Point(round_, size, roots[size].hex()) for round_, size in sizes.items()}


def due_rounds(course: RunHistory) -> list[int]:
    """List the decided rounds whose states must be stored."""
    return [n for n in sorted(course.plans) if course.keeps_state(n) and decided(course, n)]


def sites_of(course: RunHistory, round_: int) -> list[str]:
    """Return the sites that trained a round, sorted.

    A member of the plan that contributed to no attempt of any of the round's exchanges is left out.
    Such a site was gone or overtaken: none of its work is in the model, and it has no state.
    """
    members = sorted(course.plans[round_]["members"])
    if not decided(course, round_):
        return members
    steps = [course.steps[key] for key in exchanges_of(course, round_)]
    return [site for site in members if any(_has_part(course, step, site) for step in steps)]


def _has_part(course: RunHistory, step: Step, site: str) -> bool:
    if site in step.set:
        return True
    # A log may claim any number of attempts and shards, but has a statement for each real one.
    attempts = range(1, min(step.attempt, course.read) + 1)
    return any(
        (step.key.text, attempt, site, shard) in course.contributions
        for attempt in attempts
        if (step.key.text, attempt) in course.votes
        for shard in range(min(course.shards, course.read))
    )


def read_randomness(path: Path) -> dict[int, bytes]:
    """Read public randomness by round, from lines `ROUND HEX`. Raises `RecordError`."""
    found: dict[int, bytes] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                number, value = line.split()
                found[int(number)] = bytes.fromhex(value)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path}: no list of public randomness ({error}); give one line `ROUND HEX` per round"
        ) from None
    return found
