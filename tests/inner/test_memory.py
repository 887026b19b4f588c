"""Bytes that training needs, as arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError
from dilocox.inner import memory
from dilocox.inner.optimizer import InnerOptimizer
from dilocox.models import ChunkSpec
from dilocox.outer.anchor_state import copy_anchor
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.outer_step import MOMENTUM_DTYPES, Rule
from dilocox.training import checkpoint_io, rank_state
from dilocox.training.evaluator import Evaluator
from dilocox.utils import cache_blocks
from tests.support.tracking import Tracker

pytestmark = pytest.mark.waits

GIB = memory.GIB
SHAPE = SimpleNamespace(hidden_size=100, intermediate_size=300, vocab_size=1000)


def config(*, outer: dict[str, Any] | None = None, inner: str = "adamw", **site: Any) -> RunConfig:
    return resolve_run(
        {
            "model": {"path": "x"},
            "data": {"sequence_length": 10},
            "site": {"batch_size": 32, "micro_batch_size": 2, **site},
            "inner": {"optimizer": inner},
            "outer": {"method": "diloco", **(outer or {})},
            "sites": {"lyon": {}, "paris": {}},
        }
    )


def test_states_in_bytes_per_parameter() -> None:
    assert memory.inner_bytes_per_parameter(config()) == 16
    assert memory.inner_bytes_per_parameter(config(inner="muon")) == 12
    assert memory.inner_bytes_per_parameter(config(inner="sgd")) == 8
    # anchor, momentum, reference
    assert memory.outer_bytes_per_parameter(config()) == 12
    # ... with a residual
    assert memory.outer_bytes_per_parameter(config(outer={"method": "dilocox"})) == 16
    # ... with the last pseudo-gradient and the site's own part of the momentum
    assert memory.outer_bytes_per_parameter(config(outer={"overlap": "eager"})) == 20
    # ... with the momentum in bf16
    assert memory.outer_bytes_per_parameter(config(outer={"momentum_dtype": "bf16"})) == 10
    # Contribution, what was seen of it, and average: of the whole model, of a quarter.
    assert memory.under_way_bytes_per_parameter(config()) == 12
    assert memory.under_way_bytes_per_parameter(config(outer={"method": "dilocox"})) == 3


def test_a_gate_needs_a_model_to_try_in_and_what_it_goes_by() -> None:
    gate = {"aggregation": "clip", "gate": True}
    for site, admission, on_device, beside, copied in (
        ({}, {}, 0, 0, 0),
        ({}, gate, 4, 4, 0),
        ({"stages": 2}, gate, 0, 1, 1),
    ):
        run = config(outer={"method": "dilocox"}, **site)
        run = run.model_copy(update={"admission": run.admission.model_copy(update=dict(admission))})
        assert memory.gate_model_bytes_per_parameter(run) == on_device
        assert memory.gate_probe_bytes_per_parameter(run) == beside
        assert memory.probe_copy_bytes_per_parameter(run) == copied
        beside += copied
        # 16 and 16 of the two optimizers, 3 under way, 29 of which a checkpoint is written; beside
        # GPUs staging buffers of a quarter of the model.
        assert memory.host_bytes_per_parameter(run, on_gpu=False) == 35 + 29 + on_device + beside
        assert memory.gpu_bytes(run, 1000, 0) == 1000 * (16 + on_device)
        assert memory.host_bytes_per_parameter(run, on_gpu=True) == 19 + 29 + 2 + beside


@pytest.mark.parametrize("device", ["cpu", "model"])
def test_many_contributions_that_are_compared_may_take_more_than_a_checkpoint(device: str) -> None:
    """Only those of the sites without which no exchange is decided are certain."""
    raw: dict[str, Any] = {
        "model": {"path": "x"},
        "outer": {"method": "diloco", "fragments": 1, "min_sites": 12, "device": device},
        "admission": {"aggregation": "clip"},
        "sites": {f"s{number}": {} for number in range(16)},
    }
    compared = resolve_run(raw)
    plain = resolve_run({**raw, "admission": {}})
    few = resolve_run({**raw, "outer": {**raw["outer"], "min_sites": 1}})
    assert memory.decoded_bytes_per_parameter(plain, 16) == 4
    assert memory.decoded_bytes_per_parameter(compared, 16, 4) == 16

    def needed(run: RunConfig, on_gpu: bool) -> float:
        return memory.host_bytes_per_parameter(run, on_gpu)

    # A checkpoint: 12 and 12 of which it is written, without a delay; else 12 contributions and
    # the site's own.
    copies = needed(plain, on_gpu=False) - 16 - 12
    assert copies < 4 * 13
    assert needed(compared, on_gpu=False) == 16 + 12 + 4 * 13
    assert needed(few, on_gpu=False) == needed(plain, on_gpu=False)
    more = needed(compared, on_gpu=True) - needed(plain, on_gpu=True)
    assert more == (4 * 13 - copies if device == "cpu" else 0)


def test_the_outer_state_is_as_large_as_said() -> None:
    live = {"w": torch.zeros(64, 16)}
    for overlap, feedback, dtype in (("none", False, "fp32"), ("eager", True, "bf16")):
        run = resolve_run(
            {
                "model": {"path": "x"},
                "outer": {"method": "diloco", "overlap": overlap, "momentum_dtype": dtype},
                "compression": {"error_feedback": feedback},
                "sites": {"a": {}},
            }
        )
        state = FragmentState(
            Layout.of({"w": live["w"].shape}),
            live,
            error_feedback=feedback,
            eager=overlap == "eager",
            momentum_dtype=MOMENTUM_DTYPES[dtype],
        )
        held = sum(t.nbytes for t in vars(state).values() if isinstance(t, torch.Tensor))
        assert held == 1024 * memory.outer_bytes_per_parameter(run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", ["keep", "eager"])
def test_what_a_landing_takes_in_one_block_as_on_a_gpu(
    overlap: Literal["keep", "eager"], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_blocks, "PER_THREAD", 1 << 40)
    live = {"w": torch.ones(64, 1024)}
    state = FragmentState(
        Layout.of({"w": live["w"].shape}),
        live,
        error_feedback=True,
        eager=overlap == "eager",
        momentum_dtype=MOMENTUM_DTYPES[dtype],
    )
    rule = Rule(overlap=overlap, learning_rate=0.5, momentum=0.5, residual=0.5)
    u, _ = state.boundary(live, 1.0, 1.0)
    average = u * 0.5
    with Tracker() as tracker:
        state.land(live, average, rule)
    method = {"overlap": overlap, "momentum_dtype": dtype, "inner_steps": 2, "slots": 2}
    said = memory.landing_on_gpu(config(outer=method), 2**16)
    assert tracker.peak == pytest.approx(said, rel=1e-3)
    # Of a large piece one block at a time.
    more = memory.landing_on_gpu(config(outer=method), 2**30 + 1)
    assert more - memory.landing_on_gpu(config(outer=method), 2**30) == 4
    assert memory.landing_on_gpu(config(outer={"method": "allreduce"}), 2**16) == 0


class Standing:
    """A rank between two rounds, as a checkpoint copies it: a quarter of the model waits for its
    landing."""

    def __init__(self, run: RunConfig) -> None:
        matrix = torch.nn.Parameter(torch.ones(128, 128))
        live = {"w": matrix.detach()}
        inner = InnerOptimizer({"w": matrix}, run.inner)
        state = FragmentState(Layout.of({"w": matrix.shape}), live, error_feedback=True)
        model = SimpleNamespace(optimizer_state=inner.state, sync_tied=lambda: None)
        mesh = SimpleNamespace(device=torch.device("cpu"), stages=1, shards=1)
        self.rank = SimpleNamespace(live=live, states=[state], model=model, mesh=mesh)
        plan = SimpleNamespace(model_dump=lambda mode: {})
        item = SimpleNamespace(
            key=SimpleNamespace(text="x"), plan=plan, lands_at=1, contributes=True,
            contribution=torch.ones(128 * 128 // 4), moments=None, probe=None,
        )  # fmt: skip
        self.outer = SimpleNamespace(
            under_way_now=lambda: [item], anchors=dict, owner_landings=[], status=LoopStatus()
        )
        self.meter = SimpleNamespace(so_far=lambda outer: {}, non_finite=lambda: None, dropped=None)
        self.at = SimpleNamespace(round=1, slot=0, tick=4)
        self.dropped_round, self.weight = -2, 1.0


def test_a_checkpoint_is_written_from_a_copy_as_large_as_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def attempt(folder: str, tensors: Mapping[str, torch.Tensor], _: str) -> tuple[str, str]:
        written.append(sum(t.nbytes for n, t in tensors.items() if not n.startswith("random/")))
        raise OSError("what was to be written is known")

    monkeypatch.setattr(checkpoint_io, "_attempt", attempt)
    run = config(outer={"method": "dilocox", "inner_steps": 4})
    tensors, state = rank_state.capture(Standing(run))  # type: ignore[arg-type]
    writer = checkpoint_io.RankCheckpointer(str(tmp_path), "lyon", 0, 0, keep=2)
    with Tracker() as tracker:
        writer.save(4, tensors, state, lambda *_: None, lambda *_: None)
        writer.wait()
    steps = 4  # bytes of AdamW's count of steps
    per_parameter = memory.snapshot_bytes_per_parameter(run)
    assert per_parameter == 12 + 16 + 1
    assert written == [128 * 128 * per_parameter + steps]
    assert tracker.peak >= written[0]
    # The record's copy is another one, where states are kept.
    assert memory.record_copy_bytes_per_parameter(run) == 0
    kept = run.model_copy(update={"record": run.record.model_copy(update={"states_every": 2})})
    assert memory.record_copy_bytes_per_parameter(kept) == per_parameter
    assert memory.snapshot_bytes_per_parameter(run, waiting=1.0) == 32


def test_an_evaluation_holds_a_copy_of_what_is_trained() -> None:
    rank = Standing(config()).rank
    evaluator = Evaluator(rank, SimpleNamespace(touch=lambda: None), [], None)
    with Tracker() as tracker, evaluator.standing_at({}):
        assert tracker.held == 128 * 128 * memory.EVALUATION


def test_activations() -> None:
    def of(stage: int, head: bool = False, **site: Any) -> int:
        return memory.activation_bytes(config(**site), SHAPE, stage, 3, head, width=2)

    one = 3 * (2 * 100 + 300) * 2 * 10 * 2
    assert of(0) == one
    # 1F1B: the first stage holds as many micro-batches as there are stages, the last one.
    assert [of(stage, stages=4) for stage in range(4)] == [4 * one, 3 * one, 2 * one, one]
    assert of(0, stages=4, batch_size=8) == 4 * one
    assert of(3, stages=4, schedule="gpipe") == 16 * one
    # fp32 log-softmax, its gradient and the logits'; of many tokens a fifth of the logits and twice
    # their fp32 form, their gradient, that of what the head is given, and the head's own.
    assert of(0, head=True) - of(0) == 3 * 4 * 20 * 1000
    many = {"batch_size": 2**16, "micro_batch_size": 2**16}
    own = (2 + 8) * 131072 * 1000 + 2 * 10 * 2**16 * 100 + 4 * 1000 * 100
    assert of(0, head=True, **many) - of(0, **many) == own
    saving = resolve_run(
        {
            "model": {"path": "x", "activation_checkpointing": True},
            "data": {"sequence_length": 10},
            "site": {"batch_size": 32, "micro_batch_size": 2},
            "sites": {"a": {}},
        }
    )
    assert memory.activation_bytes(saving, SHAPE, 0, 3, False, 2) == 3 * 100 * 20 * 2


def test_a_gpu_that_is_too_small_is_named_with_the_mend() -> None:
    problem = memory.gpu_problem("lyon", 3, int(41.2 * GIB), int(39.4 * GIB))
    assert problem == (
        'site "lyon": stage 3 needs 41.2 GiB, the GPU has 39.4; raise [site] stages or lower '
        "micro_batch_size"
    )
    assert memory.gpu_problem("lyon", 3, GIB, GIB) is None


def test_shards_share_the_states_and_the_outer_state_lies_where_it_is_told() -> None:
    assert memory.gpu_bytes(config(shards=2), 1000, 77) == 8000 + 77
    # Two optimizers without gradients, 24. A step adds gradients and activations, a landing adds
    # what was exchanged and new values, 12 and 16: they come in turn.
    on_device = config(outer={"device": "model"})
    assert memory.gpu_bytes(on_device, 1000, 0) == (24 + 28) * 1000
    assert memory.gpu_bytes(on_device, 1000, 30_000) == (24 + 4) * 1000 + 30_000
    # A quarter of the model waits for its landing all along where it lands later.
    later = config(outer={"method": "dilocox", "device": "model"})
    assert memory.gpu_bytes(later, 1000, 0) == (28 + 3 + 4) * 1000


def test_frozen_weights_need_their_own_bytes_and_no_state() -> None:
    """Of the compute dtype, divided by shards, and gathered in a pipeline; a gate has more."""
    for layout, gathered in (({}, 0), ({"shards": 2}, 0), ({"stages": 2, "shards": 2}, 4000)):
        run = config(**layout)
        more = memory.gpu_bytes(run, 100, 5, width=2, frozen=4000) - memory.gpu_bytes(
            run, 100, 5, width=2
        )
        assert more == 4000 // run.site.shards + gathered
        # Shards neither divide nor gather weights in four bits.
        packed = memory.gpu_bytes(run, 100, 5, width=2, frozen=4000, packed=600)
        assert packed - memory.gpu_bytes(run, 100, 5, width=2, frozen=4000) == 600
    plain = config()
    section = plain.admission.model_copy(update={"gate": True})
    gated = plain.model_copy(update={"admission": section})
    assert memory.frozen_bytes(gated, 2000, 2) == (2 + 4) * 1000
    # On a CPU in fp32 every replica has all of them.
    run = config(precision="fp32")
    needed = int(100 * memory.host_bytes_per_parameter(run, on_gpu=False)) + 4 * 2000
    assert memory.host_problem(run, [100], 1, needed, False, False, [(8000, 0)]) is None
    assert memory.host_problem(run, [100], 1, needed - 1, False, False, [(8000, 0)]) is not None
    halves = config(precision="fp32", shards=2)
    needed = int(100 * memory.host_bytes_per_parameter(halves, on_gpu=False)) + 8000 + 2 * 600
    assert memory.host_problem(halves, [100], 1, needed, False, False, [(8000, 600)]) is None
    assert memory.host_problem(halves, [100], 1, needed - 1, False, False, [(8000, 600)])


def test_what_bf16_and_pipelines_add_on_a_gpu() -> None:
    # bf16 copies of all weights of a stage without shards.
    assert memory.gpu_bytes(config(), 1000, 0, width=2) == 18_000
    # In a pipeline FSDP keeps gathered weights and whole gradients until the step's end.
    both = config(stages=2, shards=2)
    assert memory.gpu_bytes(both, 1000, 5, width=2) == 12_000 // 2 + 6_000 + 5
    assert memory.gpu_bytes(config(shards=2), 1000, 5, width=2) == 8_000 + 5


def test_the_check_reads_what_is_free_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def free(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 16 * 10**6, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    device = torch.device("cuda", 1)

    def check(parameters: int, where: torch.device) -> None:
        chunk = ChunkSpec(0, 1, 0, 1, True, False, parameters)
        memory.check_gpu(config(), SHAPE, [chunk], "lyon", 0, where, torch.float32)

    check(900_000, device)
    with pytest.raises(ConfigError, match='"lyon": stage 0 needs'):
        check(1_100_000, device)
    assert asked == [device, device]
    check(10**12, torch.device("cpu"))
    assert len(asked) == 2


def test_sites_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees all of it as free when it starts: two that fit alone would not fit together."""
    assert [memory.ranks_on(gpu, 2, 5) for gpu in range(2)] == [3, 2]
    assert [memory.ranks_on(gpu, 8, 2) for gpu in range(3)] == [1, 1, 1]
    free = [16 * 10**6]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 16 * 10**6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def check(parameters: int, ranks_here: int, **site: int) -> None:
        chunk = ChunkSpec(0, 1, 0, 1, True, False, parameters)
        where = torch.device("cuda", 0)
        run = config(**site)
        memory.check_gpu(run, SHAPE, [chunk], "lyon", 0, where, torch.float32, ranks_here)

    check(900_000, 1)
    check(450_000, 2)
    # Slurm shows each of a site's ranks its own GPU.
    check(1_800_000, 2, shards=2)
    with pytest.raises(ConfigError) as caught:
        check(900_000, 2)
    assert "its part of a GPU that 2 ranks of the sites here share has 0.0; give the sites" in str(
        caught.value
    )
    free[0] = 8 * 10**6  # the other is there already
    check(450_000, 2)
    free[0] = 6 * 10**6  # ... and so is somebody else
    with pytest.raises(ConfigError, match="share"):
        check(450_000, 2)


