"""Evaluations by lm-eval: its figures are those of the model, and bad tasks are one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.cli.main import main
from dilocox.coordinator.protocol.task_figures import figures_of
from dilocox.errors import CheckpointError, ConfigError
from dilocox.training.tasks import harness
from dilocox.training.tasks.harness import TaskOptions, check_tasks, evaluate_folder
from tests.support.lm_tasks import CHOICE, EXAMPLES, PROSE, write_model, write_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("given") / "model")


@pytest.fixture(scope="module")
def results(model: Path, tasks: Path) -> dict[str, Any]:
    return evaluate_folder(model, TaskOptions((str(tasks),)))


def log_likelihood(model: Path, context: str, text: str) -> float:
    """Sum of the log-probabilities of `text` after `context`, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    before = tokenizer(context)["input_ids"] if context else [tokenizer.eos_token_id]
    whole = before + tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = network(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logits[n - 1, whole[n]]) for n in range(len(before), len(whole)))


def test_figures_are_those_of_the_model(results: dict[str, Any], model: Path, tasks: Path) -> None:
    found = {each.name: each for each in figures_of(results)}
    assert set(found) == {f"{CHOICE}/acc", f"{CHOICE}/acc_norm", f"{PROSE}/word_perplexity",
                          f"{PROSE}/bits_per_byte"}  # fmt: skip
    assert all(each.samples == EXAMPLES for each in found.values())
    right = [
        log_likelihood(model, f"{n} and {n} are", f" {2 * n}")
        > log_likelihood(model, f"{n} and {n} are", f" {2 * n + 1}")
        for n in range(1, EXAMPLES + 1)
    ]
    assert found[f"{CHOICE}/acc"].value == pytest.approx(sum(right) / EXAMPLES)
    texts = [f"def double_{n}(value): return {n} * value" for n in range(EXAMPLES)]
    nats = -sum(log_likelihood(model, "", text) for text in texts)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found[f"{PROSE}/bits_per_byte"].value == pytest.approx(bits, rel=1e-4)


def test_a_file_alone_with_a_limit(model: Path, tasks: Path) -> None:
    options = TaskOptions((str(tasks / "choice.yaml"),), limit=2)
    found = figures_of(evaluate_folder(model, options))
    assert [(each.task, each.samples) for each in found] == [(CHOICE, 2), (CHOICE, 2)]


def test_tasks_are_loaded_before_a_run(tasks: Path) -> None:
    assert check_tasks(TaskOptions((str(tasks),))) == [CHOICE, PROSE]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "names no task"),
        (("{tasks}/nothing.yaml",), "no such file"),
        (("{tasks}", "{tasks}/choice.yaml"), "name it once"),
        (("{empty}/",), "holds no task files"),
    ],
)
def test_tasks_that_cannot_be(
    names: tuple[str, ...], said: str, tasks: Path, tmp_path: Path
) -> None:
    given = tuple(name.format(tasks=tasks, empty=tmp_path) for name in names)
    with pytest.raises(ConfigError, match=said) as refused:
        check_tasks(TaskOptions(given))
    assert str(refused.value).startswith("evaluation.tasks: ")


def test_an_unknown_name_is_refused_with_close_ones(
    monkeypatch: pytest.MonkeyPatch, tasks: Path
) -> None:
    # lm-eval's own 14,000 tasks take many seconds to list: these stand for them.
    from lm_eval import tasks as of_lm_eval

    def few(include_path: list[str], include_defaults: bool) -> Any:
        assert include_defaults
        return real(include_path=str(tasks), include_defaults=False)

    real = of_lm_eval.TaskManager
    monkeypatch.setattr(of_lm_eval, "TaskManager", few)
    with pytest.raises(ConfigError, match="no task 'number_choise'; did you mean number_choice"):
        check_tasks(TaskOptions(("number_choise",)))
    assert check_tasks(TaskOptions(("number_*",))) == [CHOICE]


def test_data_that_is_not_there_is_one_line(tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "choice.yaml").read_text(encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(text.replace("questions", "gone"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*gone.*is its data there"):
        check_tasks(TaskOptions((str(tmp_path),)))


def test_code_that_a_model_writes_is_not_run(tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "choice.yaml").read_text(encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(text + "unsafe_code: true\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="runs code that the model writes"):
        check_tasks(TaskOptions((str(tmp_path),)))


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed; run: pip install 'dilocox"):
        check_tasks(TaskOptions(("arc_easy",)))


def test_a_damaged_model_and_a_device_that_is_not_there(
    tasks: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        evaluate_folder(tmp_path, TaskOptions((str(tasks),)))
    with pytest.raises(ConfigError, match="device 'nothing' cannot be used"):
        evaluate_folder(model, TaskOptions((str(tasks),), device="nothing"))
    with pytest.raises(ConfigError, match="no chat template"):
        evaluate_folder(model, TaskOptions((str(tasks),), chat=True))


@pytest.mark.slow
def test_the_command_shows_models_side_by_side(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    arguments = ["evaluate", str(model), str(other), "--limit", "3"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--tasks", f"{tasks}/choice.yaml,{tasks}/prose.yaml"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "metric", "examples", str(model), str(other)]
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in lines[1:]}
    assert set(rows) == {(CHOICE, "acc"), (CHOICE, "acc_norm"), (PROSE, "word_perplexity"),
                         (PROSE, "bits_per_byte")}  # fmt: skip
    bits = rows[PROSE, "bits_per_byte"]
    assert bits[0] == "3"
    assert bits[1] != bits[2]


@pytest.mark.slow
def test_adapters_are_evaluated_on_their_base(tmp_path: Path, model: Path, tasks: Path) -> None:
    """With the figures of the merged model, which are not those of the base."""
    from dilocox.config.adapter import AdapterSection
    from dilocox.config.run_config import ModelSection
    from dilocox.models import Published, load_model_config
    from dilocox.models.adapter import adapter_shapes
    from dilocox.models.adapter_export import finish_adapter_folder, write_adapter_stage
    from dilocox.training.run_model import export

    section, lora = ModelSection(path=str(model)), AdapterSection(rank=2)
    config, folder = load_model_config(section, None), tmp_path / "adapters"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in adapter_shapes(config, lora).items()
    }
    write_adapter_stage(folder, 0, tensors, Published())
    finish_adapter_folder(folder, config, section, lora, model)
    merged = export(folder, tmp_path / "merged", merge=True)
    options = TaskOptions((str(tasks),))
    own, whole, base = (
        {each.name: each.value for each in figures_of(evaluate_folder(place, options))}
        for place in (folder, merged, model)
    )
    assert own == pytest.approx(whole, rel=1e-3)
    assert own != pytest.approx(base, rel=1e-3)
