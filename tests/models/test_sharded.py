"""Chunks on several ranks: FSDP shards filled by each rank, and chunks as pipeline stages."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from dilocox.models import build_chunk, materialise, open_weights, plan_cut, tied_pair
from dilocox.models.materialise import local_part
from tests.support.architectures import (
    StateSource,
    cut_model,
    reference_model,
    run,
    section,
    small_config,
    token_ids,
)

pytestmark = pytest.mark.runs


def _sharded_chunks(rank: int, name: str, chunks: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    config = small_config(name, tie_word_embeddings=True, vocab_size=97)
    source = open_weights(section(name, tie_word_embeddings=True, vocab_size=97), config, 3)
    x = token_ids()
    report: dict[str, Any] = {}
    made = []
    for spec in plan_cut(config, chunks, 16):
        chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=True)
        for layer in chunk.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(chunk, mesh=mesh)
        materialise(chunk, source, "cpu")
        for local, parameter in chunk.named_parameters():
            assert isinstance(parameter, DTensor)
            assert not parameter.to_local().is_meta
            full = chunk.full_name(local)
            report[f"local {full}"] = parameter.to_local().shape[0]
            report[full] = parameter.full_tensor().detach()
        chunk.train()
        x = chunk(x)
        made.append(chunk)
    x.square().mean().backward()
    report["logits"] = x.detach()
    for chunk in made:
        for local, parameter in chunk.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            report[f"grad {chunk.full_name(local)}"] = parameter.grad.full_tensor()
    return report


def _pipeline_stage(rank: int, name: str) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    config = small_config(name)
    source = open_weights(section(name), config, 3)
    spec = plan_cut(config, 2, 16)[rank]
    chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
    materialise(chunk, source, "cpu")
    stage = PipelineStage(chunk, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=_loss)
    ids = token_ids(batch=4)
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=ids)
    return {chunk.full_name(n): p.grad for n, p in chunk.named_parameters()}


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _rank(rank: int, folder: str, work: Callable[..., dict[str, Any]], *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # the parent's exit handlers are not this process's to run


def _on_two_ranks(
    folder: Path, work: Callable[..., dict[str, Any]], *args: Any
) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, str(folder), work, *args)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["gemma3_text"])
def test_each_rank_fills_its_shard_of_the_same_weights(
    name: str, chunks: int, tmp_path: Path
) -> None:
    first, second = _on_two_ranks(tmp_path, _sharded_chunks, name, chunks)

    config = small_config(name, tie_word_embeddings=True, vocab_size=97)
    source = open_weights(section(name, tie_word_embeddings=True, vocab_size=97), config, 3)
    expected = cut_model(config, chunks, source)
    seen = set()
    for chunk in expected:
        state = chunk.state_dict()
        for local, full in chunk.full_names().items():
            seen.add(full)
            assert torch.equal(first[full], state[local]), full
            assert torch.equal(second[full], state[local]), full
            rows = state[local].shape[0]
            assert first[f"local {full}"] == (rows + 1) // 2
            assert first[f"local {full}"] + second[f"local {full}"] == rows
    assert ("lm_head.weight" in seen) == (chunks == 2)
    logits = run(expected, token_ids())
    torch.testing.assert_close(first["logits"], logits.detach(), rtol=1e-5, atol=1e-6)
    logits.square().mean().backward()
    for chunk in expected:
        for local, parameter in chunk.named_parameters():
            gradient = first[f"grad {chunk.full_name(local)}"]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "opt"])
def test_chunks_are_pipeline_stages(name: str, tmp_path: Path) -> None:
    ranks = _on_two_ranks(tmp_path, _pipeline_stage, name)
    config = small_config(name)
    (whole,) = cut_model(config, 1, open_weights(section(name), config, 3))
    tied = tied_pair(config)
    ids = token_ids(batch=4)
    _loss(whole(ids), ids).backward()
    pipelined = {full: gradient for rank in ranks for full, gradient in rank.items()}
    if tied is not None:
        # The trainer sums the two; here by hand.
        pipelined[tied[0]] = pipelined[tied[0]] + pipelined.pop(tied[1])
    gradients = {whole.full_name(n): p.grad for n, p in whole.named_parameters()}
    assert gradients.keys() == pipelined.keys()
    for full, gradient in gradients.items():
        torch.testing.assert_close(pipelined[full], gradient, rtol=1e-4, atol=1e-6)


def test_local_part_of_an_unsharded_tensor_is_all_of_it() -> None:
    value = torch.arange(6.0).reshape(3, 2)
    assert local_part(torch.empty(3, 2), value) is value
    with pytest.raises(ValueError, match=r"\(3, 2\) given for \(2, 2\)"):
        local_part(torch.empty(2, 2), value)


def test_materialise_holds_one_whole_tensor_at_a_time() -> None:
    config = small_config("qwen3", tie_word_embeddings=False)
    inner = open_weights(section("qwen3"), config, 0)
    given: list[weakref.ref[torch.Tensor]] = []

    class Watched:
        def tensor(self, full_name: str) -> torch.Tensor:
            assert not [ref for ref in given if ref() is not None], full_name
            value = inner.tensor(full_name)
            given.append(weakref.ref(value))
            return value

    cut_model(config, 2, Watched())
    assert len(given) == len(reference_model(config).state_dict())


def test_materialise_asks_for_its_own_tensors_only_and_each_once() -> None:
    config = small_config("gemma3_text", tie_word_embeddings=False)
    source = StateSource(reference_model(config))
    _, middle, _ = plan_cut(config, 3, 16)
    chunk = build_chunk(config, middle, attention="sdpa", activation_checkpointing=False)
    materialise(chunk, source, "cpu")
    assert sorted(source.asked) == sorted(chunk.full_names().values())
    assert all(f"layers.{n}." not in full for n in (0, 5) for full in source.asked)
    assert not any(t.is_meta for t in [*chunk.parameters(), *chunk.buffers()])
