"""Bytes that training needs, as arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox import memory
from dilocox.config import RunConfig, resolve_run
from dilocox.errors import ConfigError
from dilocox.models import ChunkSpec

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
    for site, admission, on_device, beside in (
        ({}, {}, 0, 0),
        ({}, gate, 4, 4),
        ({"stages": 2}, gate, 0, 1),
    ):
        run = config(outer={"method": "dilocox"}, **site)
        run = run.model_copy(update={"admission": run.admission.model_copy(update=dict(admission))})
        assert memory.gate_model_bytes_per_parameter(run) == on_device
        assert memory.gate_probe_bytes_per_parameter(run) == beside
        assert memory.host_bytes_per_parameter(run, on_gpu=False) == 35 + on_device + beside
        assert memory.gpu_bytes(run, 1000, 0) == 1000 * (16 + on_device)
        assert memory.host_bytes_per_parameter(run, on_gpu=True) == 19 + beside


def test_the_outer_state_is_as_large_as_said() -> None:
    from dilocox.outer.layout import Layout
    from dilocox.outer.optimizer import MOMENTUM_DTYPES
    from dilocox.outer.state import PieceState

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
        state = PieceState(
            Layout.of({"w": live["w"].shape}),
            live,
            error_feedback=feedback,
            eager=overlap == "eager",
            momentum_dtype=MOMENTUM_DTYPES[dtype],
        )
        held = sum(t.nbytes for t in vars(state).values() if isinstance(t, torch.Tensor))
        assert held == 1024 * memory.outer_bytes_per_parameter(run)


def test_activations() -> None:
    def of(stage: int, head: bool = False, **site: Any) -> int:
        return memory.activation_bytes(config(**site), SHAPE, stage, 3, head, width=2)

    one = 3 * (2 * 100 + 300) * 2 * 10 * 2
    assert of(0) == one
    # 1F1B: the first stage holds as many micro-batches as there are stages, the last one.
    assert [of(stage, stages=4) for stage in range(4)] == [4 * one, 3 * one, 2 * one, one]
    assert of(0, stages=4, batch_size=8) == 4 * one
    assert of(3, stages=4, schedule="gpipe") == 16 * one
    # fp32 log-softmax, its gradient and the logits'; of many tokens logits and gradient, and the
    # same three of some of them.
    assert of(0, head=True) - of(0) == 3 * 4 * 20 * 1000
    many = {"batch_size": 2**16, "micro_batch_size": 2**16}
    own = 2 * 2 * 10 * 2**16 * 1000 + 3 * 4 * 2**24
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
    assert memory.gpu_bytes(config(outer={"device": "model"}), 1000, 0) == 28000


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


def test_the_machines_own_memory() -> None:
    run = config()
    needed = 2 * (3000 + 1000) * 40
    assert memory.host_problem(run, [1000, 3000], 2, needed, on_gpu=False) is None
    problem = memory.host_problem(run, [1000, 3000], 2, needed - 1, on_gpu=False)
    assert problem is not None
    assert problem.startswith("2 sites here need 0.0 GiB of memory (stage 1 alone 0.0 GiB)")
    # On GPUs outer state and exchanges are in the machine's memory, by option the latter alone.
    assert memory.host_problem(run, [4000], 2, 2 * 4000 * 24, on_gpu=True) is None
    assert memory.host_problem(run, [4000], 2, 2 * 4000 * 24 - 1, on_gpu=True) is not None
    on_device = config(outer={"device": "model"})
    assert memory.host_problem(on_device, [4000], 2, 2 * 4000 * 12, on_gpu=True) is None
    assert memory.host_problem(on_device, [4000], 2, 2 * 4000 * 12 - 1, on_gpu=True) is not None


def test_the_disk_holds_kept_checkpoints_one_more_and_the_model() -> None:
    # parameters and moments 12, outer state 12, contributions 4; two kept and one being written,
    # two sites
    assert memory.disk_bytes(config(), 1000, 2) == 2 * 28 * 1000 * 3 + 4000
