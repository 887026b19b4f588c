"""What is measured of a machine, and what of a large model is stepped."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.planned_runs import run

from dilocox.config.run_config import load_run
from dilocox.errors import TrainingError
from dilocox.tools.planner import host_benchmark
from dilocox.tools.planner.calibrate import LARGEST, cut_down, small_run, split, write
from dilocox.tools.planner.model_outline import ModelOutline

ROOT = Path(__file__).parents[3]


def test_a_small_model_is_stepped_as_it_is() -> None:
    found = cut_down(run(site={"stages": 2, "batch_size": 16, "micro_batch_size": 8}))
    assert ModelOutline.of(found).parameters == ModelOutline.of(run()).parameters
    assert (found.site.stages, found.site.shards) == (1, 1)
    assert found.site.batch_size == found.site.micro_batch_size == 4


def test_what_a_run_says_of_its_sites_and_its_text_is_not_measured() -> None:
    """These sections name sites that a calibration does not have, or need text of their own."""
    more = {
        "privacy": {"clip": 1.0, "noise": 1.0},
        "settlement": {"price": 5, "accounts": {"paris": "0x" + "1" * 40}},
        "evaluation": {"every_rounds": 1, "tasks": ["arc_easy"], "tasks_site": "paris"},
        "data": {"format": "chat", "packing": "documents"},
        "sites": {"lyon": {"data": "text/lyon"}, "paris": {"data": "text/paris"}},
    }
    config = run(**more)
    found = cut_down(config)
    assert list(found.sites) == ["here"]
    assert (found.settlement, found.evaluation.tasks, found.data.format) == (None, [], "auto")
    assert ModelOutline.of(found).parameters == ModelOutline.of(config).parameters


def test_a_large_model_keeps_its_type_and_proportions() -> None:
    found = cut_down(load_run(ROOT / "examples" / "qwen1.5-107b.toml"))
    outline = ModelOutline.of(found)
    assert outline.parameters <= LARGEST
    described = outline.hf_config
    assert described.model_type == "qwen2"
    assert described.intermediate_size == 6 * described.hidden_size
    assert described.num_attention_heads == 8 * described.num_key_value_heads
    assert found.model.activation_checkpointing
    assert found.data.sequence_length == 512


def test_a_model_that_cannot_be_narrowed_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilocox.tools.planner.calibrate.LARGEST", 10)
    assert cut_down(run()) == small_run()


def test_what_grows_with_the_micro_batches_is_computation() -> None:
    each, rest = split(1.5, 3.5, 3)
    assert (each, rest) == (1.0, 0.5)
    # Noise: several cannot take less than one.
    each, rest = split(2.0, 1.0, 3)
    assert each == 2.0
    assert rest == pytest.approx(0.02)
    # Nor can each take more than its part of all.
    each, rest = split(1.0, 9.0, 3)
    assert each == 3.0


def test_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_benchmark, "SECONDS", 0.0)
    readings = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0])
    assert host_benchmark.timed(lambda: None, lambda: next(readings)) == 2.0


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="choose another file with --to"):
        write({}, tmp_path / "file" / "x.toml")
