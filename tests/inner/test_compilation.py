"""Layers are compiled where they should be, and a fallback to eager execution is told."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.config.site import InnerSection, SiteSection
from dilocox.errors import ConfigError
from dilocox.inner import ChunkSettings, SiteMesh, SiteModel, determinism_facts
from dilocox.inner.compilation import Compile, compiles, fallback
from dilocox.models import build_chunk, materialise, plan_cut
from dilocox.models.activation_checkpointing import Checkpointing
from dilocox.models.adapter_weights import AdapterWeights
from tests.support import toy_model
from tests.support.architectures import (
    StateSource,
    cut_model,
    reference_model,
    run,
    small_config,
    token_ids,
)

pytestmark = pytest.mark.waits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ZBV = SiteSection(stages=2, chunks=2, schedule="zbv", batch_size=16, micro_batch_size=1)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo as it is at a process's start, with a backend that needs no compiler."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("qwen3", True),
        ("qwen3_moe", False),
        ("qwen3_moe", "selective"),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("qwen3", "selective", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
    ],
)
def test_equal_layers_are_one_graph_with_checkpointing_too(
    name: str, checkpointing: Checkpointing
) -> None:
    config = small_config(name)
    source = StateSource(reference_model(config))
    gradients = []
    for compiled in (False, True):
        (chunk,) = cut_model(config, 1, source, activation_checkpointing=checkpointing)
        chunk.train()
        for layer in chunk.layers if compiled else []:
            layer.compile()
        for seed in (0, 1):
            run([chunk], token_ids(seed=seed)).square().mean().backward()
        gradients.append([parameter.grad for parameter in chunk.parameters()])
    assert counters["frames"]["ok"] == counters["stats"]["unique_graphs"] == 1
    assert counters["frames"]["total"] == 1
    assert not counters["graph_break"]
    for plain, compiled_ones in zip(*gradients, strict=True):
        assert torch.equal(plain, compiled_ones)


def adapted(config: Any, checkpointing: Checkpointing, dropout: float, backend: str | None) -> Any:
    """A chunk with adapters, whose layers are compiled unless `backend` is None."""
    adapter = AdapterSection(rank=3, dropout=dropout)
    (spec,) = plan_cut(config, 1, 16, adapter)
    chunk = build_chunk(
        config, spec, attention="sdpa", activation_checkpointing=checkpointing, adapter=adapter
    )
    source = AdapterWeights(config, adapter, 1, StateSource(reference_model(config)))
    materialise(chunk, source, "cpu")
    for layer in chunk.train().layers if backend else []:
        _plain_compile(layer, backend=backend)
    return chunk


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_adapters_are_two_graphs_however_many_there_are(packed: bool) -> None:
    """The first layer's input has no gradient. Rows may be packed."""
    config = small_config("qwen3", num_hidden_layers=4)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4], [*range(12)]])
    gradients = []
    for backend in (None, "eager"):
        chunk = adapted(config, False, 0.0, backend)
        for seed in (0, 1):
            output = chunk(token_ids(seed=seed), None, positions if packed else None)
            output.square().mean().backward()
        gradients.append([each.grad for each in chunk.parameters() if each.requires_grad])
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 2
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for plain, compiled_ones in zip(*gradients, strict=True):
        assert torch.equal(plain, compiled_ones)


@pytest.mark.slow
def test_a_compiled_layer_recomputes_the_dropout_of_its_adapters() -> None:
    config = small_config("qwen3")
    gradients = []
    for checkpointing in (False, True):
        torch._dynamo.reset()
        chunk = adapted(config, checkpointing, 0.3, "aot_eager")
        torch.manual_seed(1)
        chunk(token_ids()).square().mean().backward()
        gradients.append([each.grad for each in chunk.parameters() if each.requires_grad])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


def test_auto_is_on_for_gpus_and_off_where_the_backward_pass_is_split() -> None:
    plain = SiteSection()
    assert [compiles("auto", plain, device) for device in (CPU, CUDA)] == [False, True]
    assert [compiles("auto", ZBV, device) for device in (CPU, CUDA)] == [False, False]
    for setting in (False, True):
        assert compiles(setting, plain, CPU) is compiles(setting, plain, CUDA) is setting


