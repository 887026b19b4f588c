"""The held-out loss by source: every held-out sequence counts in the loss of its source, once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import TokenFiles, held_out, prepare
from dilocox.data.rows import RowBatch
from dilocox.data.sequences import held_out_by_source
from dilocox.inner.columns import columns_of
from dilocox.inner.site_model import EvaluatedBatch
from dilocox.training import evaluator as evaluator_module
from dilocox.training import held_out_sources
from dilocox.training.batches import Batch
from dilocox.training.builder import Hooks
from dilocox.training.evaluator import Evaluator, HeldOutLoss
from dilocox.training.held_out_batches import validation_batches
from dilocox.training.held_out_sources import source_batches
from tests.data.conftest import section, write_corpus

SHARES = (5, 2, 1)
"""Weights of the sources."""


def run_of(files: TokenFiles, sequences: int, packing: str, **site: Any) -> RunConfig:
    options = files.manifest["made_with"]["options"]
    data = {"sources": options["sources"], "sequence_length": 16, "packing": packing}
    return resolve_run(
        {
            "model": {"architecture": {"model_type": "llama"}},
            "data": data | {"validation_sequences": sequences},
            "site": {"batch_size": 24, "micro_batch_size": 4, **site},
            "sites": {"paris": {}},
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    """Token files of three sources of different sizes."""
    root = tmp_path_factory.mktemp("sources")
    tables = [
        {
            "name": f"s{share}",
            "source": str(write_corpus(root / str(share), documents=8 * share)),
            "weight": share,
        }
        for share in SHARES
    ]
    data = section(None, sources=tables, validation_fraction=0.3)
    return prepare(data, root / "data", seed=0)


class Model:
    """The loss of a label is its number."""

    def __init__(self) -> None:
        self.passes = 0

    def evaluate(self, inputs: torch.Tensor, labels: torch.Tensor, counted: Any) -> float:
        self.passes += 1
        found = labels[labels >= 0].double()
        assert counted is None or counted.labels == len(found)
        return float(found.mean())

    def measure(self, *batch: Any) -> EvaluatedBatch:
        loss = self.evaluate(*batch)
        return EvaluatedBatch(loss, {"twice": 2 * loss})


def evaluated(
    config: RunConfig, files: TokenFiles, monkeypatch: pytest.MonkeyPatch
) -> tuple[HeldOutLoss, Model]:
    monkeypatch.setattr(evaluator_module, "anchors", lambda _: {})
    model = Model()
    rank = SimpleNamespace(model=model, live={}, mesh=SimpleNamespace(shards=1))
    model.sync_tied = lambda: None  # type: ignore[attr-defined]
    batches = validation_batches(config, files, 0)
    sources = source_batches(config, files, 0, Hooks())
    control = cast(Any, SimpleNamespace(touch=lambda: None))
    found = Evaluator(cast(Any, rank), control, batches, None, sources)
    without = Evaluator(cast(Any, rank), control, batches, None)
    figures = Evaluator(cast(Any, rank), control, batches, None, sources, measure=model.measure)
    beside = figures.held_out_loss(0)
    assert beside.mean == found.held_out_loss(0).mean
    assert beside.figures == pytest.approx({"twice": 2 * beside.mean})
    assert found.held_out_loss(0).by_source == {}
    assert without.held_out_loss(0, by_source=True) == found.held_out_loss(0)
    model.passes = 0
    return found.held_out_loss(0, by_source=True), model


def labels_of(rows: Any) -> np.ndarray:
    return rows.labels[rows.labels >= 0] if isinstance(rows, RowBatch) else rows[:, 1:].ravel()


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("sequences", [3, 7, 24, 29, 40, 1000])
def test_each_source_has_the_mean_over_its_held_out_labels(
    files: TokenFiles, sequences: int, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(files, sequences, packing)
    own = held_out_by_source(files, config.data.rows, sequences)
    assert list(own) == ["s5", "s2", "s1"]
    found, model = evaluated(config, files, monkeypatch)
    wanted = {name: float(labels_of(rows).mean()) for name, rows in own.items()}
    assert found.by_source == pytest.approx(wanted, rel=1e-12)
    # Batches of one source are not computed twice.
    assert model.passes <= len(validation_batches(config, files, 0)) + 2 * len(own)
    everything = labels_of(held_out(files, config.data.rows, sequences))
    if sequences == 24:
        assert found.mean == pytest.approx(float(everything.mean()))


def test_shards_divide_the_batches_of_a_source(files: TokenFiles) -> None:
    whole = source_batches(run_of(files, 29, "stream"), files, 0, Hooks())
    halves = [
        source_batches(run_of(files, 29, "stream", micro_batch_size=2, shards=2), files, n, Hooks())
        for n in range(2)
    ]

    def stacked(batches: tuple[Batch, ...]) -> torch.Tensor:
        return torch.cat([each.labels for each in batches])

    for number, source in enumerate(whole):
        parts = [half[number] for half in halves]
        assert {part.whole for part in parts} == {source.whole}
        for batch, *own in zip(source.rest, *(part.rest for part in parts), strict=True):
            assert torch.equal(batch.labels, stacked(tuple(own)))
            assert {each.counted and each.counted.labels for each in own} == {
                batch.counted and batch.counted.labels
            }


def test_what_fills_a_batch_has_no_columns(
    files: TokenFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a row with pairs are no pairs: they would count in the loss of their source."""

    def rows(count: int) -> RowBatch:
        values = np.arange(count * 16).reshape(count, 16)
        pair = np.zeros((count, 16), dtype=np.float32)
        pair[:, :2], pair[:, 2:4], pair[:, 8:10], pair[:, 10:12] = 1, -1, 2, -2
        return RowBatch(values, values.copy(), values.copy(), {"pair": pair, "weight": pair + 1})

    own = {"a": rows(5), "b": rows(3)}
    monkeypatch.setattr(held_out_sources, "held_out_by_source", lambda *_: own)
    config = run_of(files, 8, "documents")
    first, second = source_batches(config, files, 0, Hooks())
    (begun,), (rest,) = first.rest, second.rest
    assert (first.whole, second.whole) == (range(1), range(0))
    for batch, there, row in ((begun, 1, 4), (rest, 3, 0)):
        assert batch.counted is not None
        assert batch.counted.labels == 2 * there
        for column in columns_of(batch.labels, ["pair", "weight"]).values():
            assert column[:there].any()
            assert not column[there:].any()
        assert batch.inputs[:there].tolist() == own["ab"[row == 0]].inputs[row:].tolist()


def test_no_sources_with_one_text_or_with_functions_that_know_none(
    files: TokenFiles, tmp_path: Path
) -> None:
    config, packed = (run_of(files, 24, packing) for packing in ("stream", "documents"))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.mean()

    assert source_batches(config, files, 0, Hooks(loss=loss)) == []
    assert len(source_batches(packed, files, 0, Hooks(loss=loss))) == 3
    own = Hooks(validation=lambda start, count: np.zeros((count, 17), dtype=np.int64))
    assert source_batches(packed, files, 0, own) == []
    one = prepare(section(write_corpus(tmp_path / "one")), tmp_path / "data", seed=0)
    assert source_batches(config, one, 0, Hooks()) == []
