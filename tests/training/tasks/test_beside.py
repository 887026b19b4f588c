"""Evaluations beside training: one at a time, taken up again, given up after a while."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.protocol.task_figures import Figure, as_report
from dilocox.errors import ConfigError
from dilocox.training.launch.rank import ends_of
from dilocox.training.tasks import beside
from dilocox.training.tasks.beside import TaskEvaluations, is_due, say_not_evaluated
from dilocox.training.tasks.child import Job, environment

pytestmark = pytest.mark.waits
FIGURES = [Figure("arc", "acc", 0.5, 0.1, 4)]
REPORT = as_report(FIGURES)


def config(root: Path, **evaluation: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "run", "folder": str(root / "{name}")},
            "model": {"architecture": {"model_type": "qwen3"}},
            "sites": {"paris": {}, "lyon": {}},
            "evaluation": {"tasks": ["arc"], **evaluation},
        }
    )


class Client:
    """Keeps the reports."""

    def __init__(self) -> None:
        self.said: list[tuple[int, dict[str, Any], str]] = []

    def report(self, round_: int, metrics: dict[str, Any], kind: str = "round") -> None:
        self.said.append((round_, metrics, kind))

    @property
    def warnings(self) -> list[str]:
        return [metrics["text"] for _, metrics, kind in self.said if kind == "warning"]

    @property
    def reports(self) -> list[tuple[int, str]]:
        return [(said["after_round"], kind) for _, said, kind in self.said if kind != "warning"]


RANK: Any = SimpleNamespace(
    place=SimpleNamespace(leads=True, site="paris"),
    mesh=SimpleNamespace(gather_names=lambda names: [names]),
)


class Control:
    """Counts how often the rank says that it is alive; `phase` is that of the run."""

    def __init__(self) -> None:
        self.touched, self.phase = 0, "running"
        self.when_touched: Callable[[], None] = lambda: None

    @property
    def news(self) -> Any:
        return SimpleNamespace(phase=self.phase)

    def touch(self) -> None:
        self.touched += 1
        self.when_touched()


class Scene:
    """A site's evaluations with processes that end when the test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.config, self.client, self.control = config(root, **keys), Client(), Control()
        self.folder = self.config.folder / "evaluations" / "paris"
        self.may_end, self.begun = threading.Event(), threading.Event()
        self.models: list[str] = []
        self.problem = ""
        monkeypatch.setattr(beside.subprocess, "Popen", self.process)
        self.evaluations = self.again()

    def again(self) -> TaskEvaluations:
        return TaskEvaluations(self.config, "paris", self.client, self.export, cores=2)  # type: ignore[arg-type]

    def export(self, rank: Any, folder: Path) -> str:
        if not self.problem:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}", encoding="utf-8")
        return self.problem

    def process(self, command: list[str], **keys: Any) -> Any:
        job = Job.read(Path(command[-1]))
        self.models.append(Path(job.model).name)
        killed = threading.Event()

        def wait(limit: float | None = None) -> int:
            self.begun.set()
            while not killed.is_set() and not self.may_end.wait(0.005):
                pass
            if killed.is_set():
                return -9
            Path(job.result).write_text(json.dumps({"report": REPORT}), encoding="utf-8")
            return 0

        return SimpleNamespace(wait=wait, kill=killed.set)

    def wait_for_end(self) -> None:
        running = self.evaluations._running
        assert running is not None
        assert running.thread is not None
        running.thread.join(30)
        assert not running.thread.is_alive()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**keys: Any) -> Scene:
        made.append(Scene(tmp_path, monkeypatch, **keys))
        return made[-1]

    yield make
    for each in made:
        each.evaluations.close()


def test_rounds_that_are_due(tmp_path: Path) -> None:
    own = config(tmp_path, tasks_every=3)
    assert [r for r in range(-1, 9) if is_due(own, r)] == [2, 5, 8]
    assert not any(is_due(config(tmp_path), r) for r in range(-1, 9))


def test_only_given_weights_are_evaluated_before_training(tmp_path: Path) -> None:
    raw = config(tmp_path).model_dump(mode="json", exclude_none=True)
    raw["model"] = {"path": "some/model"}
    assert is_due(resolve_run(raw), -1)
    raw["model"]["pretrained"] = False
    raw["data"]["tokenizer"] = "train"
    assert not is_due(resolve_run(raw), -1)


def test_one_at_a_time_and_what_is_skipped_is_said(scene: Callable[..., Scene]) -> None:
    own = scene(tasks_every=1)
    own.evaluations.after_round(RANK, 0)
    assert own.begun.wait(30)
    own.evaluations.after_round(RANK, 1)
    assert own.client.warnings == [
        "the evaluation on tasks after round 1 was skipped: the one after round 0 still runs"
    ]
    own.may_end.set()
    own.wait_for_end()
    own.evaluations.after_round(RANK, 2)
    own.wait_for_end()
    assert own.client.reports == [(0, "tasks"), (2, "tasks")]
    assert {path.name for path in own.folder.iterdir()} == {"round-00000.json", "round-00002.json"}


