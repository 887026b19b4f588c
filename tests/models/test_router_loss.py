"""The load-balancing loss of mixtures of experts, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mixtral import modeling_mixtral

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.inner.head_loss import HeadLoss
from dilocox.models import ModelChunk, load_model_config
from dilocox.models.activation_checkpointing import Checkpointing
from dilocox.models.router_loss import probe_router_loss
from tests.support.architectures import (
    ARCHITECTURES,
    BIASED,
    StateSource,
    cut_model,
    reference_model,
    token_ids,
)

_DENSE = {
    key: value
    for key, value in ARCHITECTURES["qwen3_moe"].items()
    if key not in ("model_type", "head_dim", "num_experts")
}
ROUTED = {
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        **{key: value for key, value in _DENSE.items() if key != "moe_intermediate_size"},
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        **_DENSE,
    },
}
FACTOR = 5.0
"""Large, so that the loss and its gradients show."""


def asked(name: str) -> Any:
    keys = {**ROUTED[name], "output_router_logits": True, "router_aux_loss_coef": FACTOR}
    return load_model_config(ModelSection(architecture=keys), 96)


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """Labels of which the last one of a row does not count."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return labels


def whole(config: Any, recomputed: Checkpointing = False) -> tuple[Any, ModelChunk]:
    """Transformers' model and the chunk with equal weights."""
    model = reference_model(config).train()
    (chunk,) = cut_model(config, 1, StateSource(model), activation_checkpointing=recomputed)
    chunk.head_loss = HeadLoss()
    return model, chunk


@pytest.mark.parametrize("recomputed", [False, True, "selective"])
@pytest.mark.parametrize("name", list(ROUTED))
def test_loss_and_gradients_are_those_of_transformers(name: str, recomputed: Checkpointing) -> None:
    model, chunk = whole(asked(name), recomputed)
    ids = token_ids()
    found = model(input_ids=ids, labels=ids)
    assert found.aux_loss > 1.0
    found.loss.backward()
    loss = chunk(ids, next_tokens(ids))
    loss.backward()
    torch.testing.assert_close(loss, found.loss)
    wanted = dict(model.named_parameters())
    for local, parameter in chunk.named_parameters():
        grad = wanted[chunk.full_name(local)].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6, msg=local)


def test_it_changes_the_gradient_of_routers() -> None:
    """Or the test above could not fail."""
    grads = []
    plain = load_model_config(ModelSection(architecture=ROUTED["qwen3_moe"]), 96)
    for config in (asked("qwen3_moe"), plain):
        _, chunk = whole(config)
        chunk(token_ids(), next_tokens(token_ids())).backward()
        grads.append(chunk.get_parameter("lm.model.layers.0.mlp.gate.weight").grad)
    assert (grads[0] - grads[1]).abs().max() > 0.1 * grads[1].abs().max()


def test_a_micro_batch_weighs_as_many_labels_as_it_counts() -> None:
    _, chunk = whole(asked("mixtral"))
    ids = token_ids()
    labels = next_tokens(ids)
    labels[1, 3:] = -100
    mean = chunk(ids, labels)
    chunk.head_loss, chunk.sums_labels = HeadLoss(summed=True), True
    torch.testing.assert_close(chunk(ids, labels), mean * int((labels >= 0).sum()))


def test_evaluation_leaves_it_out() -> None:
    _, chunk = whole(asked("mixtral"))
    ids = token_ids()
    with torch.no_grad():
        logits, loss = chunk(ids), chunk(ids, next_tokens(ids))
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens(ids).flatten())
    torch.testing.assert_close(loss, plain)


def test_a_type_without_such_a_loss_is_refused() -> None:
    keys = {key: value for key, value in BIASED.items() if key != "vocab_size"}
    config = load_model_config(
        ModelSection(architecture={**keys, "output_router_logits": True}), 96
    )
    with pytest.raises(ModelError, match='type "deepseek_v3" has no load-balancing loss'):
        probe_router_loss(config)
    probe_router_loss(asked("mixtral"))


def test_it_is_computed_once_where_it_trains_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the head gives its logits part by part."""
    calls: list[int] = []
    plain = modeling_mixtral.load_balancing_loss_func

    def counted(*given: Any) -> Any:
        calls.append(1)
        return plain(*given)

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", counted)
    monkeypatch.setattr("dilocox.inner.head_loss.AT_ONCE", 0)
    monkeypatch.setattr("dilocox.inner.head_loss.CHUNK", {"cpu": 4 * 96})
    monkeypatch.setattr("dilocox.inner.head_loss.logits_are_less", lambda tokens, hidden: False)
    _, chunk = whole(asked("mixtral"))
    chunk(token_ids(), next_tokens(token_ids()))
    assert len(calls) == 1
    with torch.no_grad():
        chunk(token_ids(), next_tokens(token_ids()))
        chunk(token_ids())
    assert len(calls) == 1
