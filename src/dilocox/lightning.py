"""`SiteCallback`: a Lightning `Trainer` as one site of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dilocox.api import load_run, site
from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError, TrainingError
from dilocox.loop import Site, enter
from dilocox.training.loop.model import Evaluation


class SiteCallback(Callback):  # type: ignore[misc]
    """Makes a trainer one site of a run, from the begin of its training to the run's end.

    ```python
    trainer = Trainer(max_epochs=-1, devices=1, callbacks=[SiteCallback("run.toml", name="paris")])
    trainer.fit(module)
    ```

    The run's weights replace those of the module when training begins. Data, loss, optimizers,
    schedules and accumulation are the trainer's and the module's, in automatic and in manual
    optimization. Training ends when the run ends, and the module then holds the run's last weights.
    An error of the module makes the site leave the run.
    """

    def __init__(
        self,
        run: RunConfig | str | Path,
        *,
        name: str,
        part: str = "",
        address: str | None = None,
        token_file: str | Path | None = None,
        evaluation: Evaluation | None = None,
        quiet: bool = False,
    ) -> None:
        """Prepare. The site joins its run when training begins.

        Args:
            run: the run, or the path of its run file.
            name: name of this site in the run file.
            part: name of the submodule that is the run's model, such as `model`. Empty: the whole
                `LightningModule` is.
            address: see `dilocox.site`.
            token_file: see `dilocox.site`.
            evaluation: see `dilocox.site`.
            quiet: see `dilocox.site`.
        """
        self.site: Site | None = None
        """The site, from before it joins on. None before training, and if it cannot join."""
        self._config = run if isinstance(run, RunConfig) else load_run(run)
        self._part = part
        self._joins: dict[str, Any] = {
            "name": name, "address": address, "token_file": token_file, "evaluation": evaluation,
            "quiet": quiet,
        }  # fmt: skip
        self._losses: list[torch.Tensor] = []
        self._tokens = 0
        self._steps_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run. Raises `DilocoxError` if the site cannot take part."""
        self._check(trainer, pl_module)
        state = {
            f"scheduler{number}": each.scheduler
            for number, each in enumerate(trainer.lr_scheduler_configs)
        }
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        joined = site(
            self._config,
            model=pl_module.get_submodule(self._part),
            optimizer=trainer.optimizers,
            state=state if scaler is None else state | {"scaler": scaler},
            **self._joins,
        )
        self._steps_before = trainer.global_step
        enter(self, joined)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report a step if optimizers have taken one. Ends training when the run ends."""
        assert self.site is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, torch.Tensor):
            # In automatic optimization the trainer has divided the loss of each micro-batch.
            own = pl_module.automatic_optimization
            self._losses.append(loss * trainer.accumulate_grad_batches if own else loss)
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0
        # Several optimizers of a module each count one step of the batch.
        if trainer.global_step == self._steps_before:
            return
        if not self._losses:
            raise TrainingError(
                "training_step: returns no loss, which the run needs; return it, or a dict with "
                "`loss`"
            )
        self._steps_before = trainer.global_step
        mean = torch.stack(self._losses).mean()
        going = self.site.step(loss=mean, tokens=self._tokens or None)
        self._losses, self._tokens = [], 0
        if not going:
            trainer.should_stop = True

    def on_validation_batch_end(self, *_: Any) -> None:
        """Say that the site is alive while the trainer validates."""
        if self.site is not None:
            self.site.touch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the end of the site's part; leave the run if it goes on."""
        if self.site is not None:
            self.site.__exit__(None, None, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the run."""
        if self.site is not None:
            self.site.__exit__(type(exception), exception, None)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise `ConfigError` for a trainer that cannot be one site."""
        if trainer.world_size != 1:
            raise ConfigError(
                f"devices: the trainer has {trainer.world_size} processes, and a site has one; set "
                "devices=1 and num_nodes=1"
            )
        if trainer.min_steps or (trainer.min_epochs or 0) > 0:
            raise ConfigError("min_steps, min_epochs: training ends with the run; leave both out")
        if not module.automatic_optimization:
            return
        steps = trainer.estimated_stepping_batches
        if 0 <= steps < self._config.total_steps and math.isfinite(steps):
            raise ConfigError(
                f"max_steps, max_epochs: the trainer takes {steps} steps, the run has "
                f"{self._config.total_steps}; set max_epochs=-1, training ends with the run"
            )
