"""Of a stored tensor a shard reads and converts its own rows, and the shards together the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import build_chunk, materialise, open_weights, plan_cut
from dilocox.models.hf_weights import PretrainedWeights
from dilocox.models.materialise import local_part, own_rows
from dilocox.models.weight_source import FreshWeights
from tests.support.architectures import StateSource, reference_model, small_config


@contextmanager
def one_of(shards: int, rank: int) -> Iterator[Any]:
    """The mesh of a rank whose neighbours there are none of: nothing is sent here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=shards, store=FakeStore())
    try:
        # PyTorch remembers meshes by their values: without a name those of all ranks are one.
        yield init_device_mesh("cpu", (shards,), mesh_dim_names=(f"rank{rank}",))
    finally:
        dist.destroy_process_group()


class Slice:
    """A stored tensor of which is counted what is read."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self._inner, self._read = inner, read

    def get_shape(self) -> list[int]:
        return list(self._inner.get_shape())

    def __getitem__(self, rows: slice) -> torch.Tensor:
        value: torch.Tensor = self._inner[rows]
        self._read.append(value.numel())
        return value


class File:
    """A file whose readings are counted, in elements."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self._inner, self._read = inner, read

    def get_tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._inner.get_tensor(name)
        self._read.append(value.numel())
        return value

    def get_slice(self, name: str) -> Slice:
        return Slice(self._inner.get_slice(name), self._read)


def filled(
    config: Any, folder: Path, shards: int, rank: int
) -> tuple[dict[str, torch.Tensor], int, int]:
    """A rank's own tensors by full name, elements that were read, and those that it holds."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    read: list[int] = []
    source = open_weights(ModelSection(path=str(folder)), config, 0)
    assert isinstance(source, PretrainedWeights)
    handle = source._handle
    source._handle = lambda name: File(handle(name), read)  # type: ignore[method-assign]
    (spec,) = plan_cut(config, 1, 16)
    chunk = build_chunk(config, spec, attention="eager", activation_checkpointing=False)
    with one_of(shards, rank) as mesh:
        if shards > 1:
            for layer in chunk.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(chunk, mesh=mesh)
        materialise(chunk, source, "cpu")
        own = {}
        for local, parameter in chunk.named_parameters():
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own[chunk.full_name(local)] = held.detach().clone()
    return own, sum(read), sum(tensor.numel() for tensor in own.values())


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3", "opt"])
def test_a_shard_reads_its_rows_alone(name: str, shards: int, tmp_path: Path) -> None:
    """Of bf16 weights; norms of 32 values in 3 shards are 11, 11 and 10 rows."""
    config = small_config(name, tie_word_embeddings=False)
    model = reference_model(config, seed=4).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    expected = {key: tensor.float() for key, tensor in model.state_dict().items()}
    ranks = [filled(config, tmp_path, shards, rank) for rank in range(shards)]
    for own, read, held in ranks:
        assert read == held < sum(t.numel() for t in expected.values()) / shards * 1.1
        assert all(tensor.dtype == torch.float32 for tensor in own.values())
    for key in ranks[0][0]:
        assert torch.equal(torch.cat([own[key] for own, _, _ in ranks]), expected[key]), key


def test_a_shard_beyond_the_last_row_reads_nothing_of_it(tmp_path: Path) -> None:
    """Norms have 32 values, and the last of 40 shards holds some rows of the embedding alone."""
    config = small_config("qwen3", tie_word_embeddings=False, vocab_size=200)
    reference_model(config, seed=4).save_pretrained(tmp_path)  # type: ignore[operator]
    own, read, held = filled(config, tmp_path, 40, 39)
    assert read == held
    assert own["model.norm.weight"].numel() == 0
    assert own["lm_head.weight"].shape == (5, 32)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("name", ["phi3", "qwen3_moe"])
def test_what_is_made_from_several_is_cut_from_the_whole(
    name: str, shards: int, tmp_path: Path
) -> None:
    config = small_config(name)
    model = reference_model(config, seed=4)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    ranks = [filled(config, tmp_path, shards, rank)[0] for rank in range(shards)]
    expected = model.state_dict()
    for key in ranks[0]:
        assert torch.equal(torch.cat([own[key] for own in ranks]), expected[key]), key


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 64])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_own_rows_are_those_of_torch_chunk(rows: int, shards: int) -> None:
    """With fewer rows than shards, too: the last shards have none."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = torch.arange(2.0 * rows).view(rows, 2)
    for rank in range(shards):
        with one_of(shards, rank) as mesh:
            parts = torch.chunk(whole, shards)
            local = parts[rank] if rank < len(parts) else whole[:0]
            shape, stride = whole.shape, whole.stride()
            cut = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
            found = own_rows(cut)
            assert found is not None
            assert torch.equal(whole[found.start : found.stop], local_part(cut, whole))
            assert len(found) == len(local)
            assert own_rows(DTensor.from_local(whole, mesh, [Replicate()])) is None
            wide = DTensor.from_local(whole.T, mesh, [Shard(1)], shape=(2, rows), stride=(1, 2))
            assert own_rows(wide) is None
    assert own_rows(whole) is None


@pytest.mark.parametrize("shards", [2, 3])
def test_fresh_weights_do_not_depend_on_the_number_of_shards(shards: int) -> None:
    from torch.distributed.fsdp import fully_shard

    config = small_config("qwen3")
    (spec,) = plan_cut(config, 1, 16)
    expected = FreshWeights(config, 3)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(shards):
        chunk = build_chunk(config, spec, attention="eager", activation_checkpointing=False)
        with one_of(shards, rank) as mesh:
            fully_shard(chunk, mesh=mesh)
            materialise(chunk, FreshWeights(config, 3), "cpu")
            for local, parameter in chunk.named_parameters():
                own: Any = parameter
                parts.setdefault(chunk.full_name(local), []).append(own.to_local().detach().clone())
    for key, found in parts.items():
        assert torch.equal(torch.cat(found), expected.tensor(key)), key


def test_sources_without_rows_serve_too() -> None:
    from torch.distributed.fsdp import fully_shard

    config = small_config("llama")
    model = reference_model(config, seed=1)
    (spec,) = plan_cut(config, 1, 16)
    chunk = build_chunk(config, spec, attention="eager", activation_checkpointing=False)
    with one_of(2, 1) as mesh:
        fully_shard(chunk, mesh=mesh)
        materialise(chunk, StateSource(model), "cpu")
        norm: Any = dict(chunk.named_parameters())
        held = {chunk.full_name(k): p.to_local().clone() for k, p in norm.items()}
    for key, tensor in held.items():
        assert torch.equal(tensor, torch.chunk(model.state_dict()[key], 2)[1]), key


def test_rows_of_a_wrong_shape_and_of_untied_weights_are_refused(tmp_path: Path) -> None:
    model = reference_model(small_config("llama", tie_word_embeddings=False), seed=4)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    section = ModelSection(path=str(tmp_path))
    other: Any = open_weights(section, small_config("llama", vocab_size=97), 0)
    with pytest.raises(ModelError, match="are not of the same model"):
        other.rows("model.embed_tokens.weight", range(2))
    tied: Any = open_weights(section, small_config("llama", tie_word_embeddings=True), 0)
    with pytest.raises(ModelError, match="the stored tensors differ"):
        tied.rows("model.embed_tokens.weight", range(40, 60))
