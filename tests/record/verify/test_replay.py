"""Replays of outer steps: against the engine's own arithmetic, and to one digest everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dilocox.compression import LowRank, compressor, pack_frame, payload_digest
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.errors import RecordError
from dilocox.outer.aggregation import aggregate
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.layout import Layout, local_shapes, split_pieces
from dilocox.outer.outer_step import MOMENTUM_DTYPES, nesterov_step
from dilocox.record.log.digests import sha256, stage_root, tensor_bytes, tensor_digest
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.replay import Stage, digests_of, read_listing, replay_stage, step_average
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import listing_of
from dilocox.transport.exchange import chunk_index

SITES = ("a", "b", "c")
WEIGHTS = (1.5, 0.75, 0.75)
ROUNDS = 3
SHAPES = {
    "layers.0.weight": (70, 40),
    "layers.0.bias": (70,),
    "layers.1.weight": (40, 70),
    "norm.weight": (40,),
}
GOLDEN = "28341e8a0989cb5810e98ba64752d252013a1e6be8c51579fa448a0274f842b6"
GOLDEN_BF16 = "cf24cec115f83cfd8425bed6cbaaba29e519a1c1d38ebda7d4396d8f8fe94e88"
"""The same with the outer momentum in bf16."""


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, data: bytes | memoryview) -> str:
        digest = sha256(data)
        self.kept[digest] = bytes(data)
        return digest

    def get(self, digest: str) -> bytes:
        if digest not in self.kept:
            raise RecordError(f"{digest}: not in the store")
        return self.kept[digest]


def numbers(count: int, seed: int) -> torch.Tensor:
    """fp32 that are the same on every machine: whole numbers over a power of two.

    They have all 24 bits, so that the order in which they are added up matters.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(1 << 24), 1 << 24, (count,), generator=generator)
    return drawn.to(torch.float32) / (1 << 28 + seed % 7)


