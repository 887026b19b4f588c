"""How the part of a loop of the user's own ends, and what the coordinator is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import DilocoxError, RunStoppedError, TrainingError
from dilocox.training.launch import own_site
from dilocox.training.launch.own_site import OwnSite
from dilocox.training.loop.parts import OwnLoop
from dilocox.training.loop.turns import LoopLeftError, Turns
from tests.support.process_starts import config, refusal


class Scene:
    """A site whose trainer ends as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: BaseException | None = None
        self.left: list[tuple[str, bool]] = []
        self.noted: list[dict[str, Any]] = []
        self.site = OwnSite.__new__(OwnSite)
        self.site.loop = OwnLoop(torch.nn.Linear(1, 1), [])
        self.site.config = None  # type: ignore[assignment]
        self.site.name, self.site.outcome = "paris", "running"
        self.site.device = torch.device("cpu")
        self.site.turns = Turns(self.site.device, lambda: None)
        self.told: list[str] = []
        self.site._tell = self.told.append
        self.site._line = SimpleNamespace(leave=self._leave)  # type: ignore[assignment]
        monkeypatch.setattr(own_site, "train_rank", self._train)
        monkeypatch.setattr(OwnSite, "_take_anchor", lambda _: None)
        monkeypatch.setattr(own_site.site_log, "end", lambda *_: "site paris is done")
        monkeypatch.setattr(own_site.site_log, "note", lambda *_, **facts: self.noted.append(facts))

    def _train(self, *_: object) -> None:
        if self.ends is not None:
            raise self.ends

    def _leave(self, reason: str, *, failed: bool) -> None:
        self.left.append((reason, failed))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@pytest.mark.parametrize(
    ("ends", "outcome", "code", "last"),
    [
        (None, "finished", 0, ["site paris is done"]),
        (RunStoppedError("stopped"), "stopped", 130, ["site paris: the run was stopped"]),
        (LoopLeftError("its loop ended", failed=False), "left", 130, ["site paris has left"]),
        (LoopLeftError("its loop ended by ValueError", failed=True), "failed", 1, []),
        (DilocoxError("refused"), "failed", 1, []),
    ],
)
def test_how_a_site_s_part_ends(
    scene: Scene, ends: BaseException | None, outcome: str, code: int, last: list[str]
) -> None:
    threads = torch.get_num_threads()
    scene.ends = ends
    scene.site._run(None)  # type: ignore[arg-type]
    assert (scene.site.outcome, scene.noted[0]["code"]) == (outcome, code)
    assert [line[: len(begin)] for line, begin in zip(scene.told, last, strict=True)] == last
    # The trainer itself has told the coordinator.
    assert scene.left == []
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("ends", [RuntimeError("broken\nmore"), SystemExit(3)])
def test_any_other_error_is_told_at_once_in_one_line(scene: Scene, ends: BaseException) -> None:
    scene.ends = ends
    scene.site._run(None)  # type: ignore[arg-type]
    assert scene.site.outcome == "failed"
    ((reason, failed),) = scene.left
    assert failed
    assert reason.startswith(f"{type(ends).__name__}: ")
    assert "\n" not in reason
    # The user's thread is not left waiting.
    with pytest.raises(TrainingError, match=f"site paris: {type(ends).__name__}: "):
        scene.site.turns.take()


def test_a_place_for_checkpoints_that_cannot_be_opened_is_named_first(tmp_path: Path) -> None:
    run = config(
        tmp_path,
        site={"stages": 1},
        sites={"paris": {"own_code": True}},
        inner={"optimizer": "sgd"},
        checkpoint={"store": "memory://exp::1/store"},
    )
    loop = OwnLoop(torch.nn.Linear(1, 1), [])
    endpoint = Endpoint("https://127.0.0.1:1", {}, "")
    text = refusal(OwnSite, run, "paris", endpoint, loop, lambda _: None)
    assert text.startswith("checkpoint.store memory://exp::1/store: cannot be opened (fsspec")
