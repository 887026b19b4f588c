"""A Lightning module as one site of a run.

Arguments: run file, site, `automatic` (two micro-batches a step, a scheduler) or `manual` (two
optimizers), overrides.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import dilocox
from dilocox.lightning import SiteCallback
from tests.support.own_loop import loss_of, model_of


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """64 rows of 33 tokens that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": 40 + (7 * number + torch.arange(33)) % 50}


class Module(LightningModule):
    """A language model, trained by one AdamW or by two optimizers of its own steps."""

    def __init__(self, config: dilocox.RunConfig, manual: bool) -> None:
        super().__init__()
        self.net = model_of(config)
        self.automatic_optimization = not manual

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        rows = batch["input_ids"]
        loss = loss_of(self.net, rows[:, :-1], rows[:, 1:])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        vectors = [p for p in self.net.parameters() if p.dim() <= 1]
        if self.automatic_optimization:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]
        return [torch.optim.AdamW(own, lr=3e-3) for own in (matrices, vectors)]


def main() -> int:
    """Train as one site, and print how that ended."""
    file, name, kind, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    config = dilocox.load_run(file, sets)
    callback = SiteCallback(config, name=name, part="net")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, callbacks=[callback], logger=False,
        accumulate_grad_batches=2 if kind == "automatic" else 1, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(config, kind == "manual"), DataLoader(Rows(), batch_size=2))
    assert callback.site is not None
    print(callback.site.outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
