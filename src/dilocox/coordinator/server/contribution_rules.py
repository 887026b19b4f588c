"""Which contributions count: a pure function of the ranks' opinions, in integers.

Every voting rank sends an opinion on each contribution. Ranks compute in floating point and may
differ in the last digit. So the coordinator takes the lower median of the opinions, records the
result and sends it to all ranks. The checks in order: whole and finite, no copy, then the gate.
Norm and direction only raise flags, because an honest site with unusual text looks unusual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high, median_low

from dilocox.coordinator.protocol.verdicts import (
    CAP,
    MICRO,
    MILLI,
    WHOLE,
    Code,
    Flag,
    RankOpinion,
    Verdict,
)

LARGE, SMALL = 3 * MILLI, MILLI // 3
"""A contribution is flagged if its norm is outside these, in thousandths of the median norm."""
SPREADS = 3
"""The gate's distance from the sites' median gain, in median absolute deviations."""

Opinions = Mapping[str, RankOpinion]
"""Opinions of one rank, by site."""


@dataclass(frozen=True)
class Evidence:
    """Input of `judge`."""

    whole: Sequence[str]
    """Sites that contribute and whose contribution every voter holds whole, in order."""
    opinions: Sequence[Sequence[Opinions]]
    """Opinions by shard, then by voting rank of the shard."""
    digests: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """SHA-256 of payloads by site and shard; None: not known."""
    earlier: frozenset[str] = frozenset()
    """SHA-256 of the payloads of this fragment's previous exchange."""
    uncommitted: Sequence[str] = ()
    """Sites whose payload is not the one to which they had committed."""
    recommitted: Sequence[str] = ()
    """Sites that had committed to another contribution before the run was resumed."""
    robust: bool = False
    """True if contributions are compared, by the aggregation or by the gate."""
    withdrawn: Sequence[str] = ()
    """Sites that asked not to count their contribution."""
    missing: Sequence[str] = ()
    """Sites whose contribution some voter does not hold."""
    training: bool = True
    """True if the round has inner steps, so that an honest contribution is not zero."""
    tolerance: int | None = None
    """Tolerance of the gate, in millionths of the loss. None: no gate."""
    usual: int | None = None
    """The gate's running mean of gains for this fragment, in millionths. None: not known yet."""


@dataclass(frozen=True)
class Judgement:
    """Result of `judge` for one exchange."""

    set: list[str]
    """Contribution set."""
    verdicts: dict[str, Verdict]
    shares: dict[str, list[list[int]]]
    """Shares that count of each site of `set`, by shard, in 65,536ths; empty: all in full."""
    usual: int | None
    """The gate's running mean of gains after this exchange, in millionths."""


def judge(given: Evidence) -> Judgement:
    """Return the contribution set of an exchange, with verdicts and shares.

    The sites of the set keep the order of `given.whole`.
    """
    settled = {site: _settled(site, given.opinions) for site in given.whole}
    codes: dict[str, Code] = dict.fromkeys(given.whole, "admitted")
    codes.update(_of_bytes(given, settled))
    codes.update({site: "equivocation" for site in given.whole if _equivocates(site, given)})
    codes.update({site: "uncommitted" for site in given.whole if site in given.uncommitted})
    again = [site for site in _admitted(codes) if site in given.recommitted]
    if given.robust and 2 * len(again) <= len(_admitted(codes)):
        # If most sites recommitted, the cause is other machines after the resume, not the sites.
        codes.update(dict.fromkeys(again, "recommitted"))
    usual = given.usual
    if given.tolerance is not None:
        left = {site: settled[site] for site in _admitted(codes)}
        usual, worse = _gated(left, given.tolerance, given.usual)
        codes.update(dict.fromkeys(worse, "loss"))
    chosen = _admitted(codes)
    copied = _copied(given, chosen)
    verdicts: dict[str, Verdict] = {}
    for site, found in settled.items():
        # Payloads of zeros are equal at all sites, so equality does not show a copy.
        flags = _flags(found, site in copied and found.code != "zero")
        if site in given.recommitted:
            flags.append("recommitted")
        verdicts[site] = Verdict(
            code=codes[site], flags=flags, norm=found.norm, cosine=found.cosine, gain=found.gain
        )
    for site in given.missing:
        verdicts[site] = Verdict(code=_why_missing(site, given.opinions))
    for site in given.withdrawn:
        verdicts[site] = Verdict(code="withdrawn")
    return Judgement(chosen, verdicts, _all_shares(given, chosen), usual)


