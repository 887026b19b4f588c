"""Compares the replay of a round with what the ranks of a site have signed about the round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.record.log.audit_verdicts import AuditVerdict, Verdict
from dilocox.record.log.round_document import Document, Fingerprint
from dilocox.record.log.state_statements import RoundState
from dilocox.tools.audit.round_replay import RankReplay
from dilocox.training.builder import RankPlace

TOLERANCE = 1e-4
"""Largest relative difference of losses, gradient norms and parameters between classes, in fp32.
Measured: see docs/notes/audit.md."""
PAYLOAD_TOLERANCE = 2e-2
"""Largest relative difference of payloads between classes. It is larger because a value on the
edge between two codes may be rounded to either."""
STATE_TOLERANCE = 1e-1
"""Largest relative difference between classes of moments, residual and the rest of a state after
the round. It is larger still because the residual holds the whole difference between two codes."""


@dataclass(frozen=True)
class SignedRound:
    """Signed facts of a rank about the round: its states before and after, and its steps."""

    place: RankPlace
    state: RoundState
    start: Document
    steps: list[Fingerprint] | None
    after: RoundState | None
    end: Document | None
    contributed: tuple[str, ...] = ()
    """Keys of the exchanges whose payloads of the rank a replay has to repeat."""


@dataclass(frozen=True)
class Bad:
    """A difference between the replay and what a rank has signed."""

    step: int
    """See `Verdict.first_bad_step`."""
    what: str
    """Description, for the verdict's reason."""


class JudgedError(Exception):
    """Carries a verdict that needs no replay, or the reason why no replay is possible."""

    def __init__(self, verdict: AuditVerdict, reason: str, step: int | None = None) -> None:
        super().__init__(reason)
        self.verdict: AuditVerdict = verdict
        self.reason, self.step = reason, step


def compared(
    config: RunConfig,
    site: str,
    round_: int,
    plan: RoundPlan,
    began: Sequence[SignedRound],
    replays: Sequence[RankReplay],
) -> Verdict:
    """Return the verdict on a round by the replays of its ranks.

    Args:
        config: the run file.
        site: name of the site.
        round_: number of the round.
        plan: plan of the round.
        began: what each rank of the site has signed.
        replays: the replay of each rank, in the same order.

    Raises:
        JudgedError: if the replays do not allow a verdict.
    """
    pairs = list(zip(began, replays, strict=True))
    same = all(each.start.facts == replay.facts for each, replay in pairs)
    bad = [b for each, replay in pairs for b in differences(plan, each, replay)]
    if not bad:
        signed = plan.kind == "flush" or all(each.end is not None for each in began)
        more = "" if signed else "; it has signed no fingerprints of its steps"
        count = sum(len(replay.payloads) for replay in replays)
        reason = f"{plan.steps_of(site)} steps, {count} payloads, the same bits{more}"
        return Verdict(site, round_, "EXACT", reason, same_class=same)
    # The flush has no inner steps.
    repeats = plan.kind == "flush" or all(_repeats(config, each) for each in began)
    if not (same and repeats):
        found = replace(_between_classes(site, round_, plan, pairs, repeats), same_class=same)
        if found.verdict == "MISMATCH" and not repeats:
            # A difference in the last bit may send a token to another expert, and then have any
            # size.
            raise JudgedError("NOT_RUN", f"{_OWN_BITS} ({found.reason})")
        return found
    first = min(bad, key=lambda each: each.step)
    return Verdict(site, round_, "MISMATCH", first.what, first.step, same_class=True)


_OWN_BITS = "the site's kernels are not deterministic: it would not repeat its own bits itself"


def _repeats(config: RunConfig, began: SignedRound) -> bool:
    """Return whether the rank would compute the same bits again, by its own facts and the run file.

    If the run file asks for determinism, only a rank on a GPU may state that it lacks it: an
    operation may have no deterministic kernel there.
    """
    facts = began.start.facts
    may_lack = not config.site.deterministic or facts.get("device") != "cpu"
    return facts.get("deterministic") is not False or not may_lack


def differences(plan: RoundPlan, began: SignedRound, replay: RankReplay) -> Iterator[Bad]:
    """Yield the differences between a rank's signed bits and its replay."""
    where, count = began.place, plan.steps_of(began.place.site)
    if began.steps is not None:
        if len(began.steps) != count:
            yield Bad(
                min(len(began.steps), count) - 1,
                f"{where}: {len(began.steps)} steps instead of {count}",
            )
        for number, (signed, found) in enumerate(zip(began.steps, replay.steps, strict=False)):
            if signed != found:
                yield Bad(number, f"{where}: {_unlike(signed, found)} of step {number}")
                break
    yield from _left_out(plan, began, replay)
    for check in replay.payloads:
        when = f"after step {check.after - 1}" if check.after else "from before the round"
        if not check.same:
            yield Bad(check.after - 1, f"{where}: another payload of {check.key}, {when}")
        elif not check.committed:
            what = f"another contribution to {check.key} than it had committed to, {when}"
            yield Bad(check.after - 1, f"{where}: {what}")
    if began.end is not None and not _equal(began.end, replay.end):
        yield Bad(count - 1, f"{where}: {_apart(began.end, replay.end)} after the round")


