"""Documents of one row do not see each other, or the run is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import load_model_config, probe_packing
from dilocox.models.activation_checkpointing import Checkpointing
from dilocox.models.packed_rows import document_numbers, packed_arguments
from tests.support.architectures import (
    VOCABULARY,
    StateSource,
    cut_model,
    reference_model,
    small_config,
    token_ids,
)

PACKED = [
    "llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma3_text", "gpt_neox", "phi3", "granite",
    "qwen3_moe",
]  # fmt: skip
DOCUMENTS = [(12,), (4, 8), (1, 1, 6, 4)]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])


def packed(chunks: list[Any], ids: Tensor, positions: Tensor) -> Tensor:
    value = ids
    for chunk in chunks:
        value = chunk(value, positions=positions)
    return value


def alone(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Logits of each document by itself, laid out as the rows are."""
    rows = []
    for row, lengths in zip(ids, DOCUMENTS, strict=True):
        parts = [model(input_ids=d.unsqueeze(0)).logits[0] for d in row.split(list(lengths))]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", PACKED)
def test_logits_are_those_of_each_document_alone(name: str, chunks: int, attention: str) -> None:
    config = small_config(name)
    model = reference_model(config, attention=attention)
    cut = [chunk.eval() for chunk in cut_model(config, chunks, StateSource(model), attention)]
    ids = token_ids(3)
    with torch.no_grad():
        wanted = alone(model, ids)
        found = packed(cut, ids, POSITIONS)
        stream = packed(cut, ids, torch.arange(12).expand(3, -1))
    scale = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) < 2e-5 * scale
    assert float((stream[0] - wanted[0]).abs().max()) < 2e-5 * scale
    assert float((stream[1] - wanted[1]).abs().max()) > 1e-3 * scale


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_gradients_are_those_of_each_document_alone(checkpointing: Checkpointing) -> None:
    config = small_config("llama")
    model = reference_model(config)
    cut = cut_model(config, 2, StateSource(model), activation_checkpointing=checkpointing)
    ids = token_ids(3)
    weights = torch.randn(3, 12, VOCABULARY, generator=torch.Generator().manual_seed(0))
    (alone(model, ids) * weights).sum().backward()
    (packed(cut, ids, POSITIONS) * weights).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for chunk in cut:
        names = chunk.full_names()
        for name, parameter in chunk.named_parameters():
            expected = wanted[names[name]]
            assert parameter.grad is not None
            assert expected is not None
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_the_probe_lets_these_types_pass(name: str, chunks: int) -> None:
    probe_packing(small_config(name), chunks, "sdpa")


def test_types_whose_documents_see_each_other_are_refused() -> None:
    message = (
        r'data\.packing: "documents" cannot be used with model type "{}": documents of one row see '
        r'each other there \(logits differ by .*\); set data\.packing to "none"'
    )
    with pytest.raises(ModelError, match=message.format("opt")):
        probe_packing(small_config("opt"), 1, "sdpa")
    linear = {
        "model_type": "qwen3_next", "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    }  # fmt: skip
    config = load_model_config(ModelSection(architecture=linear), VOCABULARY)
    with pytest.raises(ModelError, match=message.format("qwen3_next")):
        probe_packing(config, 1, "sdpa")


def test_flash_attention_gets_the_bounds_of_all_documents() -> None:
    given = packed_arguments(POSITIONS, "flash_attention_2")
    ends = [0]
    for row in DOCUMENTS:
        for length in row:
            ends.append(ends[-1] + length)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert given[name].tolist() == ends
        assert given[name].dtype == torch.int32
    assert (
        given["max_length_q"]
        == given["max_length_k"]
        == 12
        >= max(b - a for a, b in pairwise(ends))
    )
    assert set(packed_arguments(POSITIONS, "sdpa")) == {"position_ids"}


def test_documents_are_numbered_as_transformers_does() -> None:
    from transformers import masking_utils

    positions = POSITIONS[1:]
    wanted = masking_utils.find_packed_sequence_indices(positions)
    assert wanted is not None
    assert document_numbers(positions).tolist() == wanted.tolist()
