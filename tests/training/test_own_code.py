"""Functions of a user's own: their digest, who is refused, and what a callback may end."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dilocox
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import ConfigError
from dilocox.training.builder import Hooks
from dilocox.training.held_out_batches import validation_batches
from dilocox.training.launch import local, preflight
from dilocox.training.own_code import (
    ZERO,
    check_code,
    check_columns,
    check_preference,
    code_digest,
    evaluated,
)
from tests.support import own_functions

pytestmark = pytest.mark.waits

MODULE = """\
def loss(logits, labels):
    return (logits ** 2).mean()  # VERSION

class Schedule:
    def __call__(self, step, steps):
        return 1e-3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a user's, in a folder of its own."""
    (tmp_path / "their_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_functions", raising=False)
    return importlib.import_module("their_functions")


def a_run(code: str = "", **inner: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"code": code},
            "model": {"architecture": {"model_type": "qwen3"}},
            "inner": inner,
            "data": {"sequence_length": 32, "validation_sequences": 10},
            "site": {"batch_size": 4, "micro_batch_size": 2},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def test_the_digest_is_of_use_name_and_source(module: Any, tmp_path: Path) -> None:
    digest = code_digest({"loss": module.loss, "dataset": None})
    assert len(digest) == 64
    assert digest == code_digest({"loss": functools.partial(module.loss)})
    assert digest != code_digest({"validation": module.loss})
    assert digest != code_digest({"loss": module.Schedule()})
    source = tmp_path / "their_functions.py"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    assert digest == code_digest({"loss": module.loss}), "line ends are no difference"
    source.write_text(MODULE.replace("VERSION", "another"))
    assert digest != code_digest({"loss": module.loss})
    assert code_digest({}) == ""


def test_code_that_was_typed_in_has_no_source() -> None:
    typed: dict[str, Any] = {"__name__": "nowhere"}
    exec("def loss(a, b): return a", typed)
    with pytest.raises(ConfigError, match="loss: its code has no source file; define it at"):
        code_digest({"loss": typed["loss"]})


def test_all_sites_bring_what_was_agreed_on(module: Any) -> None:
    own = {"loss": module.loss}
    digest = code_digest(own)
    check_code(digest, own, required=True)
    check_code("", {}, required=True)
    # All sites of `train` have the same process to come from.
    check_code("", own, required=False)
    with pytest.raises(ConfigError, match=f'uses its own loss; set it .* code = "{digest}" in '):
        check_code("", own, required=True)
    with pytest.raises(ConfigError, match=r"the code of loss here is .*; copy the same modules"):
        check_code("0" * 64, own, required=True)
    for required in (True, False):
        with pytest.raises(ConfigError, match="trains with the user's own functions; name their"):
            check_code(digest, {}, required=required)


def test_the_agreed_code_is_part_of_the_run() -> None:
    assert a_run("0" * 64).digest() != a_run("1" * 64).digest() != a_run().digest()
    with pytest.raises(ConfigError, match=r"run\.code"):
        a_run("not a digest")


def test_an_optimizer_goes_with_a_run_file_that_expects_no_moments() -> None:
    hooks = Hooks(optimizer=own_functions.optimizer)
    with pytest.raises(ConfigError, match=r'set inner\.optimizer = "sgd" in the run file'):
        hooks.check(a_run(), required=False)
    hooks.check(a_run(optimizer="sgd"), required=False)
    assert hooks.replaced == ["optimizer"]


