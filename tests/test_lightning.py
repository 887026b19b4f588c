"""What the callback tells a site of a Lightning trainer's training."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from dilocox import lightning as own
from dilocox.errors import ConfigError, JoinError, TrainingError
from tests.test_hf import Evaluates, Refused, Told
from tests.training.loop.test_parts import run_with

SIGNATURE = (
    "(self, run: 'RunConfig | str | Path', *, name: 'str', part: 'str' = '', "
    "address: 'str | None' = None, token_file: 'str | Path | None' = None, "
    "evaluation: 'Evaluation | None' = None, quiet: 'bool' = False) -> 'None'"
)


class Losses(LightningModule):
    """A module whose micro-batches have the losses 1, 2, 3, ..., or an error at the fourth."""

    def __init__(self, fails: bool = False, manual: bool = False, silent: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.calls, self.fails, self.silent = 0, fails, silent
        self.automatic_optimization = not manual

    def training_step(self, batch: dict[str, Tensor]) -> Tensor | None:
        self.calls += 1
        if self.fails and self.calls == 4:
            raise ZeroDivisionError("a mistake of the module")
        loss = self.net(torch.zeros(1, 1)).sum() * 0 + float(self.calls)
        if self.automatic_optimization:
            return loss
        if self.calls % 2 == 0:
            for optimizer in self.optimizers():
                optimizer.step()
        return None if self.silent else loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        pass

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.0)
        return [torch.optim.SGD([each], lr=0.0) for each in self.parameters()]


def fit(monkeypatch: pytest.MonkeyPatch, told: Told, module: Losses, **more: Any) -> Trainer:
    """Train with five micro-batches an epoch."""
    monkeypatch.setattr(own, "site", told)
    callback = more.pop("callback", None) or own.SiteCallback(run_with(), name="paris", part="net")
    given: dict[str, Any] = {"max_epochs": -1, "num_sanity_val_steps": 0} | more
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback], **given,
    )  # fmt: skip
    rows = DataLoader([{"input_ids": torch.zeros(7).long()}] * 5, batch_size=1)
    trainer.fit(module, rows, rows)
    return trainer


def test_a_step_is_told_with_the_mean_loss_of_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch's last step has one micro-batch."""
    told, module = Told(4), Losses()
    trainer = fit(monkeypatch, told, module, accumulate_grad_batches=2)
    assert told.told == [(1.5, 14), (3.5, 14), (5.0, 7), (6.5, 14)]
    assert trainer.global_step == 4
    assert told.ended == [None]
    assert told.alive == 10, "the trainer validates after an epoch and at the end"
    assert told.given["model"] is module.net
    assert told.given["optimizer"] == trainer.optimizers


def test_optimizers_of_manual_optimization_take_one_step_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(2)
    fit(monkeypatch, told, Losses(manual=True), limit_val_batches=0)
    assert told.told == [(1.5, 14), (3.5, 14)]
    with pytest.raises(TrainingError, match="training_step: returns no loss"):
        fit(monkeypatch, Told(2), Losses(manual=True, silent=True))


def test_an_evaluation_before_training_can_give_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluation(_model: object) -> float:
        assert callback.site is not None
        callback.site.touch()
        return 3.0

    callback = own.SiteCallback(run_with(), name="paris", part="net", evaluation=evaluation)
    told = Evaluates(1)
    fit(monkeypatch, told, Losses(), limit_val_batches=0, callback=callback)
    assert told.alive == 1
    callback = own.SiteCallback(run_with(), name="paris", part="net")
    told = Refused(1)
    with pytest.raises(JoinError, match="the name is taken"):
        fit(monkeypatch, told, Losses(), callback=callback)
    assert callback.site is None
    assert not told.ended


def test_an_error_of_the_module_ends_the_sites_part(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(30)
    with pytest.raises(ZeroDivisionError):
        fit(monkeypatch, told, Losses(fails=True))
    assert len(told.told) == 3
    assert [type(error) for error in told.ended] == [ZeroDivisionError]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_epochs": 1}, "the trainer takes 5 steps, the run has 8"),
        ({"min_steps": 9}, "min_steps, min_epochs: training ends with the run"),
    ],
)
def test_a_trainer_of_other_limits_than_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], said: str
) -> None:
    told = Told(30)
    with pytest.raises(ConfigError, match=said):
        fit(monkeypatch, told, Losses(), **more)
    assert not told.given
    assert not told.ended


def test_the_signature_is_the_one_that_users_rely_on() -> None:
    """See `tests.test_api`, which runs without Lightning too."""
    assert str(inspect.signature(own.SiteCallback.__init__)) == SIGNATURE
