"""The cuts of a run, by its log alone: which roots sites have signed, who has which piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.config.availability import PieceCode
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log.custody import cut_name
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import (
    PUBLIC,
    as_signed,
    check_log,
    read_covered,
    read_text,
)
from dilocox.record.verify.availability_claim import code_of, cuts_of
from dilocox.record.verify.run_history import RunHistory, read_history


@dataclass(frozen=True)
class SignedCut:
    """One exchange's payloads at one shard, and the root that most sites have signed for them."""

    exchange: str
    shard: int
    content: str
    """SHA-256, hex, over the payloads' digests."""
    root: str
    """Root of the tree over all pieces, hex; empty if nobody has signed one."""
    sites: tuple[str, ...]
    """Sites that have signed this root."""
    size: int
    """Bytes of the largest file with a piece, by the sites' signatures."""
    certified: bool
    """True if two thirds of the sites have signed the root."""

    @property
    def round(self) -> int:
        """Round of the exchange."""
        return ExchangeKey.parse(self.exchange).round

    @property
    def name(self) -> str:
        """Name for people."""
        return self.exchange if self.shard == 0 else f"{self.exchange} shard {self.shard}"


@dataclass(frozen=True)
class SignedCuts:
    """All cuts whose payloads count."""

    run: str
    code: PieceCode
    cuts: Sequence[SignedCut]

    @property
    def certified(self) -> list[SignedCut]:
        """Cuts with a certificate."""
        return [each for each in self.cuts if each.certified]


def read_cuts(run: Path, key: str | None = None) -> SignedCuts:
    """Read the cuts of the run in a folder with `record/`, from its log, which may still grow.

    `key`: the log's key, from another source than the record. Raises `RecordError` if the log is
    not what its key has signed, or if the run has no `[availability]`.
    """
    log = NoteKey.parse(key or read_text(run / "record" / PUBLIC).strip())
    content = read_covered(run / "record", log)
    check_log(content, log)
    return signed_cuts(read_history(as_signed(content, log), log))


def signed_cuts(course: RunHistory) -> SignedCuts:
    """Return the cuts of a run's history. Raises `RecordError` if it has no `[availability]`."""
    code, found = code_of(course), []
    for exchange, shard, content in cuts_of(course):
        roots = course.custody.roots(exchange, shard, content)
        root = max(roots, key=lambda each: len(roots[each]), default="")
        sites = tuple(roots.get(root, ()))
        size = course.custody.sizes.get(cut_name(exchange, shard), 0)
        certified = len(set(sites)) >= code.quorum
        found.append(SignedCut(exchange, shard, content, root, sites, size, certified))
    return SignedCuts(course.run, code, found)
