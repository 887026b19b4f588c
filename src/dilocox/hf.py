"""`SiteCallback`: a Hugging Face `Trainer`, or one of TRL's, as one site of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dilocox.api import load_run, site
from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.loop import Site, enter
from dilocox.training.loop.model import Evaluation


class SiteCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a trainer one site of a run, from the begin of its training to the run's end.

    ```python
    trainer = SFTTrainer(...)
    trainer.add_callback(SiteCallback(trainer, "run.toml", name="paris"))
    trainer.train()
    ```

    The run's weights replace those of the trainer's model when training begins. Data, loss,
    optimizer and schedule are the trainer's. Training ends when the run ends, and the model then
    holds the run's last weights. An error of the trainer makes the site leave the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunConfig | str | Path,
        *,
        name: str,
        address: str | None = None,
        token_file: str | Path | None = None,
        evaluation: Evaluation | None = None,
        quiet: bool = False,
    ) -> None:
        """Prepare. The site joins its run when training begins.

        Args:
            trainer: a trainer of transformers or of TRL, of one process, or of several processes
                with `DistributedDataParallel`.
            run: the run, or the path of its run file.
            name: name of this site in the run file.
            address: see `dilocox.site`.
            token_file: see `dilocox.site`.
            evaluation: see `dilocox.site`. In a run without text (`data.own`), the default is
                the loss of the trainer's `eval_dataset`, if the trainer has one and one process.
            quiet: see `dilocox.site`.
        """
        self.site: Site | None = None
        """The site, from before it joins on. None before training, and if it cannot join."""
        self._config = run if isinstance(run, RunConfig) else load_run(run)
        self._joins: dict[str, Any] = {
            "name": name, "address": address, "token_file": token_file, "evaluation": evaluation,
            "quiet": quiet,
        }  # fmt: skip
        if self._config.data.own and evaluation is None:
            self._joins["evaluation"] = self._evaluation_of(trainer)
        self._loss: torch.Tensor | None = None
        self._tokens = 0
        self._trainer = trainer
        self._step, self._train = trainer.training_step, trainer.train
        # The trainer tells callbacks neither the loss of a step nor an error that ends training.
        trainer.training_step = self._training_step
        trainer.train = self._training

    def _replicated(self) -> DistributedDataParallel:
        """Return the model of a trainer of several processes. Raises `ConfigError` if divided."""
        wrapped = self._trainer.model_wrapped
        if not isinstance(wrapped, DistributedDataParallel):
            raise ConfigError(
                "SiteCallback: the trainer's processes hold the model as "
                f"{type(wrapped).__name__}; use DistributedDataParallel, or call dilocox.site in a "
                "loop of your own"
            )
        return wrapped

    @staticmethod
    def _evaluation_of(trainer: Trainer) -> Evaluation | None:
        """Return the held-out loss of the trainer's own data; None if there is not one of them.

        Several processes evaluate together, and a site evaluates in its first process alone.
        """
        no_single = trainer.eval_dataset is None or isinstance(trainer.eval_dataset, dict)
        if no_single or trainer.args.world_size > 1:
            return None

        def evaluation(_model: torch.nn.Module) -> float:
            # Not `evaluate`, which tells callbacks and loggers of each call.
            rows = trainer.get_eval_dataloader()
            found = trainer.evaluation_loop(rows, "run", prediction_loss_only=True)
            return float(found.metrics["eval_loss"])

        return evaluation

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Join the run. Raises `DilocoxError` if the site cannot take part."""
        model = parts["model"] if args.world_size == 1 else self._replicated()
        if state.max_steps < self._config.total_steps:
            raise ConfigError(
                f"max_steps: the trainer takes {state.max_steps} steps, the run has "
                f"{self._config.total_steps}; set max_steps to that or more, training ends with "
                "the run"
            )
        optimizer = parts["optimizer"]
        joined = site(
            self._config,
            model=model,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            state={"scheduler": parts["lr_scheduler"]},
            **self._joins,
        )
        enter(self, joined)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Report the step. Ends training when the run ends."""
        assert self.site is not None
        assert self._loss is not None
        going = self.site.step(loss=self._loss, tokens=self._tokens or None)
        self._loss, self._tokens = None, 0
        if not going:
            control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Say that the site is alive while the trainer evaluates."""
        if self.site is not None:
            self.site.touch()

    def _training_step(self, model: torch.nn.Module, inputs: Any, *more: Any) -> torch.Tensor:
        """Take a micro-batch as the trainer does, and add up loss and tokens of the step."""
        found: torch.Tensor = self._step(model, inputs, *more)
        # The trainer divides each loss by the number of micro-batches.
        self._loss = found.detach() if self._loss is None else self._loss + found.detach()
        tokens = inputs.get("input_ids") if hasattr(inputs, "get") else None
        self._tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0
        return found

    def _training(self, *given: Any, **more: Any) -> Any:
        """Train as the trainer does, and leave the run when that ends, whatever the reason."""
        try:
            result = self._train(*given, **more)
        except BaseException as error:
            self._leave(error)
            raise
        self._leave(None)
        return result

    def _leave(self, error: BaseException | None) -> None:
        if self.site is not None:
            self.site.__exit__(None if error is None else type(error), error, None)