def _admitted(codes: Mapping[str, Code]) -> list[str]:
    return [site for site, code in codes.items() if code == "admitted"]


def _about(site: str, voters: Iterable[Opinions]) -> list[RankOpinion]:
    return [said[site] for said in voters if site in said]


def _is_zero(about: Sequence[RankOpinion]) -> bool:
    """Return whether more than half of the opinions say that the contribution is zero."""
    return 2 * sum(each.code == "zero" for each in about) > len(about)


def _settled(site: str, opinions: Sequence[Sequence[Opinions]]) -> RankOpinion:
    """Return one opinion on the whole contribution of a site, from the medians of its shards.

    Of the shards' norms, cosines and losses, the most suspicious one counts. Gains are those of
    each shard's part, so they are added.
    """
    norms, cosines, gains, losses = [], [], [], []
    zero = bool(opinions)
    for shard in opinions:
        about = _about(site, shard)
        zero = zero and _is_zero(about)
        norms += _middle(each.norm for each in about)
        cosines += _middle(each.cosine for each in about)
        gains += _middle(each.gain for each in about)
        losses += _middle(each.loss for each in about)
    return RankOpinion(
        code="zero" if zero else "admitted",
        norm=max(norms, default=None, key=lambda norm: abs(norm - MILLI)),
        cosine=min(cosines, default=None),
        gain=_added(gains) if len(gains) == len(opinions) else None,
        loss=min(losses, default=None),
    )


def _added(gains: Sequence[int]) -> int | None:
    """Return the sum, limited to -CAP ... CAP; None without numbers."""
    return max(-CAP, min(CAP, sum(gains))) if gains else None


def _middle(numbers: Iterable[int | None]) -> list[int]:
    known = [number for number in numbers if number is not None]
    return [median_low(known)] if known else []


def _of_bytes(given: Evidence, settled: Mapping[str, RankOpinion]) -> dict[str, Code]:
    """Return the codes that the bytes alone show: zeros, repeated payloads and copied payloads."""
    zeros = [site for site in given.whole if settled[site].code == "zero"]
    if given.training and len(zeros) < len(given.whole):
        codes: dict[str, Code] = dict.fromkeys(zeros, "zero")
    else:
        codes = {}
    seen: set[tuple[int, str]] = set()
    for site in given.whole:
        # A payload without a commitment may itself be the copy, so it accuses no other payload.
        if settled[site].code == "zero" or site in given.uncommitted:
            continue
        own = [(shard, text) for shard, text in enumerate(given.digests.get(site, ())) if text]
        # A shard may be empty, or hold equal small values: only equality of all shards is a copy.
        if own and all(text in given.earlier for _, text in own):
            codes[site] = "stale"
        elif own and all(each in seen for each in own):
            codes[site] = "duplicate"
        else:
            seen.update(own)
    return codes


def _equivocates(site: str, given: Evidence) -> bool:
    """Return whether at least half of a shard's ranks got another payload than the site voted with.

    If fewer ranks say so, their sites have been excluded before (`disputes`).
    """
    own = given.digests.get(site, ())
    return any(
        2 * sum(each.digest not in (None, text) for each in _about(site, voters)) >= len(voters)
        for voters, text in zip(given.opinions, own, strict=False)
        if text is not None and voters
    )


def _copied(given: Evidence, chosen: Sequence[str]) -> set[str]:
    """Return the sites of the set whose payloads another site has sent, too."""
    count = Counter(tuple(given.digests[site]) for site in given.whole if site in given.digests)
    return {site for site in chosen if count.get(tuple(given.digests.get(site, ())), 0) > 1}


