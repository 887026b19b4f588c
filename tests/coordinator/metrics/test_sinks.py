"""Where numbers go: JSONL always, other sinks by name."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.metrics.sinks import Metrics, check_sinks
from dilocox.errors import ConfigError
from tests.support.full_disk import FullDisk

pytestmark = pytest.mark.waits


def config(*sinks: str) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "night"},
            "model": {"path": "x"},
            "metrics": {"sinks": list(sinks), "project": "moon"},
            "sites": {"a": {}},
        }
    )


ROUND = {
    "kind": "round",
    "site": "paris",
    "time": 1.7e9,
    "step": 20,
    "round": 0,
    "loss": 3.5,
    "tokens": 100,
    "flag": True,
    "anchor_digest": "abc",
}


def read(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=lambda text: pytest.fail(text)) for line in lines]


def test_jsonl_holds_every_record_and_is_valid_json(tmp_path: Path) -> None:
    metrics = Metrics(config(), tmp_path)
    metrics.write(ROUND)
    metrics.write({"kind": "message", "text": "é"})
    metrics.write({"kind": "round", "loss": float("nan"), "grad_norm": float("inf")})
    assert len(read(tmp_path)) == 3, "a line is there as soon as it is written"
    metrics.close()
    assert read(tmp_path)[0] == ROUND
    assert read(tmp_path)[2] == {"kind": "round", "loss": None, "grad_norm": None}


def test_a_line_that_a_kill_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "rou', encoding="utf-8")
    metrics = Metrics(config(), tmp_path)
    metrics.write(ROUND)
    metrics.close()
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1]) == ROUND


def test_tensorboard_gets_one_run_per_site(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(config("tensorboard"), tmp_path)
    metrics.write(ROUND)
    metrics.write({**ROUND, "step": 40, "loss": 3.25})
    metrics.write({**ROUND, "site": "lyon", "loss": 4.0})
    metrics.write({"kind": "round", "step": 20, "loss": 3.75})
    metrics.write({"kind": "message", "text": "nothing with numbers"})
    metrics.close()
    found = {}
    for folder in (tmp_path / "tensorboard").iterdir():
        events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
        events.Reload()
        found[folder.name] = {
            tag: [
                (event.step, float(event.tensor_proto.float_val[0]))
                for event in events.Tensors(tag)
            ]
            for tag in events.Tags()["tensors"]
        }
    assert found["paris"]["loss"] == [(20, 3.5), (40, 3.25)]
    assert found["lyon"]["loss"] == [(20, 4.0)]
    assert found["run"] == {"loss": [(20, 3.75)]}
    assert set(found["paris"]) == {"loss", "tokens", "round"}


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.finished = False
        self.broken = False

    def log(self, values: dict[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


class Tracker(types.ModuleType):
    """A tracking package whose only run is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=f"{name}/__init__.py")
        self.run = FakeRun()
        self.options: dict[str, Any] = {}

    def init(self, **options: Any) -> FakeRun:
        self.options = options
        return self.run


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    module = Tracker(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_trackers_get_the_run_file_and_numbers_by_site(tmp_path: Path, tracker: Tracker) -> None:
    chosen = config(tracker.__name__)
    check_sinks(chosen)
    metrics = Metrics(chosen, tmp_path)
    metrics.write(ROUND)
    metrics.write({"kind": "round", "step": 20, "loss": 3.75})
    metrics.close()
    assert tracker.options["project"] == "moon"
    assert tracker.options["name"] == "night"
    assert tracker.options["config"]["outer"]["method"] == "dilocox"
    assert tracker.run.logged == [
        {"paris/loss": 3.5, "paris/tokens": 100.0, "paris/round": 0.0, "inner_step": 20},
        {"loss": 3.75, "inner_step": 20},
    ]
    assert tracker.run.finished


def test_the_held_out_loss_is_also_the_runs(tmp_path: Path, tracker: Tracker) -> None:
    """Who looks for it in the run finds it, whichever site has measured it."""
    metrics = Metrics(config(tracker.__name__), tmp_path)
    metrics.write(
        {"kind": "evaluation", "site": "lyon", "step": 40, "after_round": 1, "val_loss": 4.5}
    )
    metrics.close()
    assert tracker.run.logged == [
        {"lyon/val_loss": 4.5, "inner_step": 40}, {"val_loss": 4.5, "inner_step": 40},
    ]  # fmt: skip


def test_a_tracker_gets_the_held_out_loss_of_each_source(tmp_path: Path, tracker: Tracker) -> None:
    metrics = Metrics(config(tracker.__name__), tmp_path)
    losses = {"web": 4.0, "odd": "x"}
    record = {"kind": "evaluation", "step": 40, "val_loss": 4.5, "val_loss_by_source": losses}
    metrics.write(record)
    metrics.close()
    assert tracker.run.logged == [{"val_loss": 4.5, "val_loss/web": 4.0, "inner_step": 40}]


def test_a_sink_that_fails_ends_no_run(tmp_path: Path, tracker: Tracker) -> None:
    tracker.run.broken = True
    metrics = Metrics(config(tracker.__name__), tmp_path)
    metrics.write(ROUND)
    metrics.write({**ROUND, "step": 40})
    metrics.close()
    rounds, failed, last = read(tmp_path)
    assert (rounds["step"], last["step"]) == (20, 40)
    assert tracker.__name__ in failed["text"]
    assert "no route to host" in failed["text"]


def test_a_sink_that_cannot_be_opened_ends_no_run(tmp_path: Path, tracker: Tracker) -> None:
    """A coordinator that was killed in the middle goes on, whether or not the tracker answers."""

    def unreachable(**options: Any) -> Any:
        raise ConnectionError("no route to host")

    tracker.init = unreachable  # type: ignore[method-assign]
    metrics = Metrics(config(tracker.__name__), tmp_path)
    metrics.write(ROUND)
    metrics.close()
    failed, record = read(tmp_path)
    assert tracker.__name__ in failed["text"]
    assert "no route to host" in failed["text"]
    assert record["step"] == 20


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("kind", ["nothing", "folder"])
def test_a_missing_package_is_named(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where nothing is installed; a folder of that name, as wandb makes one, is no package.
    places = [str(tmp_path)]
    if kind == "folder":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", places)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=f"{name} is not installed; run: pip install {name}"):
        check_sinks(config(name))


def test_lines_outlast_a_full_disk(tmp_path: Path, full_disk: FullDisk) -> None:
    metrics = Metrics(config(), tmp_path)
    metrics.write({"kind": "message", "text": "one"})
    full_disk.leave(3)
    for text in ("two", "three"):
        metrics.write({"kind": "message", "text": text})
    full_disk.free()
    metrics.write({"kind": "message", "text": "four"})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two", "three", "four"]


def test_the_end_of_a_run_waits_for_the_disk(
    tmp_path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dilocox.utils.storage.ROOM_PAUSE", 0.0)
    metrics = Metrics(config(), tmp_path)
    full_disk.leave(0, failures=3)
    metrics.write({"kind": "message", "text": "one"})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["text"] == "one"
