"""Which contributions count: a pure function of what the ranks found, in whole numbers.

Every voting rank says what it found in each contribution. Ranks compute in floating point and may
differ in the last place, so the opinions are settled here, once, by their lower median, and what
comes of it is recorded and told to all. Stages in order: whole and finite, no copy, then the gate.
Norm and direction only raise flags: an honest site with unusual text looks unusual.
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
"""Norms, in thousandths of the median, beyond which a contribution is flagged."""
SPREADS = 3
"""Of the gate: median deviations from the sites' median gain."""

Opinions = Mapping[str, RankOpinion]
"""What one rank found, by site."""


@dataclass(frozen=True)
class Evidence:
    """All that a judgement is made from."""

    whole: Sequence[str]
    """Sites whose contribution every voter holds whole and that let it count, in order."""
    opinions: Sequence[Sequence[Opinions]]
    """By shard: of every rank that votes."""
    digests: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """SHA-256 of payloads by site and shard, as far as they are known."""
    earlier: frozenset[str] = frozenset()
    """SHA-256 of the payloads of this fragment's exchange before."""
    uncommitted: Sequence[str] = ()
    """Sites whose payload is not the one that they had committed to."""
    recommitted: Sequence[str] = ()
    """Sites that had committed to another contribution before the run was resumed."""
    robust: bool = False
    """Contributions are compared: by the aggregation, or by the gate."""
    withdrawn: Sequence[str] = ()
    """Sites that do not let their contribution count."""
    missing: Sequence[str] = ()
    """Sites whose contribution somebody does not hold."""
    training: bool = True
    """There were inner steps: a contribution of zero is none."""
    tolerance: int | None = None
    """Of the gate, in millionths of the loss; none without a gate."""
    usual: int | None = None
    """The gate's running mean of gains at this fragment, in millionths; none at first."""


@dataclass(frozen=True)
class Judgement:
    """What was decided about an exchange."""

    set: list[str]
    verdicts: dict[str, Verdict]
    shares: dict[str, list[list[int]]]
    """What counts of each site of `set`, by shard, in 65,536ths; empty: all of it."""
    usual: int | None
    """The gate's running mean of gains from now on."""


def judge(given: Evidence) -> Judgement:
    """Decide. The sites of the set stay in their order."""
    settled = {site: _settled(site, given.opinions) for site in given.whole}
    codes: dict[str, Code] = dict.fromkeys(given.whole, "admitted")
    codes.update(_of_bytes(given, settled))
    codes.update({site: "equivocation" for site in given.whole if _equivocates(site, given)})
    codes.update({site: "uncommitted" for site in given.whole if site in given.uncommitted})
    again = [site for site in _admitted(codes) if site in given.recommitted]
    if given.robust and 2 * len(again) <= len(_admitted(codes)):
        # If it is most of them, the machines are others than before, and not a site's choice.
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
        # Zeros are equal at all who send them: nobody needs to copy those.
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
    """Most ranks have found nothing but zeros in it."""
    return 2 * sum(each.code == "zero" for each in about) > len(about)


def _settled(site: str, opinions: Sequence[Sequence[Opinions]]) -> RankOpinion:
    """One opinion of the whole contribution: of several shards, the most suspicious number.

    Gains are of each shard's part, and add up.
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
    """The sum, within what an opinion may say; none of nothing."""
    return max(-CAP, min(CAP, sum(gains))) if gains else None


def _middle(numbers: Iterable[int | None]) -> list[int]:
    known = [number for number in numbers if number is not None]
    return [median_low(known)] if known else []


def _of_bytes(given: Evidence, settled: Mapping[str, RankOpinion]) -> dict[str, Code]:
    """What the bytes alone tell: zeros, payloads sent before, payloads that are another's."""
    zeros = [site for site in given.whole if settled[site].code == "zero"]
    if given.training and len(zeros) < len(given.whole):
        codes: dict[str, Code] = dict.fromkeys(zeros, "zero")
    else:
        codes = {}
    seen: set[tuple[int, str]] = set()
    for site in given.whole:
        # Nobody's payload is a copy of one that was not committed to: that may be the copy.
        if settled[site].code == "zero" or site in given.uncommitted:
            continue
        own = [(shard, text) for shard, text in enumerate(given.digests.get(site, ())) if text]
        # A shard may hold nothing, or the same little: only all of it alike is a copy.
        if own and all(text in given.earlier for _, text in own):
            codes[site] = "stale"
        elif own and all(each in seen for each in own):
            codes[site] = "duplicate"
        else:
            seen.update(own)
    return codes


