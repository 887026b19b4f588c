"""What the callback tells a site of a trainer's training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError, JoinError
from tests.training.loop.test_parts import run_with

if TYPE_CHECKING:
    from transformers import Trainer


class Told:
    """A site that takes `steps` steps and notes what it is told."""

    def __init__(self, steps: int) -> None:
        self.steps, self.told = steps, []  # type: ignore[var-annotated]
        self.given: dict[str, Any] = {}
        self.ended: list[object] = []
        self.alive = 0

    def __call__(self, config: object, **given: Any) -> Told:
        self.given = given
        return self

    def __enter__(self) -> Told:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.ended.append(error)

    def step(self, *, loss: torch.Tensor, tokens: int) -> bool:
        self.told.append((float(loss), tokens))
        return len(self.told) < self.steps

    def touch(self) -> None:
        self.alive += 1

    def uses_own_data(self) -> None:
        pass


class Rows(Dataset[dict[str, torch.Tensor]]):
    """64 rows of 32 tokens that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = 40 + (7 * number + torch.arange(32)) % 50
        return {"input_ids": row, "labels": row}


class Constant(nn.Module):
    """A model whose loss is 3, or an error at its fourth micro-batch."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls, self.fails = 0, fails

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.fails and self.calls == 4:
            raise ZeroDivisionError("a mistake of the model")
        return {"loss": self.weight + 3.0, "logits": torch.zeros(len(input_ids), 1)}


class Evaluates(Told):
    """A site that evaluates the model while it joins."""

    def __enter__(self) -> Told:
        assert self.given["evaluation"](None) == 3.0
        return self


class Refused(Told):
    """A site that may not join."""

    def __enter__(self) -> Told:
        raise JoinError("the name is taken")


def trainer_of(
    tmp_path: Path,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool = False,
    run: RunConfig | None = None,
    **more: Any,
) -> Trainer:
    # Here, so that not every process of a test run imports what a trainer needs.
    from transformers import Trainer, TrainingArguments

    from dilocox import hf

    monkeypatch.setattr(hf, "site", told)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.0,
        **more,
    )  # fmt: skip
    trainer = Trainer(Constant(fails), arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.add_callback(hf.SiteCallback(trainer, run or run_with(), name="paris"))
    return trainer


def test_each_step_is_told_with_its_loss_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(3)
    trainer = trainer_of(tmp_path, told, monkeypatch, max_steps=50, eval_strategy="steps",
                         eval_steps=2)  # fmt: skip
    trainer.train()
    assert told.told == [(3.0, 2 * 2 * 32)] * 3
    assert trainer.state.global_step == 3
    assert told.ended == [None]
    assert told.alive == 8
    assert isinstance(told.given["optimizer"], torch.optim.Optimizer)
    assert told.given["state"]["scheduler"].state_dict()["last_epoch"] == 3
    assert told.given["model"] is trainer.model


def test_the_evaluation_before_training_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a part of joining."""
    data = {"own": True, "source": None, "packing": None, "sequence_length": 32}
    told = Evaluates(1)
    trainer = trainer_of(
        tmp_path, told, monkeypatch, run=run_with(sections={"data": data}), max_steps=50
    )
    trainer.train()
    assert told.alive == 8
    assert told.ended == [None]


def test_a_site_that_may_not_join_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Refused(1)
    trainer = trainer_of(tmp_path, told, monkeypatch, max_steps=50)
    with pytest.raises(JoinError, match="the name is taken"):
        trainer.train()
    assert not told.ended


def test_an_error_of_the_trainer_ends_the_sites_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(30)
    trainer = trainer_of(tmp_path, told, monkeypatch, fails=True, max_steps=50)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert len(told.told) == 1
    assert [type(error) for error in told.ended] == [ZeroDivisionError]


def test_a_trainer_that_would_end_before_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(30)
    trainer = trainer_of(tmp_path, told, monkeypatch, max_steps=7)
    with pytest.raises(ConfigError, match="the trainer takes 7 steps, the run has 8"):
        trainer.train()
    assert not told.given
    assert not told.ended


def test_a_trainer_whose_processes_divide_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(30)
    trainer = trainer_of(tmp_path, told, monkeypatch, max_steps=50)
    (callback,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "site"))
    many = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigError, match="hold the model as Constant; use DistributedDataPar"):
        callback.on_train_begin(many, trainer.state, trainer.control, model=trainer.model)
    assert not told.given