@pytest.mark.parametrize(("setting", "fact"), [("auto", False), (False, False), (True, True)])
def test_the_class_says_what_is_compiled(setting: Compile, fact: bool) -> None:
    model = ModelSection(architecture={"model_type": "qwen3"}, compile=setting)
    facts = determinism_facts(SiteSection(), model, CPU, torch.float32)
    assert facts["compile"] is fact


def site_model(monkeypatch: pytest.MonkeyPatch, setting: Compile, chunk: nn.Module) -> SiteModel:
    monkeypatch.setattr("dilocox.inner.site_model.compiles", lambda given, *_: given is not False)
    return SiteModel(
        [chunk],
        toy_model.fill,
        SiteMesh.create(1, 1, CPU),
        SiteSection(batch_size=4, micro_batch_size=2),
        InnerSection(),
        ChunkSettings(hidden_size=toy_model.WIDTH, compile_layers=setting),
    )


def losses(model: SiteModel) -> list[float]:
    return [model.inner_step(*toy_model.batch(4, seed=step), 0.01).loss for step in range(2)]


def test_nothing_is_told_where_all_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("auto", True, False):
        model = site_model(monkeypatch, setting, toy_model.ToyChunk(0, 1))  # type: ignore[arg-type]
        losses(model)
        assert model.compile_problem() is None


@pytest.mark.parametrize("backend_fails", [True, False])
def test_a_layer_that_cannot_be_compiled_trains_with_one_line_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend_fails: bool
) -> None:
    expected = losses(site_model(monkeypatch, False, toy_model.ToyChunk(0, 1)))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler is installed")

    if backend_fails:
        monkeypatch.setattr(nn.Module, "compile", partialmethod(_plain_compile, backend=fails))
        named = "no compiler is installed"
    else:
        monkeypatch.setattr(
            toy_model.Block, "forward", torch._dynamo.disable(toy_model.Block.forward)
        )
        named = "compiled no layer"
    model = site_model(monkeypatch, "auto", toy_model.ToyChunk(0, 1))
    assert losses(model) == expected
    told = model.compile_problem()
    assert told is not None
    assert told.startswith('model.compile "auto": torch.compile compiled no layer')
    assert named in told
    assert "\n" not in told
    assert model.compile_problem() is None
    torch._dynamo.reset()
    if not backend_fails:
        model = site_model(monkeypatch, True, toy_model.ToyChunk(0, 1))
        losses(model)
        with pytest.raises(ConfigError, match=r"model\.compile: .*compiled no layer.*or false"):
            model.compile_problem()


_plain_compile = nn.Module.compile


def test_the_limit_of_recompilations_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = site_model(monkeypatch, "auto", toy_model.ToyChunk(0, 1))
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        losses(model)
        model.evaluate(*(part[:1] for part in toy_model.batch(4, seed=0)))
        told = model.compile_problem()
    assert told is not None
    assert "limit of recompilations" in told


def test_counters_are_read_as_they_are_meant() -> None:
    good = Counter({"frames ok": 2, "frames total": 2, "graph break/print": 1})
    assert fallback(good, None) is None
    assert "no layer (print)" in str(fallback(Counter({"graph break/print": 1}), None))
    assert "not compile all" in str(fallback(Counter({"frames ok": 1, "frames total": 2}), "Bad"))


def test_a_copy_of_a_checkpointed_layer_runs_its_own_parameters() -> None:
    config = small_config("qwen3")
    (chunk,) = cut_model(
        config, 1, StateSource(reference_model(config)), activation_checkpointing=True
    )
    copied = copy.deepcopy(chunk)
    before = chunk(token_ids())
    with torch.no_grad():
        for parameter in copied.layers[0].parameters():
            parameter.zero_()
    assert not torch.equal(copied(token_ids()), before)
    assert torch.equal(chunk(token_ids()), before)
