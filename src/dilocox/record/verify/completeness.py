"""Finds missing or contradictory parts in the history of a run. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from dilocox.config.codec_kinds import find_kind
from dilocox.config.codec_spec import WITH_MOMENTS, names_payload
from dilocox.config.methods import find_method
from dilocox.record.log.digests import sealed
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory


def gaps(course: RunHistory) -> list[str]:
    """List what is missing or contradictory in a finished run, one line for each problem."""
    if not course.steps:
        return ["no outer step is signed"]
    last = max(step.key.round for step in course.steps.values())
    by_round: dict[tuple[int, int], list[Step]] = {}
    for step in course.steps.values():
        by_round.setdefault((step.key.stage, step.key.round), []).append(step)
    found = []
    for stage in range(course.stages):
        for round_ in range(last + 1):
            steps = by_round.get((stage, round_), [])
            planned = course.plans.get(round_, {}).get("fragments")
            found += _incomplete(stage, round_, steps, course.pieces, planned)
            if any(step.flush != (round_ == last) for step in steps):
                found.append(
                    f"stage {stage}: round {round_} is the last round but not the flush, or the "
                    "flush but not the last round"
                )
            if not steps:
                break  # a stranger's log may name any number of later rounds
    for step in course.steps.values():
        if step.key.stage >= course.stages:
            found.append(f"{step.key.text}: no such fragment")
        found += _unsigned(course, step)
    found += _torn(course)
    for kind in ("initial", "final"):
        for stage in range(course.stages):
            # Lists of tensors are not compared: whoever reads a state takes one that is its list.
            roots = {
                (state.root, state.published and state.published[0])
                for state in course.state(kind, stage)
            }
            if len(roots) != 1:
                found.append(f"stage {stage}: {len(roots)} different {kind} states are signed")
    return found


def _torn(course: RunHistory) -> list[str]:
    """List the start states of replays on which sites' signatures disagree, one line each."""
    roots: dict[tuple[int, int, int], dict[tuple[str, tuple[int, ...]], str]] = {}
    for state in course.anchors:
        place = (state.round, state.stage, state.shard)
        roots.setdefault(place, {})[state.root, state.landed] = state.site
    return [
        f"stage {stage} shard {shard}: {' and '.join(sorted(by_root.values()))} have signed "
        f"different anchors at the beginning of round {round_}"
        for (round_, stage, shard), by_root in roots.items()
        if len(by_root) > 1
    ]


def _incomplete(
    stage: int, round_: int, steps: Sequence[Step], pieces: int, planned: int | None
) -> list[str]:
    """List the problems of one stage's outer steps of one round.

    Args:
        stage: The stage.
        round_: The round.
        steps: The stage's outer steps of the round.
        pieces: Number of pieces of a stage.
        planned: Number of fragments by the round's plan; None if the plan is not in the log.
    """
    if not steps:
        return [f"stage {stage}: no outer step of round {round_}"]
    number = steps[0].fragments
    if any(step.fragments != number for step in steps):
        return [f"stage {stage}: the outer steps of round {round_} do not agree on the number of "
                "fragments"]  # fmt: skip
    if not 1 <= number <= pieces:
        return [f"{steps[0].key.text}: {number} fragments, where a stage has {pieces} pieces"]
    if planned not in (None, number):
        return [f"{steps[0].key.text}: {number} fragments, where the plan has {planned}"]
    there = {step.key.fragment for step in steps}
    found = [f"{step.key.text}: no such fragment" for step in steps if step.key.fragment >= number]
    missing = next((fragment for fragment in range(number) if fragment not in there), None)
    if missing is not None:
        found.append(f"stage {stage} fragment {missing}: no outer step of round {round_}")
    return found


def broken_commitments(course: RunHistory) -> list[str]:
    """List counted contributions without a commitment before any payload was sent, one line each.

    A rank votes after it has received payloads. So in the log all commitments to an exchange must
    come before the first vote on it, in whatever attempt.
    """
    found = []
    votes: dict[str, dict[int, int]] = {}
    for (key, attempt), number in course.votes.items():
        votes.setdefault(key, {})[attempt] = number
    for step in course.steps.values():
        key = step.key.text
        first = _first_vote(course, step, votes.get(key, {}))
        bound = names_payload(step.exchange, step.codec)
        for site in step.set:
            for shard in range(course.shards):
                said = course.commitments.get((key, site, shard))
                payload = step.payloads.get(f"{site}/{shard}", "")
                if said is None:
                    found.append(f"{key}: {site} has not committed to its contribution")
                elif said.number >= first:
                    found.append(f"{key}: {site} has committed only after payloads were sent")
                elif bound and said.payload != sealed(payload, course.run, key, site, shard):
                    found.append(f"{key}: {site} has committed to another payload")
    return found


def _first_vote(course: RunHistory, step: Step, votes: Mapping[int, int]) -> int:
    """Return the index of the first vote on an exchange; -1 if its last attempt has none.

    Votes from before the latest resume that the decision follows are not about this decision.
    `votes`: index of the first vote by attempt.
    """
    decided = course.numbers.get(step.key.text, course.read)
    resumed = bisect.bisect_left(course.resumes, decided)
    since = course.resumes[resumed - 1] if resumed else -1
    if votes.get(step.attempt, -1) <= since:
        return -1
    return min((n for each, n in votes.items() if n > since and each <= step.attempt), default=-1)


def _unsigned(course: RunHistory, step: Step) -> list[str]:
    """List the counted payloads of a step that their site has not signed, one line each."""
    other = [f"{step.key.text}: its payloads are not those of its contribution set"]
    if len(step.payloads) != len(step.set) * course.shards:
        return other  # a log may name any number of sites and shards
    places = {f"{site}/{shard}": (site, shard) for site in step.set
              for shard in range(course.shards)}  # fmt: skip
    if set(places) != set(step.payloads):
        return other
    return [
        f"{step.key.text}: {site} has not signed the payload that counts"
        for place, (site, shard) in places.items()
        if course.contributions.get((step.key.text, step.attempt, site, shard))
        != step.payloads[place]
    ]


def need_extensions(course: RunHistory) -> None:
    """Raise `NotRunError` if this machine lacks a package that brings the run's method or codec."""
    lacking = unknown_extension(course)
    if lacking is not None:
        raise NotRunError(
            f"the run had {lacking}, which this dilocox does not know; install the package that "
            "has it (docs/extending.md)"
        )


def unknown_extension(course: RunHistory) -> str | None:
    """The run's method or codec, if this machine lacks the package that brings it; else None."""
    method = course.config["outer"].get("method", "dilocox")
    if find_method(method) is None:
        return f"method {method!r}"
    codecs = [step.codec for step in course.steps.values()]
    section = course.config.get("compression")
    if isinstance(section, dict):
        codecs.append(str(section.get("codec", "none")))
    for codec in codecs:
        if find_kind(codec.removesuffix(WITH_MOMENTS).partition(":")[0]) is None:
            return f"codec {codec!r}"
    return None