def with_columns(logits: Any, labels: Any, columns: Any) -> Any:
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("columns", "functions", "reason"),
    [
        (["weight"], {}, r"data\.columns weight: no loss reads them; give dilocox\.train or"),
        (["weight"], {"loss": own_functions.loss}, r"data\.columns weight: no loss reads them"),
        ([], {"loss": with_columns}, "loss: has a parameter named columns, and data"),
        (["weight"], {"loss": with_columns, "dataset": own_functions.dataset}, "dataset: gives"),
        (["w"], {"loss": with_columns, "validation": own_functions.validation}, "validation: giv"),
    ],
)
def test_columns_and_the_loss_that_reads_them_go_together(
    columns: list[str], functions: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_columns(columns, functions)
    check_columns(["weight"], {"loss": with_columns})
    check_columns([], {"loss": own_functions.loss, "dataset": own_functions.dataset})


def test_preference_training_has_its_own_loss() -> None:
    check_preference("preference", {"optimizer": own_functions.optimizer})
    check_preference("chat", {"loss": own_functions.loss})
    for name in ("loss", "dataset", "validation"):
        with pytest.raises(ConfigError, match=f'{name}: data.format "preference" has a loss for'):
            check_preference("preference", {name: own_functions.FUNCTIONS[name]})


def test_a_join_from_python_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(local, "join", lambda config, **more: given.update(more) or 130)
    (tmp_path / "token").write_text("a-token\n")
    code = dilocox.join(
        a_run(), site="lyon", address="203.0.113.7:29400", token_file=tmp_path / "token",
        key_file=str(tmp_path / "key"),
        on_evaluation=own_functions.on_evaluation, **own_functions.FUNCTIONS,
    )  # fmt: skip
    assert code == 130
    hooks = given.pop("hooks")
    assert hooks.functions == own_functions.FUNCTIONS
    assert hooks.on_evaluation is own_functions.on_evaluation
    assert given == {
        "site": "lyon", "debug": False, "trace": False,
        "endpoint": Endpoint.at("203.0.113.7:29400", "lyon", "a-token", tmp_path / "key"),
    }  # fmt: skip


def test_a_join_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks(loss=own_functions.loss)
    monkeypatch.setattr(preflight, "check_driver", lambda _: None)
    endpoint = Endpoint.at("localhost:1", "lyon", f"dilocox1-{64 * '0'}-{32 * '0'}")
    with pytest.raises(ConfigError, match="this site uses its own loss; set it in the run file"):
        local.join(a_run(), site="lyon", endpoint=endpoint, debug=False, hooks=hooks)


class Client:
    def __init__(self) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def report(self, round_: int, metrics: Any, kind: Any = "round") -> None:
        self.reports.append((kind, metrics))


def test_a_callback_may_end_the_run_and_only_by_true() -> None:
    client = Client()
    for answer in (None, False, 1, "yes"):
        evaluated(client, lambda *_, answer=answer: answer, 3, 2.5)
    assert [metrics for _, metrics in client.reports] == [{"val_loss": 2.5, "after_round": 3}] * 4
    evaluated(client, lambda round_, loss: loss < 3.0, 4, 2.5)
    evaluated(client, lambda *_: True, -1, 6.0)
    assert client.reports[4:] == [
        ("evaluation", {"val_loss": 2.5, "after_round": 4, "ends": True}),
        ("first_evaluation", {"val_loss": 6.0, "after_round": -1, "ends": True}),
    ]


def test_the_loss_of_each_source_is_reported() -> None:
    client = Client()
    evaluated(client, None, 4, 2.5, {"web": 2.0, "tickets": 3.0})
    evaluated(client, None, 4, 2.5, {})
    evaluated(client, None, 4, 2.5, {}, {"val_accuracy": 0.5, "val_margin": 0.1})
    assert client.reports == [
        (
            "evaluation",
            {
                "val_loss": 2.5,
                "after_round": 4,
                "val_loss_by_source": {"web": 2.0, "tickets": 3.0},
            },
        ),
        ("evaluation", {"val_loss": 2.5, "after_round": 4}),
        (
            "evaluation",
            {"val_loss": 2.5, "after_round": 4, "val_accuracy": 0.5, "val_margin": 0.1},
        ),
    ]


def test_a_loss_of_nothing_is_said() -> None:
    client = Client()
    evaluated(client, None, 0, 0.0)
    evaluated(client, None, 1, 1e-9)
    assert [each for each in client.reports if each[0] == "warning"] == [
        ("warning", {"text": ZERO})
    ]


def test_own_sequences_are_evaluated() -> None:
    config = a_run()
    batches = validation_batches(config, None, 0, own_functions.validation)  # type: ignore[arg-type]
    assert [tuple(inputs.shape) for inputs, _, _ in batches] == [(2, 32)] * 5
    expected = own_functions.validation(0, 10)
    assert batches[0][0].tolist() == expected[:2, :-1].tolist()
    assert batches[0][1].tolist() == expected[:2, 1:].tolist()
    for wrong in (np.zeros((3, 32)), np.zeros(33), np.zeros((0, 33))):
        with pytest.raises(
            ConfigError, match=r"validation: the function returned an array of shape"
        ):
            validation_batches(config, None, 0, lambda *_, wrong=wrong: wrong)  # type: ignore[arg-type]
