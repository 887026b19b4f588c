"""The file with the user's own functions: what is loaded, and every refusal before a process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dilocox
from dilocox.config.code_file import LARGEST, digest_of_code, evaluation_task
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError
from dilocox.tools.testbed import run as testbed
from dilocox.training.builder import Hooks
from dilocox.training.code_file import load_hooks, with_code
from dilocox.training.launch import preflight
from dilocox.training.tasks.beside import options_of
from dilocox.training.tasks.harness import TaskOptions, check_tasks, evaluate_folder

GOOD = """
import torch

OFFSET = 1.0

def loss(logits, labels):
    return _mean(logits) + OFFSET

def _mean(logits):
    return logits.mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters.values(), lr=0.1)

def evaluation(model, tokenizer):
    return {"figure": 1.0}
"""


def write(tmp_path: Path, text: str, name: str = "hooks.py") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def digest(path: str) -> str:
    return digest_of_code(Path(path).read_bytes())


def run_of(path: str | None, **run: Any) -> RunConfig:
    site = {} if path is None else {"code": path}
    tables = {
        "run": run,
        "model": {"architecture": {"model_type": "qwen3", "hidden_size": 8}},
        "inner": {"optimizer": "sgd"},
        "site": site,
        "sites": {"paris": {}, "lyon": {}},
    }
    return resolve_run(tables)


def test_functions_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found = load_hooks(path, digest(path))
    assert sorted(found.functions) == ["loss", "optimizer"]
    assert found.replaced == ["loss", "optimizer"]
    assert found.loss(torch.ones(2), torch.ones(2)) == 2.0
    assert found.evaluation is not None
    found.check(run_of(path), required=True)
    with pytest.raises(ConfigError, match=r"hooks\.py: its SHA-256 is .*agreed on ffff"):
        found.check(run_of(path, code="f" * 64), required=True)


def test_a_spawned_process_loads_the_file_again(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    sent = pickle.dumps(load_hooks(path, digest(path)))
    again = pickle.loads(sent)
    assert again.loss(torch.ones(2), torch.ones(2)) == 2.0
    Path(path).write_text(GOOD + "\n")
    with pytest.raises(ConfigError, match="its SHA-256 is"):
        pickle.loads(sent)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def los(logits, labels): ...", r"los is no function of a run; use one of dataset, eval"),
        ("x = 1", "has no function of a run; define one of dataset"),
        ("loss = 3", "loss is int, not a function"),
        ("y = 1\nraise ValueError('no data\\nhere')", r"run \(ValueError: no data, line 2\)$"),
        ("import sys\nsys.exit(3)", r"cannot be run \(SystemExit: 3, line 2\)$"),
        ("def loss(:", r"cannot be run \(SyntaxError: .*line 1"),
        ("def loss(logits): ...", r"loss\(logits\): cannot be called .*define loss\(logits, labe"),
        ("def loss(a, b, *, columns, scale): ...", "missing a required argument: 'scale'"),
        ("def dataset(start): ...", r"define dataset\(start, count\)$"),
        ("def evaluation(model): ...", r"define evaluation\(model, tokenizer\)$"),
        ("def on_evaluation(): ...", r"define on_evaluation\(round_, loss\)$"),
        ("import dilocox\ndilocox.train(None)", "starts a run when it is imported"),
        (f"# {'x' * LARGEST}", "is larger than 1048576 bytes"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_hooks(path, digest(path))
    assert str(caught.value).startswith(f"site.code {path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_with_another_digest_is_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\ndef loss(a, b): ...")
    for agreed, reason in (("0" * 64, "agreed on 00000000"), ("", "has no run.code")):
        with pytest.raises(ConfigError, match=reason):
            load_hooks(path, agreed, "--code")
    assert not (tmp_path / "ran").exists()
    load_hooks(path, digest(path))
    assert (tmp_path / "ran").exists(), "the file that is agreed on is run"


def test_a_missing_file(tmp_path: Path) -> None:
    gone = tmp_path / "gone.py"
    with pytest.raises(ConfigError, match=r"^run file: site\.code .*gone\.py: no such file"):
        run_of(str(gone))
    # A coordinator needs no file: it has the digest.
    config = run_of(str(gone), code="a" * 64)
    with pytest.raises(ConfigError, match=r"^site\.code .*gone\.py: no such file"):
        with_code(config, Hooks())


def test_a_run_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config, found = with_code(run_of(path), Hooks())
    assert found.replaced == ["loss", "optimizer"]
    assert config.evaluation.tasks == [f"{path}:evaluation"]
    assert config.digest() == run_of(path).digest()
    assert with_code(config, found) == (config, found), "once is enough"
    bare = run_of(None)
    assert with_code(bare, Hooks()) == (bare, Hooks())


def test_functions_from_two_places(tmp_path: Path) -> None:
    config = run_of(write(tmp_path, GOOD))
    for hooks in (
        replace(Hooks(), schedule=lambda step, steps: 0.1),
        replace(Hooks(), on_evaluation=print),
    ):
        with pytest.raises(ConfigError, match="is given besides; move it into the file"):
            with_code(config, hooks)


def test_sites_agree_on_the_file_and_not_on_its_place(tmp_path: Path) -> None:
    first, same = write(tmp_path, GOOD), write(tmp_path, GOOD, "same.py")
    other = write(tmp_path, f"{GOOD}\n", "other.py")
    digests = [run_of(each).digest() for each in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert run_of(first).run.code == digest(first)
    # The digest of a run without the key is that of earlier versions.
    assert run_of(None).digest().startswith("373555c1a9a7edbf")
    assert "code" not in run_of(None).shared()["site"]
    assert "code" not in run_of(first).shared()["site"]


def test_commands_take_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions are there before the first check, and so before any process."""
    found: list[Hooks] = []

    def check(config: RunConfig, role: preflight.Role, display: object = None) -> None:
        found.append(role.hooks)
        raise ConfigError("enough")

    monkeypatch.setattr(preflight, "check", check)
    config = run_of(write(tmp_path, GOOD), folder=str(tmp_path / "run"))
    token = write(tmp_path, "any", "token")
    for start in (
        lambda: dilocox.train(config),
        lambda: dilocox.join(config, site="paris", address="127.0.0.1:1", token_file=token),
        lambda: testbed.check(config),
    ):
        with pytest.raises(ConfigError, match="enough"):
            start()
    assert [each.replaced for each in found] == [["loss", "optimizer"]] * 3


def test_an_evaluation_whose_file_was_changed_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("def evaluation(model, tokenizer):\n    return {'kept': 1.0}\n")
    agreed = digest_of_code(file.read_bytes())
    task = evaluation_task(str(file))
    options = TaskOptions((task,), agreed={task: agreed})
    assert check_tasks(options) == ["evaluation"]
    # Python takes compiled bytes beside a file for it; these bytes are not looked at.
    marker = tmp_path / "ran"
    file.write_text(
        f"open({str(marker)!r}, 'w')\ndef evaluation(model, tokenizer):\n    return {{}}\n"
    )
    with pytest.raises(ConfigError, match="the sites agreed on"):
        check_tasks(options)
    with pytest.raises(ConfigError, match="the sites agreed on"):
        evaluate_folder(tmp_path, options)
    assert not marker.exists()


def test_the_task_of_a_run_s_file_carries_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("def evaluation(model, tokenizer):\n    return {'kept': 1.0}\n")
    config, _ = with_code(run_of(str(file)), Hooks())
    options = options_of(config)
    assert options.agreed == {options.tasks[-1]: config.run.code}
