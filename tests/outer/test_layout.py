"""Layouts and the split of a stage's tensors into fragments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.compression import BLOCK
from dilocox.errors import ConfigError, ExchangeError
from dilocox.outer.layout import Layout, layer_number, split_pieces

pytestmark = pytest.mark.waits

SHAPES = st.lists(st.lists(st.integers(0, 13), max_size=3).map(tuple), min_size=0, max_size=8)


@given(shapes=SHAPES, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pack_and_unpack_are_inverse(shapes: list[tuple[int, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    named = {
        f"t{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)
    }
    layout = Layout.of({name: tensor.shape for name, tensor in named.items()})
    assert layout.length % BLOCK == 0
    assert all(offset % BLOCK == 0 for offset in layout.offsets)
    flat = layout.pack(named)
    assert flat.dtype == torch.float32
    assert flat.shape == (layout.length,)
    # Everything between the tensors is zero: nothing else adds to the sum of magnitudes.
    total = sum(tensor.double().abs().sum() for tensor in named.values())
    assert float(flat.double().abs().sum()) == pytest.approx(float(total))
    back = {name: torch.full_like(tensor, 7.0) for name, tensor in named.items()}
    layout.unpack(flat, back)
    for name, view in layout.views(flat).items():
        assert torch.equal(view, named[name])
        assert torch.equal(back[name], named[name])


@given(order=st.permutations(list(range(6))))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_order_of_tensors_moves_them_and_nothing_else(order: list[int]) -> None:
    named = {f"t{number}": torch.full((number * 50,), float(number)) for number in range(6)}
    layout = Layout.of({f"t{number}": named[f"t{number}"].shape for number in order})
    flat = layout.pack(dict(reversed(named.items())))
    assert layout.names == tuple(f"t{number}" for number in order)
    for name, view in layout.views(flat).items():
        assert torch.equal(view, named[name])


def test_views_share_memory_and_positions_have_names() -> None:
    layout = Layout.of({"a": (3, 2), "b": (0,), "c": (130,)})
    assert layout.offsets == (0, 128, 128)
    assert layout.length == 384
    flat = torch.zeros(layout.length)
    layout.views(flat)["c"][129] = 5.0
    assert flat[257] == 5.0
    assert layout.locate(257) == "c[129]"
    assert layout.locate(5) == "a[5]"
    assert layout.locate(6) == "padding[6]"


def test_wrong_tensors_are_named() -> None:
    layout = Layout.of({"a": (3,), "b": (2, 2)})
    with pytest.raises(ExchangeError, match="b: belongs to this fragment"):
        layout.pack({"a": torch.zeros(3)})
    with pytest.raises(ExchangeError, match=r"b: expected fp32 \[2, 2\]"):
        layout.pack({"a": torch.zeros(3), "b": torch.zeros(4)})
    with pytest.raises(ExchangeError, match="a: expected fp32"):
        layout.unpack(torch.zeros(256), {"a": torch.zeros(3).half(), "b": torch.zeros(2, 2)})
    with pytest.raises(ExchangeError, match="layout of 256 values"):
        layout.views(torch.zeros(128))


def stage(layers: int, embedding: int = 0, head: int = 0) -> dict[str, int]:
    sizes = {"model.embed_tokens.weight": embedding} if embedding else {}
    for layer in range(layers):
        sizes[f"model.layers.{layer}.attention.weight"] = 60
        sizes[f"model.layers.{layer}.mlp.weight"] = 40
    if head:
        sizes |= {"model.norm.weight": 2, "lm_head.weight": head}
    return sizes


def totals(sizes: dict[str, int], groups: list[list[str]]) -> list[int]:
    return [sum(sizes[name] for name in group) for group in groups]


def test_layer_numbers() -> None:
    assert layer_number("model.layers.12.mlp.up_proj.weight") == 12
    assert layer_number("transformer.h.0.ln_1.bias") == 0
    assert layer_number("model.embed_tokens.weight") is None


@given(
    layers=st.integers(1, 9),
    embedding=st.integers(0, 300),
    head=st.integers(0, 300),
    fragments=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_split_is_contiguous_and_whole(
    layers: int, embedding: int, head: int, fragments: int
) -> None:
    sizes = stage(layers, embedding, head)
    if fragments > len(sizes):
        with pytest.raises(ConfigError, match=r"lower outer\.fragments or site\.stages"):
            split_pieces(sizes, fragments)
        return
    groups = split_pieces(sizes, fragments)
    assert len(groups) == fragments
    assert all(groups)
    assert [name for group in groups for name in group] == list(sizes)
    runs = layers + bool(embedding) + bool(head)
    if fragments <= runs:
        for layer in range(layers):
            holders = [g for g in groups if any(f".{layer}." in name for name in g)]
            assert len(holders) == 1


def test_split_balances() -> None:
    sizes = stage(8)
    assert totals(sizes, split_pieces(sizes, 4)) == [200, 200, 200, 200]
    # A large embedding is a fragment of its own; a small norm never is.
    sizes = stage(4, embedding=400)
    assert totals(sizes, split_pieces(sizes, 3)) == [400, 200, 200]
    sizes = stage(4) | {"model.norm.weight": 2}
    assert totals(sizes, split_pieces(sizes, 2)) == [200, 202]
    assert split_pieces(stage(3), 1) == [list(stage(3))]


def test_fewer_layers_than_fragments_divides_layers() -> None:
    sizes = stage(2)
    assert totals(sizes, split_pieces(sizes, 3)) == [60, 40, 100]
    assert totals(sizes, split_pieces(sizes, 4)) == [60, 40, 60, 40]
    with pytest.raises(ConfigError, match="a stage of 4 tensors cannot be split into 5"):
        split_pieces(sizes, 5)
    with pytest.raises(ConfigError, match="cannot be split into 0"):
        split_pieces(sizes, 0)
