"""A function of the user's own as a task: found by file and name, its figures beside others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dilocox
from dilocox.cli.main import main
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.task_figures import as_report, figures_of
from dilocox.errors import ConfigError, EvaluationError
from dilocox.training.launch import local
from dilocox.training.launch.tasks_check import check_run_tasks
from dilocox.training.tasks import own_function
from dilocox.training.tasks.harness import TaskOptions, check_tasks, evaluate_folder
from dilocox.training.tasks.own_function import as_task, is_function, load_function
from tests.support.lm_tasks import write_model
from tests.training.tasks.test_beside import config

pytestmark = pytest.mark.waits

SCORE = """\
import random
import torch
from helper import WORDS

def score(model, tokenizer):
    assert not model.training
    assert not torch.is_grad_enabled()
    ids = torch.tensor([tokenizer(WORDS)["input_ids"]])
    loss = model(ids, labels=ids).loss
    return {"loss": loss, "drawn": random.random(), "odd": float("nan")}

def nothing(model, tokenizer):
    return {}

def words(model, tokenizer):
    return {"a": "b"}

def comma(model, tokenizer):
    return {"a,b": 1}

def broken(model, tokenizer):
    raise RuntimeError("no such thing")

VALUE = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper.py").write_text('WORDS = "def main(): return"\n')
    (tmp_path / "score.py").write_text(SCORE)
    yield tmp_path / "score.py"
    for name in ("helper", "dilocox_task_score"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("given") / "model")


def loss_of(folder: Path) -> float:
    tokenizer, network = own_function_model(folder)
    ids = torch.tensor([tokenizer("def main(): return")["input_ids"]])
    with torch.no_grad():
        return float(network(ids, labels=ids).loss)


def own_function_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def test_its_figures_are_those_of_the_model(file: Path, model: Path) -> None:
    task = f"{file}:score"
    assert check_tasks(TaskOptions((task,))) == ["score"]
    found = as_report(figures_of(evaluate_folder(model, TaskOptions((task,)))))
    again = as_report(figures_of(evaluate_folder(model, TaskOptions((task,)))))
    assert found == again
    assert list(found["results"]) == ["score/loss", "score/drawn", "score/odd"]
    assert found["results"]["score/loss"] == pytest.approx(loss_of(model))
    assert found["results"]["score/odd"] is None
    assert (found["stderr"], found["samples"]) == ({}, {})


def test_the_command_takes_it(file: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(model), "--tasks", f"{file}:score"])
    assert ended.value.code == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["score", "loss", "-", f"{loss_of(model):.4f}"]


def test_it_is_a_task_beside_those_of_lm_eval(file: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from tests.support.lm_tasks import CHOICE, write_tasks

    tasks = write_tasks(tmp_path / "tasks")
    options = TaskOptions((str(tasks / "choice.yaml"), f"{file}:score"), limit=2)
    assert check_tasks(options) == ["score", CHOICE]
    found = as_report(figures_of(evaluate_folder(model, options)))
    assert {f"{CHOICE}/acc", "score/loss"} < set(found["results"])
    assert found["samples"] == {CHOICE: 2}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("{file}:scores", r"score.py has no function scores"),
        ("{file}:VALUE", r"score.py has no function VALUE"),
        ("{folder}/none.py:score", r"none.py:score: no such file"),
        ("{folder}/bad.py:score", r"bad.py cannot be imported \(ZeroDivisionError: division by"),
        ("{folder}/exits.py:score", r"exits.py cannot be imported \(SystemExit: 3\)"),
    ],
)
def test_functions_that_are_not_there(task: str, said: str, file: Path) -> None:
    (file.parent / "bad.py").write_text("1 / 0\n")
    (file.parent / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=said) as refused:
        check_tasks(TaskOptions((task.format(file=file, folder=file.parent),)))
    assert str(refused.value).startswith("evaluation.tasks: ")
    assert "\n" not in str(refused.value)


