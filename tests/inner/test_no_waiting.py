"""An inner step reads nothing back from the device: on a GPU the host would wait each time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dilocox.config.run_config import ModelSection
from dilocox.config.site import InnerSection, SiteSection
from dilocox.data.rows import NOT_COUNTED
from dilocox.inner import ChunkSettings, SiteMesh, SiteModel, mean_cross_entropy
from dilocox.inner.counted import CountedLabels, OwnLoss
from dilocox.models import load_model_config, materialise, open_weights, tied_pair
from dilocox.models.packed_rows import unpacked_rows
from tests.support.architectures import ARCHITECTURES, ROUTED, VOCABULARY, chunk_of, token_ids
from tests.support.grids import pairs_of

pytestmark = pytest.mark.waits

CPU = torch.device("cpu")
TYPES = {**ARCHITECTURES, "routed": {k: v for k, v in ROUTED.items() if k != "vocab_size"}}
OPERATIONS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result, or its shape, the host needs."""
METHODS = {"tolist", "numpy", "cpu", "__array__"}
"""Methods that read a tensor without such an operation if the tensor is on the CPU."""


class Waits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in OPERATIONS, func
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in METHODS, func
        return func(*args, **(kwargs or {}))


def site_model(
    name: str, attention: str, precision: torch.dtype, loss: OwnLoss = mean_cross_entropy
) -> SiteModel:
    section = ModelSection(architecture=TYPES[name])
    config = load_model_config(section, VOCABULARY)
    source = open_weights(section, config, seed=0)
    return SiteModel(
        [chunk_of(config, attention)],
        lambda chunk, device: materialise(chunk, source, device),  # type: ignore[arg-type]
        SiteMesh.create(1, 1, CPU),
        SiteSection(batch_size=8, micro_batch_size=2),
        InnerSection(),
        ChunkSettings(hidden_size=32, precision=precision, tied=tied_pair(config)),
        loss=loss,
    )


@pytest.mark.parametrize(
    ("name", "attention", "precision"),
    pairs_of(
        list(TYPES),
        ["sdpa", "eager"],
        [torch.float32, torch.bfloat16],
        rest=pytest.mark.slow,
    ),
)
def test_a_step_of_four_micro_batches_waits_for_nothing(
    name: str, attention: str, precision: torch.dtype
) -> None:
    if name.startswith("opt") and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("OPT of these versions makes a padding mask and reads it")
    model = site_model(name, attention, precision)
    ids, labels = token_ids(8, seed=0), token_ids(8, seed=1)
    model.inner_step(ids, labels, 0.01)  # names of missing gradients are compared once
    with Reads(), Waits():
        result = model.inner_step(ids, labels, 0.01)
    assert result.finite


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_step_on_packed_rows_waits_for_nothing(name: str, attention: str) -> None:
    model = site_model(name, attention, torch.float32)
    ids, labels = token_ids(8, seed=0), token_ids(8, seed=1)
    labels[labels % 2 == 0] = NOT_COUNTED
    positions = torch.arange(ids.shape[1]).remainder(5).expand_as(ids).contiguous()
    count = int((labels >= 0).sum())
    counted = CountedLabels(count, float(count), positions)
    model.inner_step(ids, labels, 0.01, None, counted)
    with Reads(), Waits():
        result = model.inner_step(ids, labels, 0.01, None, counted)
    assert result.finite


def test_a_loss_that_gives_sum_and_count_waits_for_nothing() -> None:
    def sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels >= 0).sum()

    model = site_model("llama", "sdpa", torch.float32, sums)
    ids, labels = token_ids(8, seed=0), token_ids(8, seed=1)
    model.inner_step(ids, labels, 0.01)
    with Reads(), Waits():
        result = model.inner_step(ids, labels, 0.01)
    assert result.finite


def test_others_in_the_process_still_have_packed_sequences_found() -> None:
    from transformers import masking_utils

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with unpacked_rows():
        assert masking_utils.find_packed_sequence_indices(positions) is None
        found: list[Any] = []
        other = threading.Thread(
            target=lambda: found.append(masking_utils.find_packed_sequence_indices(positions))
        )
        other.start()
        other.join()
    assert found[0].tolist() == [[0, 0, 0, 1, 1]]
    again = masking_utils.find_packed_sequence_indices(positions)
    assert again is not None
    assert again.tolist() == [[0, 0, 0, 1, 1]]
