"""Checks the signed state at the start of a round against the log, as far as the log determines it.

The log determines anchor and momentum (from theta_0 and the payloads), and the exchanges in flight
and their landings. Only the site itself knows its moments, residual and parameters, with these
exceptions. At round 0 they are known. Later, a landing at the end of the previous round sets
reference points (without overlap), and parameters at a boundary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.errors import RecordError
from dilocox.outer.layout import Layout
from dilocox.outer.outer_step import Rule, local_view
from dilocox.record.log.digests import TensorDigest, tensor_digest
from dilocox.record.log.round_document import Document
from dilocox.record.log.state_statements import RoundState
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.origins import Has, origin_before, replay_from
from dilocox.record.verify.replay import Get, Stage, read_listing
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.audit.round_replay import load_tensor
from dilocox.training.builder import RankPlace


def wrong_start(
    course: RunHistory,
    place: RankPlace,
    state: RoundState,
    document: Document,
    get: Get,
    has: Has = lambda _: False,
) -> str | None:
    """Return a description of the first fault of a rank's start state. None if there is none.

    If the record keeps the newest rounds only, anchor and momentum are replayed from a signed
    state that the record keeps with them.

    Args:
        course: History of the run.
        place: The rank.
        state: The rank's statement about its state.
        document: Document of the state, which lists its tensors.
        get: Returns an object of the stores by its SHA-256.
        has: Returns whether a store holds an object.

    Raises:
        RecordError: The log lacks a statement that the check needs.
        MissingError: A store lacks an object that the check needs.
    """
    expected = under_way(course, place.stage, state.round, state.tick)
    odd = _wrong_position(course, state, document.state)
    odd = odd or _wrongly_under_way(course, expected, document.state)
    if odd is not None:
        return odd
    theta = course.state("initial", place.stage)
    if not theta:
        raise RecordError(f"no theta_0 of stage {place.stage} is signed")
    stage = Stage.of(course, place.stage, read_listing(get, theta[-1].listing, theta[-1].root))
    tensors = {each.name: each for each in document.tensors}
    waiting = {step.key.text for step in expected}
    before = _plan_before(course, state.round)
    fixed = _at_their_boundary(course, place.stage, state, len(stage.pieces))
    landed = [
        step
        for step in course.of(place.stage)
        if step.key.round < state.round and step.key.text not in waiting
    ]
    origin = None
    if course.keep != "all":
        where = place.stage, place.shard
        origin = origin_before(course, *where, state.tick, place.site, has, get)
    for run, steps in stage.blocks(landed):
        flats = replay_from(origin, steps, stage, run, place.shard, get, course.momentum_dtype)
        for piece in run:
            own = stage.place(range(piece, piece + 1), run, place.shard)
            for name, flat in zip(("anchor", "momentum"), flats, strict=True):
                full = f"outer/{piece}/{name}"
                if tensors.get(full) != tensor_digest(full, flat[own]):
                    return f"the {name} of piece {piece} is not what the payloads lead to"
            layout = stage.layout(range(piece, piece + 1), place.shard)
            anchor = flats[0][own]
            if state.round == 0:
                odd = _not_theta_0(piece, anchor, tensors)
            elif before is not None:
                odd = _wrong_reference(before, place, piece, anchor, tensors, get)
            if odd is None and piece in fixed:
                odd = _off_its_reference(piece, layout, tensors, get)
            if odd is not None:
                return odd
        if state.round == 0:
            start = {name: stage.load(get, name) for name in stage.names(run)}
            for name, rows in stage.rows(start, place.shard).items():
                if tensors.get(f"live/{name}") != tensor_digest(f"live/{name}", rows):
                    return f"{name} is not theta_0's"
    if state.round == 0:
        odd = next((each.name for each in document.tensors if _begins_at_zero(each)), None)
        if odd is not None:
            return f"{odd} is not zero"
    return None


def _wrong_position(course: RunHistory, state: RoundState, said: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the position of a state. None if the round begins there."""
    if int(said.get("round", -1)) != state.round:
        return f"the state is that of round {said.get('round')}"
    if state.tick != course.plans[state.round]["first_tick"]:
        return f"the state is that of slot {state.tick}, where the round does not begin"
    # A replay goes on from these values: after the last slot it would repeat nothing at all.
    if said.get("slot") != 0 or said.get("dropping") is not False:
        return "the state is one of the middle of a round"
    return None


