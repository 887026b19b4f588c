"""Custody: a site's signed statement that it holds its pieces, and the certificates that follow.

A cut is the payloads of one exchange at one shard, divided into one piece for each site. It has a
certificate once two thirds of the sites have signed the same root for the payloads that count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dilocox.config.availability import PieceCode
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text
from dilocox.record.log.state_statements import whole
from dilocox.record.log.step_statements import Step

MOST_HELD = 8
"""Largest number of cuts in one statement; more would exceed the size of a request."""
_LAST = 2**53


@dataclass(frozen=True)
class Held:
    """A site's piece of one cut."""

    exchange: str
    """Text of the exchange's key."""
    content: str
    """SHA-256, hex, over the digests of the payloads (`content_of`)."""
    root: str
    """Root of the tree over all pieces, hex."""
    leaf: str
    """Leaf of the site's own piece in this tree, hex."""
    size: int
    """Bytes of the file with the site's piece."""


@dataclass(frozen=True)
class Custody:
    """A rank's signed statement that its site holds its pieces of some cuts."""

    site: str
    stage: int
    shard: int
    round: int
    """The newest round of `held`."""
    needed: int
    """k: number of pieces that suffice."""
    pieces: int
    """n: number of pieces."""
    index: int
    """Number of the site's piece, from 0."""
    held: tuple[Held, ...]

    def statement(self, run: str) -> s.Statement:
        """Build the statement about `run`."""
        return s.Statement(
            s.CUSTODY,
            {each.exchange: each.root for each in self.held},
            {
                "run": run,
                "site": self.site,
                "stage": self.stage,
                "shard": self.shard,
                "round": self.round,
                "needed": self.needed,
                "pieces": self.pieces,
                "index": self.index,
                "held": {each.exchange: [each.content, each.leaf, each.size] for each in self.held},
            },
        )

    @classmethod
    def of(cls, statement: s.Statement) -> Custody:
        """Parse a statement. Raises `RecordError` if it is malformed."""
        said, subjects = statement.predicate, statement.subjects
        with whole(statement):
            held = tuple(
                _held(exchange, root, *said["held"][exchange])
                for exchange, root in subjects.items()
            )
            found = cls(
                site=str(said["site"]),
                stage=_count(said["stage"]),
                shard=_count(said["shard"]),
                round=_count(said["round"]),
                needed=_count(said["needed"]),
                pieces=_count(said["pieces"]),
                index=_count(said["index"]),
                held=held,
            )
            rounds = [ExchangeKey.parse(each.exchange).round for each in held]
            stages = {ExchangeKey.parse(each.exchange).stage for each in held}
            if not held or len(held) > MOST_HELD or set(said["held"]) != set(subjects):
                raise ValueError(len(held))
            if stages != {found.stage} or max(rounds) != found.round:
                raise ValueError(found.round)
            return found

    def problem(self, code: PieceCode) -> str | None:
        """Return why this statement is not of a run with this code; None if it is."""
        if (self.needed, self.pieces) != (code.needed, code.pieces):
            return f"{self.needed} of {self.pieces} pieces, not {code.needed} of {code.pieces}"
        if not self.index < code.pieces or code.sites[self.index] != self.site:
            return f"piece {self.index} is not that of {self.site}"
        return None


def _held(exchange: str, root: str, content: object, leaf: object, size: object) -> Held:
    if ExchangeKey.parse(exchange).kind != "outer":
        raise ValueError(exchange)
    return Held(exchange, digest_text(content), digest_text(root), digest_text(leaf), _count(size))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LAST:
        raise ValueError(value)
    return value


def content_of(payloads: Iterable[str]) -> str:
    """Return the SHA-256, hex, over the SHA-256 (hex) of payloads, in contribution-set order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, payloads))).hexdigest()


def begins_with(payloads: Iterable[str], content: str) -> bool:
    """Return True if `content` is `content_of` one or more of the first of `payloads`.

    The time is linear: a dishonest site may name very many payloads.
    """
    said = hashlib.sha256()
    for payload in payloads:
        said.update(bytes.fromhex(payload))
        if said.hexdigest() == content:
            return True
    return False


def content_of_step(step: Step, shard: int) -> str | None:
    """Return `content_of` the payloads of a step at one shard; None if the step has none."""
    payloads = [step.payloads.get(f"{site}/{shard}", "") for site in step.set]
    return content_of(payloads) if payloads and all(payloads) else None


@dataclass
class Certificates:
    """Custody by cut: which sites have signed which root for which content."""

    signed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By `EXCHANGE#SHARD`, then by `CONTENT ROOT`: sites, in the order of the log."""
    sizes: dict[str, int] = field(default_factory=dict)
    """By `EXCHANGE#SHARD`: bytes of the largest file with a piece."""

    def add(self, custody: Custody) -> None:
        """Take in a statement."""
        for each in custody.held:
            cut = cut_name(each.exchange, custody.shard)
            self.sizes[cut] = max(each.size, self.sizes.get(cut, 0))
            sites = self.signed.setdefault(cut, {}).setdefault(f"{each.content} {each.root}", [])
            if custody.site not in sites:
                sites.append(custody.site)

    def roots(
        self, exchange: str, shard: int, content: str | None = None
    ) -> Mapping[str, list[str]]:
        """Return the sites by signed root, of one content; None: of all contents."""
        found: dict[str, list[str]] = {}
        for named, sites in self.signed.get(cut_name(exchange, shard), {}).items():
            of, root = named.split(" ")
            if content in (None, of):
                found.setdefault(root, []).extend(sites)
        return found

    def certified(
        self, exchange: str, shard: int, quorum: int, content: str | None = None
    ) -> str | None:
        """Return the root that at least `quorum` sites have signed for a cut; None without one.

        Of several contents, as after a resume, it is the root of the one that was signed last.
        """
        roots = self.roots(exchange, shard, content)
        found = [root for root, sites in roots.items() if len(set(sites)) >= quorum]
        return found[-1] if found else None

    def forget(self, oldest: int) -> None:
        """Forget cuts of rounds before `oldest`."""
        for cut in [each for each in self.signed if _round_of(each) < oldest]:
            del self.signed[cut], self.sizes[cut]


def cut_name(exchange: str, shard: int) -> str:
    """Return the name of the cut of an exchange at a shard."""
    return f"{exchange}#{shard}"


def _round_of(cut: str) -> int:
    return ExchangeKey.parse(cut.partition("#")[0]).round
