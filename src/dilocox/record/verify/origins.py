"""Origin of a replay: theta_0, or the signed start state of a window of payloads.

A run file may bound the payloads that stay (`record.keep`). Rounds before the oldest window cannot
be replayed then. The replay of the later rounds trusts the start state of that window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilocox.config.codec_spec import parse_spec
from dilocox.errors import DilocoxError, RecordError
from dilocox.outer.outer_step import MOMENTUM_DTYPES
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.state_statements import AnchorState, State
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.replay import (
    Get,
    Stage,
    StartTensors,
    behind,
    payload_tensor,
    read_listing,
    replay_flat,
    replay_steps,
)
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer import windows
from dilocox.record.writer.rank_recorder import MOMENTUM_OF

Has = Callable[[str], bool]
"""Returns True if some store has an object of this SHA-256."""
Lost = Collection[tuple[str, int]]
"""(exchange key, shard) of payloads that no store has."""


@dataclass(frozen=True)
class Origin:
    """Signed state of a rank, from which the replay of the rank begins."""

    state: AnchorState
    tensors: dict[str, TensorDigest]
    """The state's tensors by name: `anchor/PIECE` and `momentum/PIECE`."""

    @classmethod
    def of(cls, state: AnchorState, get: Get) -> Origin:
        """Read the state's list of tensors. Raises `RecordError`."""
        listed = read_listing(get, state.listing, state.root)
        return cls(state, {each.name: each for each in listed})

    def holds(self, step: Step) -> bool:
        """Return True if this state includes an outer step.

        Raises `RecordError` if only some of the step's pieces have taken the step.
        """
        landed = [self.state.landed[piece] for piece in step.pieces(len(self.state.landed))]
        inside = {step.key.round <= last for last in landed}
        if len(inside) > 1:
            raise RecordError(
                f"{step.key.text}: the state of round {self.state.round} includes only some of its "
                "pieces"
            )
        return inside.pop()

    def load(
        self, stage: Stage, run: range, get: Get, momentum_dtype: str
    ) -> tuple[Tensor, Tensor]:
        """Load the anchor, flat fp32, and the momentum, flat in `momentum_dtype`, of `run` pieces.

        Raises `RecordError` if a tensor does not have the dtype, shape or bytes of its piece.
        """
        if len(self.state.landed) != len(stage.pieces):
            raise RecordError(f"the anchor of round {self.state.round} has other pieces")
        if momentum_dtype not in MOMENTUM_DTYPES:
            raise RecordError(f"this dilocox knows no outer momentum in {momentum_dtype}")
        dtypes = {"anchor": torch.float32, "momentum": MOMENTUM_DTYPES[momentum_dtype]}
        flats: dict[str, list[Tensor]] = {"anchor": [], "momentum": []}
        for piece in run:
            length = stage.layout(range(piece, piece + 1), self.state.shard).length
            for kind, dtype in dtypes.items():
                about = self.tensors.get(f"{kind}/{piece}")
                name = str(dtype).removeprefix("torch.")
                if about is None or (about.dtype, about.shape) != (name, (length,)):
                    raise RecordError(f"the {kind} of piece {piece} is not signed as {name}")
                data = get(about.sha256)
                if len(data) != length * dtype.itemsize:
                    raise RecordError(f"the {kind} of piece {piece} has {len(data)} bytes")
                flats[kind].append(payload_tensor(data).view(dtype))
        return torch.cat(flats["anchor"]), torch.cat(flats["momentum"])


def may_lack(course: RunHistory, listed: Callable[[State], list[TensorDigest]]) -> bool:
    """Return True if `record.keep` may have removed payloads of this run.

    With "auto" the model's size decides: for a small model a signed anchor does not permit removal.
    `listed`: returns the tensors of a signed state; its exceptions are raised.
    """
    if course.keep != "auto":
        return course.keep != "all"
    theta = [course.state("initial", stage)[-1:] for stage in range(course.stages)]
    tensors = [each for states in theta for state in states for each in listed(state)]
    own = [math.prod(each.shape) for each in tensors if not each.name.startswith(MOMENTUM_OF)]
    return sum(own) >= windows.WHOLE_BELOW


def lost_payloads(course: RunHistory, has: Has, get: Get) -> set[tuple[str, int]]:
    """Return (exchange key, shard) of each counted payload that no store has.

    Reads payloads that name other payloads. Raises `RecordError` for damaged bytes.
    """
    lost = set()
    for step in course.steps.values():
        names_others = step.exchange == "reduce" or parse_spec(step.codec).record.agrees_first
        for place, digest in step.payloads.items():
            key = step.key.text, int(place.rsplit("/", 1)[1])
            if not has(digest) or (names_others and not all(map(has, behind(step, get(digest))))):
                lost.add(key)
    return lost


