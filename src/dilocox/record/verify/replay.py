"""Exact replay of outer steps from theta_0 and the payloads, with the same code as training.

Decoding, averages and the outer optimizer give the same bits on every machine (see
`dilocox.compression`). So if the replay does not give the signed anchor, the record does not belong
to the model. The replay repeats nothing that one site computed alone: neither inner steps nor a
low-rank basis.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression import FragmentCodec, compressor
from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.protocol.fragment_groups import apart
from dilocox.errors import DilocoxError, RecordError
from dilocox.outer.aggregation import aggregate
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.layout import Layout, local_shapes, split_pieces
from dilocox.outer.outer_step import MOMENTUM_DTYPES, as_kept, nesterov_step
from dilocox.record.log.digests import TensorDigest, stage_root, tensor_digest
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import MOMENTUM_OF

Get = Callable[[str], bytes]
"""Returns the bytes of a SHA-256, hex. Raises `RecordError`."""
DIGEST_BYTES = 32
"""Bytes of one SHA-256: of each chunk in a `reduce` index, and of the basis at the beginning of a
low-rank payload."""


def read_listing(get: Get, digest: str, root: str) -> list[TensorDigest]:
    """Read the list of a signed state's tensors, in model order, and check it against `root`.

    Raises `RecordError` if the list is missing or malformed, or has another root.
    """
    try:
        tensors = [TensorDigest.from_json(each) for each in json.loads(get(digest))]
    except (ValueError, TypeError, RecursionError):
        raise RecordError(f"{digest[:12]}…: not a list of tensors") from None
    if stage_root(tensors).hex() != root:
        raise RecordError(f"{digest[:12]}…: this list of tensors does not have the signed root")
    return tensors


@dataclass(frozen=True)
class Stage:
    """One stage's theta_0, divided into pieces and shards."""

    stage: int
    shards: int
    tensors: Mapping[str, TensorDigest]
    """Tensors of theta_0 by name, in model order."""
    pieces: tuple[tuple[str, ...], ...]
    """Tensor names of each piece; neighbouring pieces were exchanged as fragments."""
    momenta: Mapping[str, TensorDigest]
    """Initial outer momentum by the same names; empty: zero."""

    @classmethod
    def of(cls, course: RunHistory, stage: int, tensors: Sequence[TensorDigest]) -> Stage:
        """Divide a stage's signed initial `tensors`.

        Raises `RecordError` if a tensor is not fp32 or the momentum is incomplete, and
        `ConfigError` if the stage cannot be divided as the run file says.
        """
        for each in tensors:
            if each.dtype != "float32":
                raise RecordError(f"{each.name}: an anchor is fp32, this is {each.dtype}")
        known = {each.name: each for each in tensors}
        theta = {n: each for n, each in known.items() if not n.startswith(MOMENTUM_OF)}
        momenta = {n: known[MOMENTUM_OF + n] for n in theta if MOMENTUM_OF + n in known}
        if len(theta) + len(momenta) != len(tensors) or len(momenta) not in (0, len(theta)):
            raise RecordError(f"stage {stage}: its outer momentum is not one of its tensors")
        sizes = {name: math.prod(each.shape) for name, each in theta.items()}
        pieces = tuple(tuple(names) for names in split_pieces(sizes, course.pieces))
        return cls(stage, course.shards, theta, pieces, momenta)

    def layout(self, pieces: range, shard: int) -> Layout:
        """Return the layout of neighbouring pieces in a rank's buffer."""
        layouts = []
        for names in self.pieces[pieces.start : pieces.stop]:
            shapes = {name: self.tensors[name].shape for name in names}
            layouts.append(Layout.of(local_shapes(shapes, names, shard, self.shards)))
        return Layout.joined(layouts)

    def place(self, pieces: range, run: range, shard: int) -> slice:
        """Return the slice of `pieces` in the buffer of the larger range `run` of pieces."""
        first = self.layout(range(run.start, pieces.start), shard).length
        return slice(first, first + self.layout(pieces, shard).length)

    def names(self, pieces: range) -> list[str]:
        """Return the tensor names of `pieces`, in order."""
        return [name for names in self.pieces[pieces.start : pieces.stop] for name in names]

    def blocks(self, steps: Sequence[Step]) -> list[tuple[range, list[Step]]]:
        """Divide the pieces into the smallest ranges that can be replayed separately.

        Returns (range of pieces, steps of it). Pieces that one of `steps` exchanged together are in
        one range. Raises `ConfigError` if a step names a fragment that does not exist.
        """
        number = len(self.pieces)
        found: list[tuple[range, list[Step]]] = [
            (run, []) for run in apart({step.fragments for step in steps}, number)
        ]
        home = {piece: own for run, own in found for piece in run}
        for step in steps:
            home[step.pieces(number).start].append(step)
        return found

    def rows(self, whole: Mapping[str, Tensor], shard: int) -> dict[str, Tensor]:
        """Return a shard's rows of whole tensors."""
        if self.shards == 1:
            return dict(whole)
        found = {}
        for name, tensor in whole.items():
            run = -(-len(tensor) // self.shards)
            found[name] = tensor[shard * run : (shard + 1) * run]
        return found

    def load(self, get: Get, name: str) -> Tensor:
        """Load a whole tensor of theta_0, fp32. Raises `RecordError`."""
        return self._tensor(get, name, self.tensors[name])

    def momentum(self, get: Get, names: Sequence[str]) -> dict[str, Tensor]:
        """Load whole tensors of the initial outer momentum, fp32; empty if it is zero.

        Raises `RecordError`.
        """
        if not self.momenta:
            return {}
        return {name: self._tensor(get, name, self.momenta[name]) for name in names}

    def _tensor(self, get: Get, name: str, about: TensorDigest) -> Tensor:
        data = get(about.sha256)
        if len(data) != 4 * math.prod(about.shape):
            raise RecordError(f"{name}: {len(data)} bytes are not fp32 {list(about.shape)}")
        if not data:
            return torch.empty(about.shape)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(about.shape)


def replay_stage(
    course: RunHistory,
    stage: Stage,
    get: Get,
    on_step: Callable[[], None],
    replay: Callable[[int, range, list[Step]], tuple[Tensor, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Replay all outer steps of one stage.

    Memory: the stage's tensors, and the buffers of one of the `Stage.blocks`.

    Args:
        course: History of the run.
        stage: The stage's theta_0.
        get: Returns the bytes of a digest.
        on_step: Called after every step.
        replay: Replays the steps of (shard, range of pieces, steps), and returns flat anchor and
            momentum. None: replay from theta_0.

    Returns:
        The stage's tensors after all steps, whole fp32, by name in model order.

    Raises:
        RecordError: A step cannot be replayed; the message names the step.
    """
    whole = {}
    for run, steps in stage.blocks(course.of(stage.stage)):
        names = stage.names(run)
        if replay is None:
            start = StartTensors.load(stage, names, get)
        parts = []
        for shard in range(stage.shards):
            if replay is not None:
                anchor, _ = replay(shard, run, steps)
            else:
                anchor, _ = replay_steps(
                    steps, stage, run, start, shard, get, course.momentum_dtype, on_step
                )
            parts.append(stage.layout(run, shard).views(anchor))
        for name in names:
            rows = [part[name] for part in parts]
            whole[name] = rows[0] if len(rows) == 1 else torch.cat(rows)
    return {name: whole[name] for name in stage.tensors}


@dataclass(frozen=True)
class StartTensors:
    """Whole tensors, fp32 by full name, from which a replay of outer steps starts."""

    theta: Mapping[str, Tensor]
    """Of theta_0."""
    momentum: Mapping[str, Tensor]
    """Of the outer momentum that the run begins with; empty: zero."""

    @classmethod
    def load(cls, stage: Stage, names: Sequence[str], get: Get) -> StartTensors:
        """Load the tensors `names` of a stage. Raises `RecordError`."""
        return cls({name: stage.load(get, name) for name in names}, stage.momentum(get, names))


def replay_steps(
    steps: Sequence[Step],
    stage: Stage,
    run: range,
    start: StartTensors,
    shard: int,
    get: Get,
    momentum_dtype: str,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Replay `steps` for one rank and one range of pieces, from theta_0.

    Args:
        steps: Outer steps of these pieces, in order.
        stage: The stage's theta_0.
        run: The range of pieces.
        start: Whole tensors of theta_0 and of the initial momentum.
        shard: The rank's shard.
        get: Returns the bytes of a digest.
        momentum_dtype: Dtype in which the run keeps the outer momentum.
        on_step: Called after every step.

    Returns:
        The rank's anchor, flat fp32, and its momentum, flat in `momentum_dtype`.

    Raises:
        RecordError: A step cannot be replayed; the message names the step.
    """
    layout = stage.layout(run, shard)
    moving = stage.rows(start.momentum, shard)
    anchor = layout.pack(stage.rows(start.theta, shard))
    if momentum_dtype not in MOMENTUM_DTYPES:
        raise RecordError(f"this dilocox knows no outer momentum in {momentum_dtype}")
    kept = MOMENTUM_DTYPES[momentum_dtype]
    momentum = (
        as_kept(layout.pack(moving), kept) if moving else torch.zeros_like(anchor, dtype=kept)
    )
    replay_flat(steps, stage, run, anchor, momentum, shard, get, on_step)
    return anchor, momentum


def replay_flat(
    steps: Sequence[Step],
    stage: Stage,
    run: range,
    anchor: Tensor,
    momentum: Tensor,
    shard: int,
    get: Get,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Apply `steps` in place to a rank's flat `anchor` and `momentum` of the range `run` of pieces.

    Raises `RecordError` naming the step that cannot be replayed.
    """
    number = len(stage.pieces)
    places: dict[range, tuple[slice, Layout]] = {}
    for step in steps:
        pieces = step.pieces(number)
        if pieces not in places:
            places[pieces] = stage.place(pieces, run, shard), stage.layout(pieces, shard)
        place, own = places[pieces]
        try:
            found = step_average(step, own, shard, get)
        except DilocoxError as error:
            raise RecordError(f"{step.key.text}: {error}") from None
        if found is not None:
            rates = step.learning_rate, step.momentum
            nesterov_step(anchor[place], momentum[place], found, *rates)
        on_step()


def step_average(step: Step, layout: Layout, shard: int, get: Get) -> Tensor | None:
    """Compute Δ, the average of one outer step at one rank, flat fp32 [layout.length].

    Returns None for an empty contribution set. Raises `RecordError` if a payload is missing, and
    `ExchangeError` if the bytes are not a payload of this step.
    """
    if not step.set:
        return None
    codec = compressor(step.codec, layout.geometry)
    addresses = [step.payloads[f"{site}/{shard}"] for site in step.set]
    if codec.agreement is not None or step.exchange == "gather":
        payloads = (payload_tensor(get(address)) for address in addresses)
        first = next(payloads)
        part = codec.part(0, layout.length, step.key.seed, basis_of(codec, first, get))
        decoded = (part.decode(payload) for payload in itertools.chain([first], payloads))
        return _aggregated(step, decoded, layout, shard)
    chunks = [
        (start, end) for start, end in chunk_bounds(layout.length, len(step.owners)) if end > start
    ]
    indices = [get(address) for address in addresses]
    if any(len(index) != DIGEST_BYTES * len(chunks) for index in indices):
        raise RecordError("a contribution's index does not name one payload per chunk")
    means = []
    for number, (start, end) in enumerate(chunks):
        part = codec.part(start, end, step.key.seed)
        found = (part.decode(payload_tensor(get(each))) for each in _chunk(indices, number))
        mean = average(found, step.weights)
        means.append(requantise(part, mean, sum(step.weights)).decoded)
    return torch.cat(means) if means else torch.empty(0)


def basis_of(codec: FragmentCodec, payload: Tensor, get: Get) -> Tensor | None:
    """Return the basis with which `payload` was encoded, uint8; None if the codec needs no basis.

    Raises `RecordError` if the basis is missing, and `ExchangeError` if the bytes are not a payload
    of this codec.
    """
    if codec.agreement is None:
        return None
    return payload_tensor(get(codec.agreement.basis_digest(payload).hex()))


def _aggregated(step: Step, decoded: Iterator[Tensor], layout: Layout, shard: int) -> Tensor:
    """Aggregate decoded contributions by the run's rule, with the agreed weights and shares."""
    shares = [by_shard[shard] for by_shard in step.shares] or [()] * len(step.set)
    return aggregate(step.aggregation, decoded, step.weights, shares, layout.offsets)


def _chunk(indices: Sequence[bytes], number: int) -> Iterator[str]:
    for index in indices:
        yield index[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES].hex()


def payload_tensor(data: bytes) -> Tensor:
    """Return a payload's bytes as uint8 [n], the form that codecs take."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def digests_of(tensors: Mapping[str, Tensor]) -> list[TensorDigest]:
    """Return the digests of a stage's tensors, which sites sign."""
    return [tensor_digest(name, tensor) for name, tensor in tensors.items()]


def behind(step: Step, payload: bytes) -> list[str]:
    """Return the digests, hex, of further objects that a replay of `payload` needs.

    These are the chunks in `reduce`, and the basis of a low-rank codec.
    """
    if parse_spec(step.codec).record.agrees_first:
        return [payload[:DIGEST_BYTES].hex()]
    if step.exchange == "reduce":
        count = -(-len(payload) // DIGEST_BYTES)
        return [digest for number in range(count) for digest in _chunk([payload], number)]
    return []