def test_two_functions_of_one_name_are_refused(file: Path) -> None:
    (file.parent / "other.py").write_text("def score(model, tokenizer): return {'a': 1}\n")
    with pytest.raises(ConfigError, match="have the same name: rename one"):
        check_tasks(TaskOptions((f"{file}:score", f"{file.parent}/other.py:score")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", 'returned dict; return figures by name, such as {"accuracy": 0.5}'),
        ("words", "returned str for 'a'; return a number"),
        ("comma", "named a figure 'a,b'; use a text without a comma"),
        ("broken", r"score.py:broken failed \(RuntimeError: no such thing\)"),
    ],
)
def test_what_is_no_figure_is_said(name: str, said: str, file: Path, model: Path) -> None:
    with pytest.raises(EvaluationError, match=said):
        evaluate_folder(model, TaskOptions((f"{file}:{name}",)))


def test_a_module_of_a_package_is_imported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "scoring_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "values.py").write_text("ONE = 1\n")
    (package / "scores.py").write_text(
        "from .values import ONE\ndef one(m, t): return {'a': ONE}\n"
    )
    assert load_function(f"{package}/scores.py:one")(None, None) == {"a": 1}
    assert sys.path[-1] == str(tmp_path)


def top_level(model: Any, tokenizer: Any) -> dict[str, float]:
    return {"one": 1.0}


def test_functions_that_another_process_finds(tmp_path: Path) -> None:
    assert as_task(top_level) == f"{Path(__file__).resolve()}:top_level"
    assert load_function(as_task(top_level))(None, None) == {"one": 1.0}

    def inner(model: Any, tokenizer: Any) -> dict[str, float]:
        return {}

    typed: dict[str, Any] = {}
    exec("def f(model, tokenizer): return {}", typed)
    for function in (inner, lambda *_: {}, typed["f"], Scorer()):
        with pytest.raises(ConfigError, match="cannot be found by another process; define a"):
            as_task(function)  # type: ignore[arg-type]


class Scorer:
    def __call__(self, model: Any, tokenizer: Any) -> dict[str, float]:
        return {}


def test_how_functions_are_written() -> None:
    assert is_function("a/b.py:score")
    assert is_function("~/my file.py:_f1")
    assert not any(map(is_function, ("arc_easy", "a.yaml", "b.py", "b.py:", "b.py:1", "b.py:a.b")))


def test_a_run_from_python_has_it_as_one_more_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(local, "train_here", lambda run, hooks, **_: seen.append(run))
    run = config(tmp_path, tasks=["arc"])
    task = f"{Path(__file__).resolve()}:top_level"
    dilocox.train(run, evaluation=top_level)
    assert seen[0].evaluation.tasks == ["arc", task]
    assert seen[0].digest() == run.digest()
    dilocox.train(seen[0], evaluation=top_level)
    assert seen[1].evaluation.tasks == ["arc", task]
    dilocox.train(config(tmp_path, tasks=[], tasks_every=2), evaluation=top_level)
    assert (seen[2].evaluation.tasks, seen[2].tasks_site) == ([task], "paris")


def test_lm_eval_is_not_needed_for_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_function, "load_function", lambda *_: None)

    def absent(*_: Any) -> None:
        raise ConfigError("lm-eval is not installed")

    monkeypatch.setattr("dilocox.training.launch.tasks_check.check_installed", absent)
    check_run_tasks(config(tmp_path, tasks=[f"{file}:score"]), None)
    with pytest.raises(ConfigError, match="lm-eval is not installed"):
        check_run_tasks(config(tmp_path, tasks=[f"{file}:score", "arc"]), None)
    with pytest.raises(ConfigError, match=r"tasks_every = 2 asks .* tasks names none: name tasks"):
        check_run_tasks(config(tmp_path, tasks=[], tasks_every=2), None)


def test_a_script_that_starts_a_run_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import dilocox\n"
        "def score(model, tokenizer): return {'a': 1}\n"
        "dilocox.train(None, evaluation=score)\n"
    )
    with pytest.raises(ConfigError, match=r'below `if __name__ == "__main__":`') as refused:
        check_run_tasks(config(tmp_path, tasks=[f"{script}:score"]), None)
    assert "starts a run when it is imported" in str(refused.value)