def origin_of(
    course: RunHistory, stage: int, shard: int, lost: Lost, has: Has, get: Get
) -> Origin | None:
    """Return the oldest state that includes every step with a lost payload; None for theta_0.

    An unusable state is skipped, so that a site with wrong or damaged states does not harm the
    states of other sites. Raises `MissingError` if there is no state, and `RecordError` naming the
    signers of the first state if all states are unusable.
    """
    steps = [step for step in course.of(stage) if (step.key.text, shard) in lost]
    if not steps:
        return None
    unusable: RecordError | None = None
    for state in _states(course, stage, shard):
        if not has(state.listing):
            continue
        try:
            found = Origin.of(state, get)
            whole = all(has(each.sha256) for each in found.tensors.values())
            if whole and all(found.holds(step) for step in steps):
                return found
        except DilocoxError as error:
            who = ", ".join(signers(course, state))
            unusable = unusable or RecordError(f"the anchor that {who} signed: {error}")
    if unusable is not None:
        raise unusable
    raise MissingError(f"payloads of {steps[-1].key.text} are in no store")


def signers(course: RunHistory, state: AnchorState) -> list[str]:
    """Return the sites that signed the same root for the same rank and round, sorted."""
    place = (state.stage, state.shard, state.round, state.root)
    return sorted(
        {
            each.site
            for each in course.anchors
            if (each.stage, each.shard, each.round, each.root) == place
        }
    )


def origins_of(course: RunHistory, has: Has, get: Get) -> dict[tuple[int, int], Origin]:
    """Return the origins of replays by (stage, shard), of a run that removes old payloads.

    A (stage, shard) that is left out begins with theta_0. Raises `NotRunError` if more payloads are
    gone than `record.keep` allows, and `RecordError` for damaged bytes.
    """
    lost = lost_payloads(course, has, get)
    last = max((step.key.round for step in course.steps.values()), default=0)
    found = {}
    for place in ((n, shard) for n in range(course.stages) for shard in range(course.shards)):
        try:
            origin = origin_of(course, *place, lost, has, get)
        except MissingError as error:
            raise NotRunError(f"{error}; name more stores with --store") from None
        if origin is None:
            continue
        found[place] = origin
        if isinstance(course.keep, int) and origin.state.round > last - course.keep:
            raise NotRunError(
                f"payloads before round {origin.state.round} are in no store, where the newest "
                f"{course.keep} rounds should be (record.keep); name more stores with --store"
            )
    return found


def replays(origins: Mapping[tuple[int, int], Origin], digest: str, step: Step) -> bool:
    """Return True if the replay of some shard needs a step's payload with this SHA-256."""
    own = [
        origins.get((step.key.stage, int(place.rsplit("/", 1)[1])))
        for place, each in step.payloads.items()
        if each == digest
    ]
    return any(origin is None or not origin.holds(step) for origin in own)


def origin_before(
    course: RunHistory, stage: int, shard: int, tick: int, besides: str, has: Has, get: Get
) -> Origin | None:
    """Return the newest usable state at or before `tick` that a site other than `besides` signed.

    Returns None, for theta_0, if there is no such state, or if all payloads up to `tick` are
    stored. Theta_0 is safer, because a false state of one site would convict another site. Raises
    `RecordError` for damaged payloads.

    Args:
        course: History of the run.
        stage: Stage of the rank.
        shard: Shard of the rank.
        tick: Slots of the run that have ended.
        besides: The audited site, whose signature alone does not suffice.
        has: Returns True if a store has an object.
        get: Returns the bytes of an object.
    """
    steps = {
        key: step
        for key, step in course.steps.items()
        if step.key.stage == stage and step.tick <= tick
    }
    lost = lost_payloads(replace(course, steps=steps), has, get)
    if not any(of == shard for _, of in lost):
        return None
    for state in reversed(_states(course, stage, shard)):
        others = set(signers(course, state)) - {besides}
        if state.tick > tick or not others or not has(state.listing):
            continue
        with contextlib.suppress(DilocoxError):  # a bad state of one site stops no audit of others
            found = Origin.of(state, get)
            if all(has(each.sha256) for each in found.tensors.values()):
                return found
    return None


def _states(course: RunHistory, stage: int, shard: int) -> list[AnchorState]:
    """Return the states of a rank on which all their signers agree, oldest first.

    Each list of tensors is tried, because a site may sign the right root with a list that is in no
    store.
    """
    known: dict[int, list[AnchorState]] = {}
    for state in course.anchors:
        if (state.stage, state.shard) == (stage, shard):
            known.setdefault(state.round, []).append(state)
    return [
        state
        for _, states in sorted(known.items())
        if len({(each.root, each.landed) for each in states}) == 1
        for state in {each.listing: each for each in states}.values()
    ]


def replay_from(
    origin: Origin | None,
    steps: list[Step],
    stage: Stage,
    run: range,
    shard: int,
    get: Get,
    momentum_dtype: str,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Replay like `replay_steps`, but from `origin`; None: from theta_0.

    Steps that the origin includes already are skipped.
    """
    if origin is None:
        start = StartTensors.load(stage, stage.names(run), get)
        return replay_steps(steps, stage, run, start, shard, get, momentum_dtype, on_step)
    anchor, momentum = origin.load(stage, run, get, momentum_dtype)
    left = list(_left(origin, steps, on_step))
    replay_flat(left, stage, run, anchor, momentum, shard, get, on_step)
    return anchor, momentum


def _left(origin: Origin, steps: list[Step], on_step: Callable[[], None]) -> Iterator[Step]:
    for step in steps:
        if origin.holds(step):
            on_step()
        else:
            yield step
