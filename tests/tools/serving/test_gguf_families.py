"""Headers and tensors of GGUF files, against rotations written out and against transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_models import OTHERS, configuration

from dilocox.errors import ConfigError
from dilocox.tools.serving.gguf_families import (
    context_length,
    converted,
    family_of,
    header,
    rotation_factors,
)


@cache
def with_heads(heads: int) -> Any:
    """Return the configuration of a model with this number of heads."""
    return configuration("llama", num_attention_heads=heads, num_key_value_heads=1)


def rotated(first: np.ndarray, second: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return both parts of each pair after its rotation."""
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([first * cos - second * sin, second * cos + first * sin])


@settings(deadline=None)
@given(heads=st.sampled_from([1, 2, 4]), half=st.integers(1, 6), seed=st.integers(0, 99))
def test_neighbours_of_converted_queries_rotate_as_the_halves_did(
    heads: int, half: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    config = with_heads(heads)
    weight = generator.standard_normal((heads * 2 * half, 5)).astype(np.float32)
    hidden, angles = generator.standard_normal(5), generator.standard_normal(half)
    made = converted("model.layers.0.self_attn.q_proj.weight", weight, config)
    assert made.shape == weight.shape
    ours = (made @ hidden).reshape(heads, half, 2)
    theirs = (weight @ hidden).reshape(heads, 2, half)
    found = rotated(ours[..., 0], ours[..., 1], angles)
    expected = rotated(theirs[:, 0], theirs[:, 1], angles)
    assert np.allclose(found, expected)


def test_keys_have_heads_of_their_own_and_others_stay() -> None:
    config = configuration("llama")
    keys = np.arange(64, dtype=np.float32)
    named = "model.layers.0.self_attn.{}_proj.bias".format
    halves = converted(named("k"), keys, config).reshape(2, 16, 2)
    assert halves[1, 0].tolist() == [32, 48]
    assert converted(named("v"), keys, config) is keys
    assert converted(named("k"), keys, configuration("qwen2")) is keys


def test_llama_3_divides_frequencies_as_transformers_does() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = configuration(OTHERS)
    factors = rotation_factors(config)
    assert factors is not None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10_000.0 ** -(np.arange(0, 16, 2) / 16)
    assert np.allclose(plain / factors, scaled.numpy(), rtol=1e-6)
    assert len({*factors.tolist()}) > 2
    assert rotation_factors(configuration("llama")) is None


def test_a_window_bounds_the_context_and_an_unused_one_does_not() -> None:
    assert context_length(configuration("mistral")) == 64
    assert context_length(configuration("mistral", sliding_window=None)) == 128
    unused = {"sliding_window": 16, "use_sliding_window": False}
    assert context_length(configuration("qwen2", **unused)) == 128
    assert context_length(configuration("qwen2", sliding_window=16, use_sliding_window=True)) == 16


def test_the_header_says_what_the_configuration_says() -> None:
    said = header(configuration("granite"))
    assert said["attention.key_length"] == said["rope.dimension_count"] == 16
    assert said["attention.head_count_kv"] == 2
    assert (said["attention.scale"], said["logit_scale"]) == (0.2, 2.0)
    assert header(configuration("qwen3"))["attention.key_length"] == 128


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("gpt_neox", {}, "model type gpt_neox: dilocox writes GGUF for granite, llama"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'linear'",
        ),
    ],
)
def test_other_models_are_refused_and_the_other_way_is_named(
    name: str, keys: dict[str, object], reason: str
) -> None:
    if name == "gpt_neox":
        from transformers import GPTNeoXConfig

        config = GPTNeoXConfig()
    else:
        config = configuration(name, **keys)
    with pytest.raises(ConfigError, match=reason) as refused:
        family_of(config)
    assert "convert_hf_to_gguf.py" in str(refused.value)
