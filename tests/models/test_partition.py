"""The cut is the best one, names every parameter once, and needs no memory."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import build_chunk, count_parameters, load_model_config, plan_cut
from dilocox.models.partition import balanced_ends
from tests.support.architectures import reference_model, small_config


def _best_by_trying_all(costs: list[float], parts: int) -> tuple[float, float]:
    best = (float("inf"), float("inf"))
    for cuts in itertools.combinations(range(1, len(costs)), parts - 1):
        edges = [0, *cuts, len(costs)]
        runs = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        best = min(best, (max(runs), sum(run * run for run in runs)))
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9),
    data=st.data(),
)
def test_balanced_ends_is_optimal(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    ends = balanced_ends(costs, parts)
    edges = [0, *ends]
    assert edges[-1] == len(costs)
    assert len(ends) == parts
    assert all(a < b for a, b in itertools.pairwise(edges))
    runs = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
    largest, squares = _best_by_trying_all(costs, parts)
    assert max(runs) == largest
    assert sum(run * run for run in runs) == squares


def test_balanced_ends_refuses_more_parts_than_items() -> None:
    with pytest.raises(ValueError, match="3 items into 4"):
        balanced_ends([1.0, 1.0, 1.0], 4)


def _large(**keys: Any) -> Any:
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 49152,
        "vocab_size": 152064,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        **keys,
    }
    return load_model_config(ModelSection(architecture=architecture), None)


def test_a_107b_model_is_cut_in_seconds_with_every_parameter_in_one_chunk() -> None:
    config = _large()
    begin = time.process_time()
    specs = plan_cut(config, 8, 4096)
    assert time.process_time() - begin < 10.0
    assert [spec.index for spec in specs] == list(range(8))
    assert [spec.embeds for spec in specs] == [True] + [False] * 7
    assert [spec.head for spec in specs] == [False] * 7 + [True]
    assert specs[0].first_layer == 0
    assert specs[-1].end_layer == 78
    assert all(a.end_layer == b.first_layer for a, b in itertools.pairwise(specs))
    total = count_parameters(config)
    assert total == 108_491_952_128
    assert sum(spec.parameters for spec in specs) == total
    # One layer is 1.36e9 parameters: no chunk may be further than that from the mean.
    layer = 8192 * 49152 * 3 + 8192 * 8192 * 2 + 8192 * 1024 * 2
    assert max(abs(spec.parameters - total / 8) for spec in specs) < layer * 1.01

    names: list[str] = []
    for spec in (specs[0], specs[3], specs[-1]):
        chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=True)
        assert all(parameter.is_meta for parameter in chunk.parameters())
        assert sum(p.numel() for p in chunk.parameters()) == spec.parameters
        names += chunk.full_names().values()
    assert len(names) == len(set(names))


def test_a_large_vocabulary_takes_layers_from_its_chunk() -> None:
    six = small_config("qwen3", num_hidden_layers=6)
    even = [s.end_layer - s.first_layer for s in plan_cut(six, 3, 16)]
    assert even == [2, 2, 2]
    config = small_config("qwen3", num_hidden_layers=6, vocab_size=20000, tie_word_embeddings=False)
    ends = plan_cut(config, 3, 16)
    assert ends[1].end_layer - ends[1].first_layer == 4
    assert ends[0].parameters > ends[1].parameters


def test_tied_models_hold_the_head_twice_only_when_cut() -> None:
    config = small_config("llama", tie_word_embeddings=True)
    total = count_parameters(config)
    assert total == sum(p.numel() for p in reference_model(config).parameters())
    assert sum(spec.parameters for spec in plan_cut(config, 1, 16)) == total
    head = config.vocab_size * config.hidden_size
    for spec in plan_cut(config, 2, 16):
        chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
        assert sum(p.numel() for p in chunk.parameters()) == spec.parameters
    assert sum(spec.parameters for spec in plan_cut(config, 2, 16)) == total + head


def test_more_chunks_than_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"= 5 is above the model's 4 layers.*at most 4"):
        plan_cut(small_config("qwen3"), 5, 16)


def test_learned_positions_limit_the_sequence() -> None:
    with pytest.raises(ModelError, match=r"sequence_length 65 .* 64 positions"):
        plan_cut(small_config("opt"), 2, 65)
    plan_cut(small_config("opt"), 2, 64)
    plan_cut(small_config("llama"), 2, 65)
