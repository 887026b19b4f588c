"""Shared code of all peers: their job, their training loop, and their result.

A peer is a module that is started once per site, `python -m benchmarks.wan.peers.ddp --job FILE`,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment as `torchrun` sets them, and
GLOO_SOCKET_IFNAME. It imports nothing of dilocox: it trains the whole Hugging Face model with
`benchmarks.plain_loop`. At the end it prints one line of JSON, an `Outcome`.

The measured wall-clock time covers whole cycles (steps of a synchronous peer), from the end of the
last warm-up cycle to the end of the last cycle. Wire bytes are those that the site's interface has
counted in this time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.plain_loop import PlainLoop, Recipe

DEVICE = "eth0"
"""Interface whose counters are read."""


@dataclass(frozen=True)
class PeerJob:
    """Settings of a peer, equal at all sites."""

    model: dict[str, Any]
    """Hugging Face configuration of the model, `model_type` and vocabulary included."""
    batch: int
    """Sequences per step and site."""
    sequence_length: int
    warm_up: int
    """Number of cycles that are not measured."""
    cycles: int
    """Number of measured cycles."""
    sites: int
    sync_every: int = 1
    """Steps in a cycle, between two exchanges of the same parameters."""
    fragments: int = 1
    delay: int = 0
    """Steps between sending a fragment and using the average."""
    keep: float = 0.0
    """Share of the site's own parameters in the parameters from which it continues."""
    rank: int = 1
    """Rank of PowerSGD's factors."""

    @classmethod
    def load(cls, file: Path) -> PeerJob:
        """Return the job that `save` has written."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def save(self, file: Path) -> None:
        """Write the job as JSON."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """Measurements of one site."""

    seconds: float
    steps: int
    tokens: int
    cycles: int
    payload_bytes: float
    """Bytes that this site sent in these cycles, by the algorithm of the collective."""
    wire_bytes: int
    loss: float


def job() -> PeerJob:
    """Return the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, metavar="FILE")
    return PeerJob.load(parser.parse_args().job)


def make_loop(
    told: PeerJob, wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model
) -> PlainLoop:
    """Return the plain loop on one CPU thread in fp32, with equal weights at every site."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = (told.warm_up + told.cycles) * told.sync_every
    recipe = Recipe(
        batch=told.batch,
        micro_batch=told.batch,
        learning_rate=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        clip=1.0,
        warmup_steps=20,
        total_steps=steps,
        final_fraction=0.1,
    )
    config = AutoConfig.for_model(**told.model)
    return PlainLoop(config, recipe, torch.device("cpu"), torch.float32, "sdpa", wrap)


def parameters(loop: PlainLoop) -> int:
    """Return the number of parameters of the model; tied ones count once."""
    return sum(each.numel() for each in loop.model.parameters())


def allreduce_bytes(values: float, sites: int) -> float:
    """Return the bytes that a site sends if fp32 `values` are averaged over `sites` in a ring."""
    return 4 * values * 2 * (sites - 1) / sites


def measure(told: PeerJob, loop: PlainLoop, payload: Callable[[], float]) -> None:
    """Train, and print the outcome. `payload` returns the bytes that this site has sent so far."""
    draw = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    shape = (told.batch, told.sequence_length)
    tokens = torch.randint(0, told.model["vocab_size"], (16, *shape), generator=draw)
    begin = time.monotonic(), payload(), _sent()
    loss = torch.zeros(())
    for cycle in range(told.warm_up + told.cycles):
        if cycle == told.warm_up:
            begin = time.monotonic(), payload(), _sent()
        for step in range(told.sync_every):
            batch = tokens[(cycle * told.sync_every + step) % len(tokens)]
            loss = loop.step(batch, batch.roll(-1, 1))
    end = time.monotonic(), payload(), _sent()
    steps = told.cycles * told.sync_every
    outcome = Outcome(
        seconds=end[0] - begin[0],
        steps=steps,
        tokens=steps * told.batch * told.sequence_length,
        cycles=told.cycles,
        payload_bytes=end[1] - begin[1],
        wire_bytes=end[2] - begin[2],
        loss=float(loss),
    )
    print(json.dumps(asdict(outcome)), flush=True)


def _sent() -> int:
    """Return the bytes that the interface has sent."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == DEVICE:
            return int(counted.split()[8])
    return 0