def test_the_machines_own_memory() -> None:
    run = config()
    # 28 of the two optimizers; of what comes in turn (12 of an exchange, a checkpoint's copy of
    # parameters, moments and outer state) the larger.
    needed = 2 * (3000 + 1000) * (28 + 24)
    assert memory.host_problem(run, [1000, 3000], 2, needed, on_gpu=False) is None
    problem = memory.host_problem(run, [1000, 3000], 2, needed - 1, on_gpu=False)
    assert problem is not None
    assert problem.startswith("2 sites here need 0.0 GiB of memory (stage 1 alone 0.0 GiB)")
    # On GPUs outer state and exchanges are in the machine's memory, by option neither; staging
    # buffers and what a checkpoint is written from always are.
    bytes_ = 2 * 4000 * (12 + 24 + 8)
    assert memory.host_problem(run, [4000], 2, bytes_, on_gpu=True) is None
    assert memory.host_problem(run, [4000], 2, bytes_ - 1, on_gpu=True) is not None
    on_device = config(outer={"device": "model"})
    bytes_ = 2 * 4000 * (24 + 8)
    assert memory.host_problem(on_device, [4000], 2, bytes_, on_gpu=True) is None
    assert memory.host_problem(on_device, [4000], 2, bytes_ - 1, on_gpu=True) is not None


