"""Head and loss in chunks: the loss and gradients of whole logits, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dilocox.config.run_config import ModelSection
from dilocox.inner import head_loss, mean_cross_entropy
from dilocox.inner.head_loss import HeadLoss, chunk_tokens, head_loss_bytes
from dilocox.inner.pipeline import computes_head_with_loss
from dilocox.models import load_model_config
from tests.support.architectures import (
    ARCHITECTURES,
    VOCABULARY,
    StateSource,
    cut_model,
    reference_model,
    token_ids,
)
from tests.support.grids import pairs_of
from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits

_SMALL = ARCHITECTURES["qwen2"] | {"intermediate_size": 48}
TYPES: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "granite": {**ARCHITECTURES["granite"], "logits_scaling": 0.25},
    "cohere": {**_SMALL, "model_type": "cohere", "logit_scale": 0.5},
    "phi": {**_SMALL, "model_type": "phi"},
}
"""With a scale of the logits (Granite, Cohere), a soft cap (Gemma), a bias of the head (Phi)."""


def in_chunks(monkeypatch: pytest.MonkeyPatch, logits: int, whole: bool = False) -> None:
    monkeypatch.setattr(head_loss, "AT_ONCE", 0)
    monkeypatch.setattr(head_loss, "CHUNK", {"cpu": logits})
    monkeypatch.setattr(head_loss, "logits_are_less", lambda tokens, hidden: whole)


def chunk_of(name: str, **keys: Any) -> Any:
    config = load_model_config(ModelSection(architecture={**TYPES[name], **keys}), VOCABULARY)
    (chunk,) = cut_model(config, 1, StateSource(reference_model(config)))
    return chunk.train()


def loss_and_gradients(chunk: Any, labels: Tensor, inside: bool) -> tuple[Tensor, dict[str, Any]]:
    chunk.zero_grad()
    if inside:
        chunk.head_loss = HeadLoss()
        loss = chunk(token_ids(), labels=labels)
    else:
        loss = mean_cross_entropy(chunk(token_ids()), labels)
    (loss / 3).backward()
    return loss.detach(), {name: p.grad for name, p in chunk.named_parameters()}


@pytest.mark.parametrize(
    ("name", "whole", "tied"),
    pairs_of(list(TYPES), [False, True], [False, True], rest=pytest.mark.slow),
)
def test_in_chunks_it_is_the_loss_of_the_models_own_logits(
    name: str, whole: bool, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`whole`: all logits are computed at once, and only the loss in chunks."""
    labels = token_ids(seed=8)
    labels[0, ::3] = -100
    chunk = chunk_of(name, **({} if name == "phi" else {"tie_word_embeddings": tied}))
    expected, wanted = loss_and_gradients(chunk, labels, inside=False)
    # Few logits: the same operations, the same bits.
    same, identical = loss_and_gradients(chunk, labels, inside=True)
    assert torch.equal(same, expected)
    for parameter, gradient in wanted.items():
        assert torch.equal(identical[parameter], gradient), parameter
    in_chunks(monkeypatch, 5 * VOCABULARY, whole)
    found, gradients = loss_and_gradients(chunk, labels, inside=True)
    with torch.no_grad():
        evaluated = chunk(token_ids(), labels=labels)
    assert torch.allclose(found, expected, rtol=1e-6)
    assert torch.equal(evaluated, found)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=2e-4, atol=2e-6)


def test_the_types_above_do_more_than_multiply_by_the_head() -> None:
    """So that the test above shows what it is to show."""
    for name in ("granite", "cohere", "phi", "gemma3_text"):
        chunk = chunk_of(name)
        hidden = torch.randn(1, 3, 32)
        found: list[Tensor] = []
        chunk.head_loss = lambda logits, _h, *_: found.append(logits(hidden)) or hidden.sum()  # noqa: B023
        chunk(token_ids(), labels=token_ids())
        assert not torch.allclose(found[0], F.linear(hidden, chunk.lm.lm_head.weight)), name


