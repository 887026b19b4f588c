"""What is counted on fake tensors is what real tensors keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilocox.memory import activation_bytes
from dilocox.models import build_chunk, materialise, open_weights, plan_cut
from dilocox.plan import activations
from dilocox.plan.outline import Outline
from tests.plan.runs import run


def really_saved(config: Any, bf16: bool) -> int:
    """Bytes that autograd saves of one layer with real values, parameters and their casts left
    out."""
    outline = Outline.of(config)
    (spec,) = [c for c in plan_cut(outline.hf_config, 4, 16) if c.index == 2]
    chunk = build_chunk(outline.hf_config, spec, attention="sdpa", activation_checkpointing=False)
    materialise(chunk, open_weights(config.model, outline.hf_config, 0), "cpu")
    chunk.train()
    own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    casts = {tuple(p.shape) for p in chunk.parameters() if p.dim() == 2} if bf16 else set()
    casts |= {shape[::-1] for shape in casts}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tuple(tensor.shape) not in casts:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    # 30 tokens: no activation has the shape of a matrix.
    rows, length = config.site.micro_batch_size, config.data.sequence_length
    x = torch.randn(rows, length, 32, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        chunk(x).sum()
    return sum(found.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layers_activations_are_those_of_real_tensors(precision: str) -> None:
    config = run(site={"precision": precision}, data={"sequence_length": 15, "tokenizer": "given"})
    found = activations.kept(config, Outline.of(config))
    assert found.exact
    assert found.layer == really_saved(config, precision == "bf16")
    assert found.entry == 2 * 15 * 32 * 4


def test_the_head_needs_its_logits_three_times_and_its_inputs() -> None:
    config = run(site={"precision": "fp32"})
    found = activations.kept(config, Outline.of(config))
    logits = 2 * 16 * 128 * 4
    # Beside what the loss needs: the norm's input, its square's mean, and the head's input.
    assert 3 * logits < found.head < 4 * logits


@pytest.mark.parametrize(("precision", "logit"), [("bf16", 2), ("fp32", 4)])
def test_of_many_logits_themselves_and_their_gradient_count(precision: str, logit: int) -> None:
    site = {"precision": precision, "batch_size": 16384, "micro_batch_size": 16384}
    config = run(site=site, data={"sequence_length": 64, "tokenizer": "given"})
    found = activations.kept(config, Outline.of(config))
    tokens = 16384 * 64
    assert found.head > tokens * 128 * 2 * logit
    # ... and what norm and head save, less than 13 fp32 values of 32 for each token.
    rest = found.head - tokens * 128 * 2 * logit - 3 * 4 * 2**24
    assert 0 < rest < tokens * 32 * 13


def test_more_tokens_keep_more_and_the_bound_is_below() -> None:
    found = [
        activations.kept(config, Outline.of(config)).layer
        for config in (run(), run(site={"micro_batch_size": 4}))
    ]
    assert found[1] == pytest.approx(2 * found[0], rel=0.1)
    bound = activation_bytes(run(), Outline.of(run()).hf_config, 0, 1, False, 2)
    assert bound < found[0]


def test_a_model_that_cannot_run_on_fake_tensors_has_a_lower_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(activations, "_saved", refuses)
    outline = Outline.of(run())
    found = activations.kept(run(), outline)
    assert not found.exact
    assert found.layer == activation_bytes(run(), outline.hf_config, 0, 1, False, 4)
    assert found.head > 0
    # Of one micro-batch, whatever the pipeline: how many are in flight is counted elsewhere.
    deep = {"stages": 4, "batch_size": 16, "micro_batch_size": 1}
    one = run(site={"batch_size": 16, "micro_batch_size": 1})
    expected = activations.kept(one, outline)
    for schedule in ("1f1b", "gpipe"):
        assert activations.kept(run(site={**deep, "schedule": schedule}), outline) == expected
    checkpointed = run(site=one.site.model_dump(), model={"activation_checkpointing": True})
    assert activations.kept(checkpointed, outline) == expected