@pytest.mark.parametrize(("dtype", "start"), [("fp32", 8), ("bf16", 6)])
def test_a_window_of_the_record_begins_with_a_copy_of_the_anchor(
    dtype: Literal["fp32", "bf16"], start: int
) -> None:
    run = config(outer={"method": "dilocox", "inner_steps": 4, "momentum_dtype": dtype})
    live = {"w": torch.ones(128, 128)}
    state = FragmentState(
        Layout.of({"w": live["w"].shape}),
        live,
        error_feedback=True,
        momentum_dtype=MOMENTUM_DTYPES[dtype],
    )
    outer: Any = SimpleNamespace(status=LoopStatus(), states=[state], under_way_now=list)
    copy = copy_anchor(outer, 4)
    assert copy is not None
    assert sum(each.nbytes for each in copy.tensors.values()) == start * 128 * 128
    for on_gpu in (False, True):
        without, beside = (
            memory.host_bytes_per_parameter(run, on_gpu, windows=windows)
            for windows in (False, True)
        )
        assert beside - without == start
    needed = int(1000 * memory.host_bytes_per_parameter(run, on_gpu=False))
    assert memory.host_problem(run, [1000], 1, needed, False) is None
    assert memory.host_problem(run, [1000], 1, needed, False, True) is not None
    assert memory.host_problem(run, [1000], 1, needed + start * 1000, False, True) is None