class Head(nn.Module):
    """A head over hidden states, [b, l, d] -> [b, l, V]."""

    def __init__(self, width: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.linear.weight
        return HeadLoss()(self.linear, hidden, labels, [weight], weight.shape[0])


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.itemsize)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_never_holds_all_logits_and_needs_what_is_counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, width, vocabulary = 512, 16, 1000
    head = Head(width, vocabulary, dtype)
    hidden = torch.randn(2, tokens // 2, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (2, tokens // 2))
    in_chunks(monkeypatch, 64 * vocabulary)
    with Largest() as largest:
        head.loss(hidden, labels).backward()
    assert largest.elements <= 64 * vocabulary
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss = head.loss(hidden, labels)
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    counted = head_loss_bytes(tokens, vocabulary, width, dtype.itemsize, "cpu")
    assert most == pytest.approx(counted, rel=0.06)
    assert loss.dtype == torch.float32


def test_bf16_gradients_of_the_head_are_summed_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = Head(16, 50, torch.bfloat16)
    hidden = torch.randn(1, 4096, 16, dtype=torch.bfloat16)
    labels = torch.randint(50, (1, 4096))
    gradients = []
    for chunk in (4096, 4):
        in_chunks(monkeypatch, chunk * 50)
        head.zero_grad()
        head.loss(hidden.requires_grad_(), labels).backward()
        assert head.linear.weight.grad is not None
        gradients.append(head.linear.weight.grad.float())
    whole, parts = gradients
    assert float((parts - whole).norm() / whole.norm()) < 0.01


def test_a_share_of_a_micro_batch_is_not_rounded_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/3 in bf16 is 0.1 % too large: all gradients below the head would be."""
    torch.manual_seed(0)
    in_chunks(monkeypatch, 64 * 50)
    head, labels = Head(16, 50, torch.bfloat16), torch.randint(50, (1, 256))
    hidden = torch.randn(1, 256, 16, dtype=torch.bfloat16, requires_grad=True)
    gradients = []
    for share in (1.0, 1 / 3):
        (head.loss(hidden, labels) * share).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad.double())
        hidden.grad = None
    whole, third = gradients
    assert abs(float((third * whole).sum() / whole.square().sum()) - 1 / 3) < 1e-4


def test_kernels_are_compiled_for_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for shapes of all sizes, made after a second shape, may compute other bits."""
    shapes: list[tuple[Any, ...]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        given = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        shapes.extend(tuple(each.shape) for each in given if isinstance(each, Tensor))
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **keys: real(f, backend=backend, **keys))
    loss = HeadLoss(compiled=True)
    in_chunks(monkeypatch, 4 * 50)
    linear = nn.Linear(16, 50)
    for tokens in (10, 9):
        hidden, labels = torch.randn(1, tokens, 16), torch.randint(50, (1, tokens))
        loss(linear, hidden, labels, list(linear.parameters()), 50)
    assert all(type(size) is int for shape in shapes for size in shape)
    assert {shape[0] for shape in shapes} == {4, 3, 2}


def test_chunks_are_of_nearly_equal_size() -> None:
    assert chunk_tokens(8192, 151_936, "cuda") == 820
    assert chunk_tokens(100, 151_936, "cuda") == 100
    assert chunk_tokens(1000, 2**29, "cuda") == 1
    assert chunk_tokens(440, 151_936, "cpu") == 220
    assert head_loss.logits_are_less(2048, 8192)
    assert not head_loss.logits_are_less(8192, 1024)


LAYOUTS = [
    (1, 1, "1f1b", "float32"),
    (1, 1, "1f1b", "bfloat16"),
    (1, 2, "1f1b", "bfloat16"),
    (2, 1, "gpipe", "float32"),
    (2, 2, "1f1b", "float32"),
    (2, 1, "interleaved-1f1b", "bfloat16"),
    (2, 2, "interleaved-zero-bubble", "bfloat16"),
    (2, 1, "zbv", "bfloat16"),
    (2, 2, "zbv", "float32"),
]
"""Every layout once; both precisions with each number of stages and of shards, and with a backward
pass that is split (zbv) and one that is not (1f1b)."""
OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


@pytest.fixture(scope="module")
def whole(pool: Pool) -> dict[str, dict[str, Any]]:
    """One rank that holds all, by precision."""
    case = ("tests.support.site_model_cases", "real_model")
    alone = {"stages": 1, "shards": 1, "schedule": "1f1b"}
    return {name: pool.run(1, *case, **alone, precision=name)[0] for name in OTHER}


@pytest.mark.parametrize(
    ("stages", "shards", "schedule", "precision"),
    [
        *LAYOUTS,
        *(
            pytest.param(*layout, OTHER[precision], marks=pytest.mark.slow)
            for *layout, precision in LAYOUTS[2:]
        ),
    ],
)
def test_every_layout_trains_alike_in_chunks(
    pool: Pool,
    whole: dict[str, dict[str, Any]],
    stages: int,
    shards: int,
    schedule: str,
    precision: str,
) -> None:
    near = 1e-4 if precision == "float32" else 0.02
    for result in pool.run(
        stages * shards,
        "tests.support.site_model_cases",
        "real_model",
        stages=stages,
        shards=shards,
        schedule=schedule,
        head_chunk=3 * 64,
        precision=precision,
    ):
        assert result["values"] == pytest.approx(whole[precision]["values"], rel=near)
        chunked = result["last"] and computes_head_with_loss(schedule)
        assert result["chunked"] is chunked