def _left_out(plan: RoundPlan, began: SignedRound, replay: RankReplay) -> Iterator[Bad]:
    """Yield the steps and payloads of the round that a replay from the rank's state did not repeat.

    A replay compares nothing that it does not repeat, and the state decides what it repeats.
    """
    where, count = began.place, plan.steps_of(began.place.site)
    if len(replay.steps) != count:
        what = f"{where}: from its state {len(replay.steps)} steps follow instead of {count}"
        yield Bad(min(len(replay.steps), count) - 1, what)
    repeated = {check.key for check in replay.payloads}
    for key in began.contributed:
        if key not in repeated:
            before = ExchangeKey.parse(key).round < plan.round
            what = f"{where}: no payload of {key} follows from its state"
            yield Bad(-1 if before else count - 1, what)


def _equal(signed: Document, found: Document) -> bool:
    """Return whether two states are equal, whatever their determinism classes: a resumed run may go
    on on another machine."""
    return (signed.state, signed.tensors) == (found.state, found.tensors)


def _unlike(signed: Fingerprint, found: Fingerprint) -> str:
    if signed.loss != found.loss:
        return f"loss {float.fromhex(signed.loss):.9g} instead of {float.fromhex(found.loss):.9g}"
    if signed.norm != found.norm:
        norms = [float.fromhex(each.norm) for each in (signed, found)]
        return f"gradient norm {norms[0]:.9g} instead of {norms[1]:.9g}"
    return "other parameters at the end"


def _apart(signed: Document, found: Document) -> str:
    """Describe the difference of two states."""
    ours = {each.name: each for each in found.tensors}
    names = [each.name for each in signed.tensors if ours.get(each.name) != each]
    if names:
        return f"another {names[0]} and {len(names) - 1} more tensors" if names[1:] else (
            f"another {names[0]}"
        )  # fmt: skip
    return "another position or other exchanges under way"


def _between_classes(
    site: str,
    round_: int,
    plan: RoundPlan,
    pairs: Sequence[tuple[SignedRound, RankReplay]],
    repeats: bool = True,
) -> Verdict:
    """Return the verdict on a replay in another determinism class, by tolerances.

    `repeats`: whether the site's kernels are deterministic.
    """
    here = "auditor and site are of different determinism classes" if repeats else _OWN_BITS
    if any(each.start.facts["precision"] != "float32" for each, _ in pairs):
        raise JudgedError("NOT_RUN", f"{here}, and in bf16 honest differences say nothing")
    if plan.kind != "flush" and any(each.steps is None for each, _ in pairs):
        raise JudgedError("NOT_RUN", f"{here}, and no fingerprints were signed to compare")
    largest, bad, count = 0.0, list[Bad](), plan.steps_of(site)
    for each, replay in pairs:
        steps = each.steps or []
        if len(steps) != count:
            bad.append(Bad(0, f"{each.place}: {len(steps)} steps instead of {count}"))
        for number, (signed, found) in enumerate(zip(steps, replay.steps, strict=False)):
            apart = max(relative(signed.loss, found.loss), relative(signed.norm, found.norm))
            largest = max(largest, apart)
            if apart > TOLERANCE:
                bad.append(Bad(number, f"{each.place}: {_unlike(signed, found)} of step {number}"))
        bad += _left_out(plan, each, replay)
        for check in replay.payloads:
            if check.difference is not None and check.difference > PAYLOAD_TOLERANCE:
                what = f"{each.place}: the payload of {check.key} is {check.difference:.1g} off"
                bad.append(Bad(check.after - 1, what))
            if not check.moments:
                what = f"{each.place}: the payload of {check.key} carries other second moments"
                bad.append(Bad(check.after - 1, what))
        for kind, apart in replay.kept.items():
            if apart > STATE_TOLERANCE:
                what = f"{each.place}: its {kind} after the round is {apart:.1g} off"
                bad.append(Bad(count - 1, what))
        if replay.moved is not None:
            largest = max(largest, replay.moved)
            if replay.moved > TOLERANCE:
                what = f"{each.place}: parameters after the round {replay.moved:.1g} off"
                bad.append(Bad(count - 1, what))
    if bad:
        first = min(bad, key=lambda one: one.step)
        return Verdict(
            site, round_, "MISMATCH", f"{here}; {first.what}", first.step, largest, False
        )
    reason = f"{here}; relative difference {largest:.1g}, at most {TOLERANCE:g}"
    return Verdict(site, round_, "WITHIN_TOL", reason, None, largest, False)


def relative(signed: str, found: str) -> float:
    """Return the relative difference of two float64 values, given as hex texts.

    It is 0 if both are NaN, and infinite if only one of them is finite.
    """
    a, b = float.fromhex(signed), float.fromhex(found)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