def _gated(
    settled: Mapping[str, RankOpinion], tolerance: int, usual: int | None
) -> tuple[int | None, list[str]]:
    """Return the running mean of gains after this exchange, and the harmful sites.

    A contribution is harmful if both conditions hold:

    - With it alone, the held-out loss rises by more than `tolerance` of the loss.
    - Its gain is below the sites' median by more than `SPREADS` median absolute deviations, or it
      raises the loss by more than a quarter of the usual gain.

    If most contributions are harmful, the held-out text is at fault, and all of them count.
    """
    gains = {site: each.gain for site, each in settled.items() if each.gain is not None}
    losses = [each.loss for each in settled.values() if each.loss is not None]
    if not gains or not losses:
        return usual, []
    middle = median_low(gains.values())
    spread = median_low(abs(gain - middle) for gain in gains.values())
    unlike = middle - SPREADS * spread
    if usual is not None:
        unlike = max(unlike, -(usual // 4))
    limit = median_low(losses) * tolerance // MICRO
    worse = [site for site, gain in gains.items() if gain < -limit and gain < unlike]
    if 2 * len(worse) > len(gains):
        return usual, []
    now = max(0, median_low(gain for site, gain in gains.items() if site not in worse))
    return (now if usual is None else (usual + now) // 2), worse


def _flags(found: RankOpinion, copied: bool) -> list[Flag]:
    flags: list[Flag] = ["copied"] if copied else []
    if found.norm is not None and found.norm > LARGE:
        flags.append("large")
    if found.norm is not None and found.norm < SMALL:
        flags.append("small")
    if found.cosine is not None and found.cosine < 0:
        flags.append("against")
    return flags


def _why_missing(site: str, opinions: Sequence[Sequence[Opinions]]) -> Code:
    """Return the most frequent reason in the opinions, of equal ones the first; else "not-held"."""
    given = [each.code for shard in opinions for each in _about(site, shard)]
    reasons: list[Code] = [code for code in given if code in ("malformed", "not-finite")]
    return Counter(reasons).most_common(1)[0][0] if reasons else "not-held"


def _all_shares(given: Evidence, chosen: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return the shares of each site of the set by shard; empty if no rank proposes any.

    A share of 0 is a proposal, too.
    """
    by_shard = [_shares_of_shard(given, voters) for voters in given.opinions]
    shares = {site: [of_shard.get(site, []) for of_shard in by_shard] for site in chosen}
    return shares if any(own for of_site in shares.values() for own in of_site) else {}


def _shares_of_shard(given: Evidence, voters: Sequence[Opinions]) -> dict[str, list[int]]:
    """Return by site the shares that a shard's ranks propose, corrected for withdrawn sites.

    A rank cannot know which sites have withdrawn. A withdrawn site sends its residual, which is
    small, and the proposals would shrink the others to its norm. So the shares are scaled among
    the remaining sites. A site without proposals of most ranks is not used for the scale, because a
    few ranks could have invented it.
    """
    sites = dict.fromkeys(site for said in voters for site in said)
    shares = {site: _shares(site, voters) for site in sites}
    if not given.withdrawn:
        return shares
    left = [
        site
        for site in sites
        if site not in given.withdrawn
        and not _is_zero(_about(site, voters))
        and 2 * sum(bool(each.shares) for each in _about(site, voters)) > len(voters)
    ]
    if len({len(shares[site]) for site in left}) != 1:
        return shares
    columns = [_among_themselves(each) for each in zip(*(shares[s] for s in left), strict=True)]
    return shares | dict(zip(left, map(list, zip(*columns, strict=True)), strict=True))


def _among_themselves(shares: Sequence[int]) -> list[int]:
    """Scale shares so that the median site counts in full, and limit them to full shares.

    A share is proportional to the reciprocal of a norm (or, for `rfa`, of a distance). So the upper
    median of shares belongs to the lower median of norms. If this median is 0, the shares no longer
    tell the norms apart, and are returned unchanged.
    """
    middle = median_high(shares)
    return [min(WHOLE, share * WHOLE // middle) if middle else share for share in shares]


def _shares(site: str, voters: Sequence[Opinions]) -> list[int]:
    """Return the element-wise lower median of the shares that ranks propose for a site."""
    proposed = [each.shares for each in _about(site, voters) if each.shares]
    lengths = Counter(len(each) for each in proposed)
    if not lengths:
        return []
    length = lengths.most_common(1)[0][0]
    rows = [each for each in proposed if len(each) == length]
    return [median_low(numbers) for numbers in zip(*rows, strict=True)]