def _wrongly_under_way(
    course: RunHistory, expected: Sequence[Step], said: Mapping[str, Any]
) -> str | None:
    """Return what is wrong with the exchanges in flight of a state. None if nothing is.

    A replay lands them by the plan in the state, so that plan must be the one in the log. Raises
    `RecordError` if the log has no such plan.
    """
    try:
        items = [
            (str(item["key"]), int(item["lands_at"]), item["plan"]) for item in said["pending"]
        ]
    except (KeyError, TypeError, ValueError):
        return "the exchanges under way are not named"
    found = sorted((key, lands_at) for key, lands_at, _ in items)
    if found != sorted((step.key.text, step.tick + step.delay) for step in expected):
        return "other exchanges are under way than the log says"
    rounds = {step.key.text: step.key.round for step in expected}
    for key, _, own in items:
        agreed = course.plans.get(rounds[key])
        if agreed is None:
            raise RecordError(f"the log has no plan by which {key} lands")
        try:
            # Parsed as a rank does that resumes from this state.
            plan = RoundPlan.model_validate_json(json.dumps(own))
        except ValueError:
            return f"{key} is under way without a plan"
        if plan != RoundPlan.model_validate(agreed):
            return f"{key} is to land by another plan than the log says"
    return None


def _plan_before(course: RunHistory, round_: int) -> RoundPlan | None:
    """Return the plan of the round before. None for round 0, or if the log has none."""
    said = course.plans.get(round_ - 1)
    return None if said is None else RoundPlan.model_validate(said)


def _at_their_boundary(course: RunHistory, stage: int, state: RoundState, pieces: int) -> set[int]:
    """Return the pieces whose boundary was in the slot at whose end the state was taken.

    Their parameters were not trained since the boundary.
    """
    return {
        piece
        for step in course.of(stage)
        if step.key.round == state.round - 1 and step.tick == state.tick
        for piece in step.pieces(pieces)
    }


def _not_theta_0(piece: int, anchor: Tensor, tensors: Mapping[str, TensorDigest]) -> str | None:
    """Return a fault if a piece's reference point is not theta_0, as it must be before round 0."""
    name = f"outer/{piece}/reference"
    if tensors.get(name) == tensor_digest(name, anchor):
        return None
    return f"the reference of piece {piece} is not theta_0"


def _wrong_reference(
    before: RoundPlan,
    place: RankPlace,
    piece: int,
    anchor: Tensor,
    tensors: Mapping[str, TensorDigest],
    get: Get,
) -> str | None:
    """Return what is wrong with a piece's reference point after the round of plan `before`.

    None if nothing is, or if the reference point is unknown. It is known without overlap only: a
    landing sets it, and training does not move it. `anchor`: anchor of the piece, as it follows
    from the payloads.
    """
    if before.overlap != "none" or before.delay:
        return None
    name = f"outer/{piece}/reference"
    landed = _landed(before, place, piece, anchor, tensors, get)
    if any(tensors.get(name) == tensor_digest(name, view) for view in landed):
        return None
    return f"the reference of piece {piece} is not where it has landed"


def _landed(
    plan: RoundPlan,
    place: RankPlace,
    piece: int,
    anchor: Tensor,
    tensors: Mapping[str, TensorDigest],
    get: Get,
) -> Iterator[Tensor]:
    """Yield the points from which a site may go on after a landing of `plan` without overlap.

    A site that has given up a round, or has just joined, goes on from the anchor itself.
    """
    yield anchor
    residual, member = tensors.get(f"outer/{piece}/residual"), plan.members.get(place.site)
    if residual is None or member is None or not plan.residual_view:
        return
    kept = load_tensor(residual, get)
    if kept.shape != anchor.shape:
        return
    rule = Rule(plan.overlap, plan.learning_rate, plan.momentum,
                residual=plan.residual_view / member.weight)  # fmt: skip
    yield local_view(rule, anchor, torch.zeros_like(anchor), None, kept)


def _off_its_reference(
    piece: int, layout: Layout, tensors: Mapping[str, TensorDigest], get: Get
) -> str | None:
    """Return a fault if parameters of a piece are not at its reference point, else None."""
    about = tensors.get(f"outer/{piece}/reference")
    if about is None or about.dtype != "float32" or about.shape != (layout.length,):
        return f"the reference of piece {piece} is none"
    for name, view in layout.views(load_tensor(about, get)).items():
        if tensors.get(f"live/{name}") != tensor_digest(f"live/{name}", view):
            return f"{name} is not at its reference, though its boundary was just before"
    return None


def _begins_at_zero(about: TensorDigest) -> bool:
    """Return True for a faulty tensor: it must be zero before the run, and is not."""
    kind = about.name.rsplit("/", 1)[-1]
    if not about.name.startswith("inner/") and kind not in ("residual", "previous", "own"):
        return False
    dtype = getattr(torch, about.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return True
    return tensor_digest(about.name, torch.zeros(about.shape, dtype=dtype)) != about


def under_way(course: RunHistory, stage: int, round_: int, tick: int) -> list[Step]:
    """Return the exchanges of a stage that are in flight when a round begins.

    `tick`: slots since the start of the run. Only exchanges of the previous round can be in
    flight: a piece's exchange lands at the piece's next boundary at the latest, and every round
    has one.
    """
    return [
        step
        for step in course.steps.values()
        if step.key.stage == stage and step.key.round == round_ - 1 and not step.flush
        and step.tick + step.delay > tick
    ]  # fmt: skip