def _equivocates(site: str, given: Evidence) -> bool:
    """Half of the ranks of a shard, or more, got another payload than the one that the site has
    voted with. A few who say so are set aside before anything is judged (`disputes`)."""
    own = given.digests.get(site, ())
    return any(
        2 * sum(each.digest not in (None, text) for each in _about(site, voters)) >= len(voters)
        for voters, text in zip(given.opinions, own, strict=False)
        if text is not None and voters
    )


def _copied(given: Evidence, chosen: Sequence[str]) -> set[str]:
    """Sites that count and whose payloads somebody else has sent as well."""
    count = Counter(tuple(given.digests[site]) for site in given.whole if site in given.digests)
    return {site for site in chosen if count.get(tuple(given.digests.get(site, ())), 0) > 1}


def _gated(
    settled: Mapping[str, RankOpinion], tolerance: int, usual: int | None
) -> tuple[int | None, list[str]]:
    """The running mean after this exchange, and the sites whose contribution does harm.

    One does harm if the loss with it alone is worse by more than `tolerance`, and if that is unlike
    the others (below their median by more than `SPREADS` median deviations) or unlike what was
    usual (worse by more than a quarter of the usual gain). If that is most of them, the held-out
    text and not the sites are at fault, and all count.
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
    """What most of those say who give a reason; of equals, the reason that was given first."""
    given = [each.code for shard in opinions for each in _about(site, shard)]
    reasons: list[Code] = [code for code in given if code in ("malformed", "not-finite")]
    return Counter(reasons).most_common(1)[0][0] if reasons else "not-held"


def _all_shares(given: Evidence, chosen: Sequence[str]) -> dict[str, list[list[int]]]:
    """Of each site of the set by shard; none if no rank proposes any. Shares of 0 are shares."""
    by_shard = [_shares_of_shard(given, voters) for voters in given.opinions]
    shares = {site: [of_shard.get(site, []) for of_shard in by_shard] for site in chosen}
    return shares if any(own for of_site in shares.values() for own in of_site) else {}


def _shares_of_shard(given: Evidence, voters: Sequence[Opinions]) -> dict[str, list[int]]:
    """By site: what the ranks of a shard propose, without what sites that withdrew do to it.

    Ranks see all payloads; only here it is known who lets his count. A site that has withdrawn
    sends its residual, which is small, and the others would be cut down to that. A site that most
    ranks say nothing of has no part in it: a few could make it up.
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
    """The same shares if the median site has all of its own, and nobody more than that.

    A share goes with the reciprocal of a norm (or, for `rfa`, of a distance), so that the upper
    median here belongs to the lower median there. If it is 0 the shares do not tell any more who
    sent how much, and stay.
    """
    middle = median_high(shares)
    return [min(WHOLE, share * WHOLE // middle) if middle else share for share in shares]


def _shares(site: str, voters: Sequence[Opinions]) -> list[int]:
    """Number by number, the lower median of what the ranks of a shard propose."""
    proposed = [each.shares for each in _about(site, voters) if each.shares]
    lengths = Counter(len(each) for each in proposed)
    if not lengths:
        return []
    length = lengths.most_common(1)[0][0]
    rows = [each for each in proposed if len(each) == length]
    return [median_low(numbers) for numbers in zip(*rows, strict=True)]