class Made:
    """A recorded course, and what the sites came to hold: by the engine's functions alone.

    `fragments`: of each round, of so many `pieces`.
    """

    def __init__(
        self,
        codec: str,
        exchange: str = "gather",
        shards: int = 1,
        momentum_dtype: str = "fp32",
        fragments: Sequence[int] = (2,) * ROUNDS,
        pieces: int = 2,
    ) -> None:
        self.shelf = Shelf()
        self.fragments, self.pieces = fragments, pieces
        self.momentum_dtype = momentum_dtype
        self.codec, self.exchange, self.shards = codec, exchange, shards
        outer = {"method": "dilocox", "momentum_dtype": momentum_dtype, "fragments": pieces}
        config = {"site": {"stages": 1, "shards": shards}, "outer": outer}
        self.course = RunHistory("run", "log", {"config": config})
        start = {name: numbers(torch.Size(s).numel(), 7).view(s) for name, s in SHAPES.items()}
        self.theta = [tensor_digest(name, tensor) for name, tensor in start.items()]
        for tensor in start.values():
            self.shelf.put(tensor_bytes(tensor))
        sizes = {name: tensor.numel() for name, tensor in start.items()}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in start}
        groups = split_pieces(sizes, pieces)
        for shard in range(shards):
            rows = {
                name: whole[(run := -(-len(whole) // shards)) * shard :][:run]
                for name, whole in start.items()
            }
            layouts = [Layout.of(local_shapes(SHAPES, names, shard, shards)) for names in groups]
            for name, held in self._train(layouts, rows, shard).items():
                parts[name].append(held)
        self.final = {name: torch.cat(rows) for name, rows in parts.items()}

    def _train(
        self, layouts: list[Layout], rows: dict[str, torch.Tensor], shard: int
    ) -> dict[str, torch.Tensor]:
        anchors = [layout.pack(rows) for layout in layouts]
        dtype = MOMENTUM_DTYPES[self.momentum_dtype]
        momenta = [torch.zeros_like(anchor, dtype=dtype) for anchor in anchors]
        for round_, fragments in enumerate(self.fragments):
            for fragment in range(fragments):
                key = ExchangeKey.outer(round_, 0, fragment)
                run = pieces_of(fragment, fragments, self.pieces)
                layout = Layout.joined([layouts[piece] for piece in run])
                seeds = [1000 * round_ + 100 * fragment + 10 * shard + n for n in range(len(SITES))]
                own = {name: rows[name] for name in layout.names}
                given = [
                    layout.pack({n: numbers(t.numel(), s).view(t.shape) for n, t in own.items()})
                    for s in seeds
                ]
                mean, digests = self._exchange(layout, key, given)
                means = mean.split([layouts[piece].length for piece in run])
                for piece, part in zip(run, means, strict=True):
                    nesterov_step(anchors[piece], momenta[piece], part, 0.8, 0.5)
                known = self.course.steps.get(key.text)
                payloads = dict(known.payloads) if known else {}
                payloads |= {f"{site}/{shard}": d for site, d in zip(SITES, digests, strict=True)}
                step = self.step(key, payloads, fragments=fragments)
                self.course.steps[key.text] = step
        return {
            name: view.clone()
            for layout, anchor in zip(layouts, anchors, strict=True)
            for name, view in layout.views(anchor).items()
        }

    def step(self, key: ExchangeKey, payloads: dict[str, str], **changes: Any) -> Step:
        about: dict[str, Any] = {
            "key": key, "flush": key.round == ROUNDS - 1, "attempt": 1, "tick": key.round,
            "set": SITES, "owners": SITES, "weights": WEIGHTS, "codec": self.codec,
            "exchange": self.exchange, "learning_rate": 0.8, "momentum": 0.5, "fragments": 2,
            "payloads": payloads,
        }  # fmt: skip
        return Step(**{**about, **changes})

    def _exchange(
        self, layout: Layout, key: ExchangeKey, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[str]]:
        codec = compressor(self.codec, layout.geometry)
        if isinstance(codec, LowRank):
            warm = codec.first_warm()
            basis = codec.orthonormalise([codec.project(u, warm) for u in given])
            self.shelf.put(tensor_bytes(basis))
            sent = [codec.encode(u, basis) for u in given]
            mean = average((codec.decode(payload, basis) for payload in sent), WEIGHTS)
            return mean, [self.shelf.put(tensor_bytes(payload)) for payload in sent]
        if self.exchange == "gather":
            part = codec.part(0, layout.length, key.seed)
            sent = [part.encode(u) for u in given]
            mean = average((part.decode(payload) for payload in sent), WEIGHTS)
            return mean, [self.shelf.put(tensor_bytes(payload)) for payload in sent]
        means, chunks = [], []
        for start, end in chunk_bounds(layout.length, len(SITES)):
            if end == start:
                continue
            part = codec.part(start, end, key.seed)
            sent = [part.encode(u[start:end]) for u in given]
            for payload in sent:
                self.shelf.put(tensor_bytes(payload))
            chunks.append([pack_frame(part, payload) for payload in sent])
            mean = average((part.decode(payload) for payload in sent), WEIGHTS)
            means.append(requantise(part, mean, sum(WEIGHTS)).decoded)
        indices = [chunk_index(mine) for mine in zip(*chunks, strict=True)]
        for index in indices:
            self.shelf.put(tensor_bytes(index))
        return torch.cat(means), [payload_digest(index).hex() for index in indices]

    def replayed(self) -> dict[str, torch.Tensor]:
        stage = Stage.of(self.course, 0, self.theta)
        return replay_stage(self.course, stage, self.shelf.get, lambda: None)

    def root(self) -> str:
        return stage_root(digests_of(self.replayed())).hex()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("codec", "exchange"),
    [
        ("none", "gather"), ("int4", "gather"), ("topk:64", "gather"), ("lowrank:4", "gather"),
        ("cocktail", "gather"), ("int8", "reduce"), ("fp16", "reduce"),
    ],
)  # fmt: skip
def test_a_replay_gives_what_the_sites_held(codec: str, exchange: str, shards: int) -> None:
    made = Made(codec, exchange, shards)
    found = made.replayed()
    assert list(found) == list(SHAPES)
    for name, tensor in found.items():
        assert torch.equal(tensor, made.final[name]), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("fragments", "blocks"),
    [
        # All apart, all together, two of three together: every piece hangs on every other.
        ((3, 1, 2), [range(3)]),
        # One is never exchanged with others.
        ((3, 2, 2), [range(1), range(1, 3)]),
        ((3, 3, 3), [range(1), range(1, 2), range(2, 3)]),
        ((1, 1, 3), [range(3)]),
    ],
)
@pytest.mark.parametrize("codec", ["topk:64", "int4"])
def test_a_replay_follows_pieces_that_meet_and_part(
    codec: str, fragments: tuple[int, ...], blocks: list[range], shards: int
) -> None:
    made = Made(codec, shards=shards, fragments=fragments, pieces=3)
    stage = Stage.of(made.course, 0, made.theta)
    assert [run for run, _ in stage.blocks(made.course.of(0))] == blocks
    found = made.replayed()
    assert list(found) == list(SHAPES)
    for name, tensor in found.items():
        assert torch.equal(tensor, made.final[name]), name


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed", "rfa"])
def test_a_replay_averages_by_the_rule_and_the_shares_that_were_agreed_on(rule: str) -> None:
    made = Made("int4")
    mean = made.root()
    key = ExchangeKey.outer(0, 0, 0)
    step = made.course.steps[key.text]
    names = split_pieces({n: torch.Size(s).numel() for n, s in SHAPES.items()}, 2)[0]
    layout = Layout.of(local_shapes(SHAPES, names, 0, 1))
    count = len(names) if rule == "clip" else 1
    shares = (((65536,) * count,), ((32768,) * count,), ((100,) * count,))
    given = shares if rule in ("clip", "rfa") else ()
    changed = made.step(key, dict(step.payloads), aggregation=rule, shares=given)
    part = compressor("int4", layout.geometry)
    decode = part.part(0, layout.length, key.seed).decode
    sent = [
        decode(torch.frombuffer(bytearray(made.shelf.get(step.payloads[f"{site}/0"])),
                                dtype=torch.uint8))
        for site in SITES
    ]  # fmt: skip
    own = [list(by_shard[0]) for by_shard in given]
    expected = aggregate(rule, sent, WEIGHTS, own, layout.offsets)
    found = step_average(changed, layout, 0, made.shelf.get)
    assert found is not None
    assert torch.equal(found, expected)
    made.course.steps[key.text] = changed
    assert made.root() != mean


def test_every_input_of_a_step_counts() -> None:
    made = Made("none")
    before = made.root()
    key = ExchangeKey.outer(1, 0, 0)
    whole = made.course.steps[key.text]
    swapped = {"a/0": whole.payloads["c/0"], "c/0": whole.payloads["a/0"]}
    for changes in (
        {"learning_rate": 0.81}, {"momentum": 0.4}, {"weights": (1.5, 0.75, 0.76)},
        {"set": ("a", "b"), "weights": (1.5, 0.75)}, {"set": (), "weights": ()},
        {"set": ("b", "c", "a"), "weights": (0.75, 0.75, 1.5)},
    ):  # fmt: skip
        made.course.steps[key.text] = made.step(key, dict(whole.payloads), **changes)
        assert made.root() != before, changes
    made.course.steps[key.text] = made.step(key, {**whole.payloads, **swapped})
    assert made.root() != before
    made.course.steps[key.text] = whole
    assert made.root() == before
    del made.course.steps[key.text]
    assert made.root() != before


@pytest.mark.parametrize(
    ("codec", "exchange", "digest", "reason"),
    [
        ("int4", "gather", "00" * 32, "not in the store"),
        ("int4", "gather", "short", "must be"),
        ("int8", "reduce", "short", "does not name one payload per chunk"),
        ("lowrank:4", "gather", "short", "must be"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_named(
    codec: str, exchange: str, digest: str, reason: str
) -> None:
    made = Made(codec, exchange)
    key = ExchangeKey.outer(2, 0, 1)
    digest = made.shelf.put(b"short") if digest == "short" else digest
    payloads = {**made.course.steps[key.text].payloads, "b/0": digest}
    made.course.steps[key.text] = made.step(key, payloads)
    with pytest.raises(RecordError, match=rf"outer/2/0/1: .*{reason}"):
        made.replayed()


def test_lists_of_tensors_are_checked() -> None:
    made = Made("int4")
    digest = made.shelf.put(listing_of(made.theta))
    root = stage_root(made.theta).hex()
    assert read_listing(made.shelf.get, digest, root) == made.theta
    with pytest.raises(RecordError, match="does not have the signed root"):
        read_listing(made.shelf.get, digest, "00" * 32)
    with pytest.raises(RecordError, match="not a list of tensors"):
        read_listing(made.shelf.get, made.shelf.put(b"{}x"), root)


def one_digest(momentum_dtype: str = "fp32") -> str:
    """Over replays with every kind of codec and exchange."""
    courses = [("int4", "gather"), ("topk:64", "gather"), ("lowrank:4", "gather"),
               ("int8", "reduce"), ("bf16", "gather"), ("cocktail", "reduce")]  # fmt: skip
    roots = [Made(*course, momentum_dtype=momentum_dtype).root() for course in courses]
    return sha256("".join(roots).encode())


def test_one_digest_for_all_machines() -> None:
    assert one_digest() == GOLDEN
    assert one_digest("bf16") == GOLDEN_BF16


def test_momentum_in_bf16_is_replayed_as_it_was_kept() -> None:
    made = Made("int4", shards=2, momentum_dtype="bf16")
    found = made.replayed()
    for name, tensor in found.items():
        assert torch.equal(tensor, made.final[name]), name
    assert made.root() != Made("int4", shards=2).root()
    # A run from before there was a choice says nothing, and kept fp32.
    del made.course.manifest["config"]["outer"]["momentum_dtype"]
    assert made.root() == Made("int4", shards=2).root()
    made.course.manifest["config"]["outer"]["momentum_dtype"] = "fp8"
    with pytest.raises(RecordError, match="knows no outer momentum in fp8"):
        made.replayed()


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_one_digest_for_all_instruction_sets(capability: str, threads: str) -> None:
    script = (
        "import torch\n"
        f"torch.set_num_threads({threads})\n"
        "from tests.record.verify.test_replay import one_digest\n"
        "print(torch.backends.cpu.get_cpu_capability(), one_digest(), one_digest('bf16'))\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, timeout=400, env=environment,
    )  # fmt: skip
    used, *digests = answer.stdout.split()[-3:]
    if used.lower() != capability:
        pytest.skip(f"this processor has no {capability}: it used {used}")
    assert digests == [GOLDEN, GOLDEN_BF16]