def test_the_disk_holds_kept_checkpoints_one_more_and_the_model() -> None:
    # parameters and moments 12, outer state 12, contributions 4; two kept and one being written,
    # two sites
    assert memory.disk_bytes(config(), 1000, 2) == 2 * 28 * 1000 * 3 + 4000


PARTS = [ChunkSpec(0, 1, 0, 2, True, True, 1_000_000)]
LAYERS = SimpleNamespace(**vars(SHAPE), num_hidden_layers=2)


def whole(memory_: int | None, width: int = 2, **site: Any) -> bool:
    run = config(**{"shards": 4, **site})
    return memory.sums_whole_gradients(run, LAYERS, PARTS, memory_, width)


def test_gradients_are_summed_up_whole_where_they_surely_fit() -> None:
    run = config(shards=4)
    head = memory.activation_bytes(run, LAYERS, 0, 0, True, 2)
    layers = memory.activation_bytes(run, LAYERS, 0, 2, False, 2)
    assert head > 0 < layers
    # A quarter of the states, bf16 parameters and fp32 gradients of all.
    needed = 4 * 1_000_000 + 6 * 1_000_000 + head + 3 * layers
    enough = math.ceil(needed / memory.SURE_SHARE)
    assert whole(enough)
    assert not whole(enough - 2)
    assert not whole(enough, width=4)
    assert not whole(None), "on CPUs as ever"
    assert whole(None, gradient_sync="step")
    assert not whole(2**40, gradient_sync="micro-batch")
    assert not whole(2**40, shards=1)
    assert not whole(2**40, stages=2), "pipelines have a way of their own"


def test_whole_gradients_that_are_asked_for_are_checked_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (9_000_000, 80 * GIB))
    device = torch.device("cuda", 0)

    def check(**site: Any) -> None:
        memory.check_gpu(config(shards=4, **site), LAYERS, PARTS, "lyon", 0, device, torch.bfloat16)

    check()
    with pytest.raises(ConfigError, match='"lyon": stage 0 needs'):
        check(gradient_sync="step")
    more = memory.host_bytes_per_parameter(config(shards=4, gradient_sync="step"), on_gpu=False)
    assert more - memory.host_bytes_per_parameter(config(shards=4), on_gpu=False) == 4 * 8
