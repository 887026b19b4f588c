"""Is the state in which a round began the one that the log demands, as far as the log can tell?

Anchor and momentum follow from theta_0 and the payloads, and so does what was under way. Moments,
residual and parameters of a site are its own: what they were is what the round before ended in.
Of round 0 they are known.
"""

from __future__ import annotations

import torch

from dilocox.assembly import Place
from dilocox.errors import RecordError
from dilocox.record.course import Course, RoundState, Step
from dilocox.record.digests import TensorDigest, tensor_digest
from dilocox.record.replay import Get, Stage, read_listing, replay_steps
from dilocox.record.rounds import Document


def wrong_start(
    course: Course, place: Place, state: RoundState, document: Document, get: Get
) -> str | None:
    """What is not as it has to be, for people; none if nothing is.

    Raises `RecordError`, `MissingError` where the record does not hold what this needs.
    """
    if int(document.state.get("round", -1)) != state.round:
        return f"the state is that of round {document.state.get('round')}"
    expected = under_way(course, place.stage, state.round, state.tick)
    try:
        found = {(item["key"], int(item["lands_at"])) for item in document.state["pending"]}
    except (KeyError, TypeError, ValueError):
        return "the exchanges under way are not named"
    if found != {(step.key.text, step.tick + step.delay) for step in expected}:
        return "other exchanges are under way than the log says"
    theta = course.state("initial", place.stage)
    if not theta:
        raise RecordError(f"no theta_0 of stage {place.stage} is signed")
    stage = Stage.of(course, place.stage, read_listing(get, theta[-1].listing, theta[-1].root))
    tensors = {each.name: each for each in document.tensors}
    waiting = {step.key.text for step in expected}
    landed = [
        step
        for step in course.of(place.stage)
        if step.key.round < state.round and step.key.text not in waiting
    ]
    for run, steps in stage.blocks(landed):
        names = stage.names(run)
        start = {name: stage.load(get, name) for name in names}
        moving = stage.momentum(get, names)
        flats = replay_steps(
            steps, stage, run, start, moving, place.shard, get, course.momentum_dtype
        )
        for piece in run:
            own = stage.place(range(piece, piece + 1), run, place.shard)
            for name, flat in zip(("anchor", "momentum"), flats, strict=True):
                full = f"outer/{piece}/{name}"
                if tensors.get(full) != tensor_digest(full, flat[own]):
                    return f"the {name} of piece {piece} is not what the payloads lead to"
            # Nothing has moved yet: what the first contributions are taken from is theta_0.
            reference = f"outer/{piece}/reference"
            if state.round == 0 and tensors.get(reference) != tensor_digest(
                reference, flats[0][own]
            ):
                return f"the reference of piece {piece} is not theta_0"
        if state.round == 0:
            for name, rows in stage.rows(start, place.shard).items():
                if tensors.get(f"live/{name}") != tensor_digest(f"live/{name}", rows):
                    return f"{name} is not theta_0's"
    if state.round == 0:
        odd = next((each.name for each in document.tensors if _begins_at_zero(each)), None)
        if odd is not None:
            return f"{odd} is not zero"
    return None


def _begins_at_zero(about: TensorDigest) -> bool:
    """True for a tensor that has to be zero before the run, and is not."""
    kind = about.name.rsplit("/", 1)[-1]
    if not about.name.startswith("inner/") and kind not in ("residual", "previous", "own"):
        return False
    dtype = getattr(torch, about.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return True
    return tensor_digest(about.name, torch.zeros(about.shape, dtype=dtype)) != about


def under_way(course: Course, stage: int, round_: int, tick: int) -> list[Step]:
    """Exchanges of a stage that are between boundary and landing when a round begins.

    `tick`: slots that have ended by then. What is under way of a piece lands at the piece's next
    boundary at the latest, and every round has one.
    """
    return [
        step
        for step in course.steps.values()
        if step.key.stage == stage and step.key.round == round_ - 1 and not step.flush
        and step.tick + step.delay > tick
    ]  # fmt: skip