def test_a_stop_keeps_the_model_for_the_run_that_goes_on(scene: Callable[..., Scene]) -> None:
    own = scene(tasks_every=1)
    own.evaluations.after_round(RANK, 1)
    assert own.begun.wait(30)
    own.evaluations.close()
    assert own.client.said == []
    for name in ("round-00002.json", "round-00002.part", "other"):
        (own.folder / name).mkdir()
    own.may_end.set()
    own.evaluations = own.again()
    own.evaluations.begin(RANK, 2)
    own.wait_for_end()
    assert own.models == ["round-00001", "round-00001"]
    assert own.client.reports == [(1, "tasks")]
    assert [path.name for path in own.folder.iterdir()] == ["round-00001.json"]
    # What has an end is not done again, what the run trains again is.
    own.evaluations = own.again()
    own.evaluations.begin(RANK, 2)
    assert own.evaluations._running is None
    own.evaluations.begin(RANK, 1)
    assert list(own.folder.iterdir()) == []


def test_a_loop_of_the_users_own_that_ends_takes_its_evaluation_along(
    scene: Callable[..., Scene],
) -> None:
    """The process of the loop goes on, so the evaluation would, too."""
    own = scene(tasks_every=1)
    own.evaluations.after_round(RANK, 1)
    assert own.begun.wait(30)
    beside_it: Any = SimpleNamespace(close=lambda *_: None)
    trainer: Any = SimpleNamespace(
        background=beside_it, batches=beside_it, outer=beside_it, tasks=own.evaluations
    )
    for end in ends_of(trainer, beside_it, None):
        end()
    own.wait_for_end()
    assert own.client.said == []
    trainer.tasks = None
    for end in ends_of(trainer, beside_it, beside_it):
        end()


def test_the_end_waits_for_the_model_and_stays_alive(scene: Callable[..., Scene]) -> None:
    own = scene()
    model = own.config.folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    own.control.when_touched = own.may_end.set
    own.evaluations.finish(RANK, 7, own.control)  # type: ignore[arg-type]
    assert own.models == ["model"]
    assert own.client.reports == [(7, "tasks")]
    assert own.client.warnings == ["evaluates the finished model on tasks: arc"]
    assert own.control.touched
    assert (model / "config.json").exists()


def test_a_stop_ends_the_wait_at_the_end(scene: Callable[..., Scene]) -> None:
    own = scene(tasks_every=1)
    own.evaluations.after_round(RANK, 0)
    own.control.phase = "stopping"
    own.evaluations.finish(RANK, 1, own.control)  # type: ignore[arg-type]
    assert own.client.reports == []
    assert "given up: the run is stopped" in own.client.warnings[-1]


def test_a_disk_that_fails_is_a_warning(scene: Callable[..., Scene]) -> None:
    own = scene(tasks_every=1)
    own.problem = "disk full"
    own.evaluations.after_round(RANK, 0)
    assert own.client.warnings == ["tasks were not evaluated after round 0 (disk full)"]
    assert own.models == []


def test_a_process_that_hangs_or_crashes_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    real = beside.subprocess.Popen
    for program, said in (
        ("import time; time.sleep(600)", "took longer than 0.2 s (evaluation.tasks_timeout)"),
        ("import os; os.kill(os.getpid(), 9)", "was killed (signal 9)"),
    ):

        def other(command: list[str], program: str = program, **keys: Any) -> Any:
            return real([command[0], "-c", program], **keys)

        monkeypatch.setattr(beside.subprocess, "Popen", other)
        own = TaskEvaluations(
            config(tmp_path, tasks_timeout=0.2 if "sleep" in program else 60.0),
            "paris", client, None, 1,  # type: ignore[arg-type]
        )  # fmt: skip
        own._start(3, tmp_path / "model-of-nobody")
        assert own._running is not None
        assert own._running.thread is not None
        own._running.thread.join(60)
        assert said in client.warnings[-1]
        assert client.warnings[-1].startswith("tasks were not evaluated after round 3: ")


def test_a_site_that_left_does_not_evaluate_and_that_is_said(tmp_path: Path) -> None:
    client, plan = Client(), SimpleNamespace(round=4, members={"lyon": None})
    say_not_evaluated(client, config(tmp_path), plan)  # type: ignore[arg-type]
    assert "site paris (evaluation.tasks_site) has left" in client.warnings[0]
    say_not_evaluated(client, config(tmp_path, tasks_site="lyon"), plan)  # type: ignore[arg-type]
    assert len(client.warnings) == 1


def test_tasks_are_not_what_sites_agree_on(tmp_path: Path) -> None:
    plain = config(tmp_path, tasks=[])
    other = config(tmp_path, tasks=["a.yaml"], tasks_every=2, tasks_site="lyon", tasks_chat=True)
    assert plain.digest() == other.digest()
    assert (plain.tasks_site, other.tasks_site) == (None, "lyon")
    assert config(tmp_path).tasks_site == "paris"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tasks_site": "rome"}, "'rome' is not one of the sites: paris, lyon"),
        ({"tasks_timeout": 0.0}, "tasks_timeout"),
        ({"tasks": "arc"}, "tasks"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, **keys)


def test_the_process_is_no_rank_and_takes_no_gpu() -> None:
    own = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "1"}
    assert environment(own, "cpu") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": ""}
    assert environment(own, "cuda") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
