"""A plain PyTorch training loop, as one writes it for one machine. It imports nothing of dilocox.

The whole Hugging Face model, bf16 autocast around each forward pass, gradients summed over
micro-batches, `clip_grad_norm_`, fused AdamW with no weight decay on vectors, warm-up and cosine.
Losses stay on the device until the caller reads them, as in a careful loop. Batches are in memory
before the start, so reading them costs this loop nothing. Code that trains on several machines can
wrap the model (`wrap`), or hook into the optimizer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Recipe:
    """Settings of training, each with the meaning that it has in PyTorch."""

    batch: int
    micro_batch: int
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    warmup_steps: int
    total_steps: int
    final_fraction: float


class PlainLoop:
    """A model, its optimizer and its learning rate schedule. Parameters are fp32.

    Args:
        hf_config: Hugging Face configuration of the model.
        recipe: settings of training.
        device: device of the model.
        precision: dtype of autocast; fp32 means no autocast.
        attention: attention implementation of transformers.
        wrap: returns the module whose forward pass is called, for example
            `DistributedDataParallel`.
        compile_layers: compile each layer of the model.
    """

    def __init__(
        self,
        hf_config: Any,
        recipe: Recipe,
        device: torch.device,
        precision: torch.dtype,
        attention: str,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
        compile_layers: bool = False,
    ) -> None:
        self._recipe = recipe
        self._device = device
        self._precision = precision
        with device:
            model = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=attention, dtype=torch.float32
            )
        self.model = model.train()
        if compile_layers:
            for layer in model.base_model.layers:
                layer.compile()
        self._forward = wrap(self.model)
        self._parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters if p.dim() > 1]},
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        recipe = self._recipe
        if step < recipe.warmup_steps:
            return (step + 1) / recipe.warmup_steps
        span = max(1, recipe.total_steps - 1 - recipe.warmup_steps)
        progress = min(1.0, (step - recipe.warmup_steps) / span)
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
        return recipe.final_fraction + (1.0 - recipe.final_fraction) * fall

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train one step on int64 [batch, L]. Returns the mean loss, on the device."""
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        rows = self._recipe.micro_batch
        count = self._recipe.batch // rows
        total = torch.zeros((), device=self._device)
        for ids, targets in zip(inputs.split(rows), labels.split(rows), strict=True):
            with self._autocast():
                logits = self._forward(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision)
