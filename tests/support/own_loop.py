"""A training loop of a user's own, as one site of a run: `python -m` this file, or its `main`.

Arguments: run file, site, mode, overrides. Modes: `plain`; `dies` raises an error of its own at
inner step 10, and `dies once` does unless torchrun has started the loop again; `leaves` asks to
leave after its first step; `busy` has several optimizers, gradient accumulation, a scaler and its
own loader. With torchrun's variables this is one of several processes, and the last one dies;
`unwrapped` averages no gradients.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import dilocox
from dilocox.models import load_model_config

RATE = 3e-3


def adamw(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the loop, as `dilocox.train` takes it."""
    return torch.optim.AdamW(parameters.values(), lr=RATE)


def model_of(config: dilocox.RunConfig, seed: int = 5) -> nn.Module:
    """A model of Hugging Face with weights of its own, which the run's weights replace."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(load_model_config(config.model, 300))
    return model.float()


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plain(config: dilocox.RunConfig, name: str, mode: str) -> str:
    """The shortest loop."""
    model, rank, world = model_of(config), 0, int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if config.site.shards > 1:
            for layer in model.model.layers:  # type: ignore[union-attr, operator]
                fully_shard(layer)
            fully_shard(model)
        elif mode != "unwrapped":
            model = DistributedDataParallel(model)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    dies = mode == "dies" or (mode == "dies once" and not again)
    optimizer, asked = adamw(dict(model.named_parameters())), False
    with dilocox.site(config, name=name, model=model, optimizer=optimizer) as site:
        for inputs, labels in site.batches():
            for group in optimizer.param_groups:
                group["lr"] = site.learning_rate
            loss = loss_of(model, inputs, labels)
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            optimizer.step()
            optimizer.zero_grad()
            if dies and site.inner_step == 10 and rank == world - 1:
                raise ZeroDivisionError("a mistake of the loop")
            if mode == "leaves" and not asked:
                asked = True
                site.leave()
            tokens = labels.numel() if world > 1 else None
            site.step(loss=loss, tokens=tokens, grad_norm=norm)
    return site.outcome


def loader() -> Iterator[Tensor]:
    """Rows of 33 tokens that count up; micro-batches of two rows."""
    while True:
        yield 40 + (torch.randint(0, 50, (2, 1)) + torch.arange(33)) % 50


def busy(config: dilocox.RunConfig, name: str) -> str:
    """Two optimizers, a scheduler, accumulation over two micro-batches, a scaler."""
    model = model_of(config)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.AdamW(vectors, lr=RATE),
    ]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizers[0], total_iters=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    state: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler}
    seen = 0
    with dilocox.site(
        config, name=name, model=model, optimizer=optimizers, state=state,
        evaluation=lambda model, inputs, labels: loss_of(model, inputs, labels),
    ) as site:  # fmt: skip
        for rows in site.batches(loader()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, rows[:, :-1], rows[:, 1:])
            scaler.scale(loss / 2).backward()
            seen += 1
            if seen % 2:
                continue
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            scheduler.step()
            site.step(loss=loss, tokens=100)
    shared = site.state_dict()
    assert all(torch.equal(shared[name], tensor) for name, tensor in model.state_dict().items())
    return site.outcome


def main() -> int:
    """Train as one site, and print how that ended."""
    file, name, mode, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    config = dilocox.load_run(file, sets)
    before = set(threading.enumerate())
    try:
        outcome = busy(config, name) if mode == "busy" else plain(config, name, mode)
        failed = False
    except (dilocox.DilocoxError, ZeroDivisionError) as error:
        outcome, failed = f"{type(error).__name__}: {error}", True
    # No thread of the site stays in the user's process.
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    print(outcome)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
