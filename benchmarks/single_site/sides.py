"""The two sides of the benchmark, each in a process of its own, which wait for their turns."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import dilocox
from benchmarks.plain_loop import PlainLoop, Recipe
from dilocox.cli.main import main as run_command
from dilocox.config.run_config import RunConfig
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.inner import (
    keep_freed_memory,
    mean_cross_entropy,
    resolve_device,
    resolve_precision,
    set_threads,
)
from dilocox.models import load_model_config
from dilocox.training.launch.coordinator_check import ENDPOINT
from dilocox.utils import processes


@dataclass(frozen=True)
class Turn:
    """Message of a side that has finished a turn."""

    seconds: float
    peak_bytes: int
    loss: float | None


class Waiting:
    """Lets one side wait for its turns. It reaches the side's process only by a fork."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._began: float | None = None

    def turn_over(self, device: torch.device, loss: float | None = None) -> None:
        """Wait for the device, report the end of the turn, and wait for the next turn."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        seconds = now - self._began if self._began is not None else 0.0
        self._pipe.send(Turn(seconds, peak_bytes(device), loss))
        self._pipe.recv()
        self._began = time.monotonic()


class GatedData:
    """The run's own token ranges, read as the run reads them, with a stop before each turn."""

    def __init__(self, config: RunConfig, waiting: Waiting, turn: int, turns: int) -> None:
        self._config = config
        self._waiting = waiting
        self._turn = turn
        self._last = turn * turns
        self._given = 0
        self._space: SequenceSpace | None = None

    def __call__(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the sequences from `start` to `start + count`, which is not included."""
        if self._space is None:
            self._space = sequence_space(self._config)
        if start != self._given:
            raise RuntimeError(f"sequence {start} was asked for after {self._given}")
        if self._given % self._turn == 0 and self._given <= self._last:
            self._waiting.turn_over(resolve_device(self._config.site))
        self._given += count
        return np.asarray(self._space.read(start, count))


def sequence_space(config: RunConfig) -> SequenceSpace:
    """Return the numbered sequences that the run trains on."""
    files = TokenFiles.open(config.data_folder)
    length = config.data.sequence_length
    return SequenceSpace(files, seed=config.run.seed, sequence_length=length)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM; this benchmark needs Linux")


def run_dilocox(config: RunConfig, data: GatedData, log: Path) -> None:
    """Train the real run. Called in a process of its own."""
    _to_file(log)
    result = dilocox.train(config, dataset=data, loss=mean_cross_entropy)
    sys.exit(0 if result.finished else 1)


def run_loop(
    config: RunConfig, file: Path, waiting: Waiting, steps_per_turn: int, log: Path
) -> None:
    """Train by the plain loop inside of `dilocox.site`. Called in a process of its own.

    `file`: the run file, from which a coordinator process is started.
    """
    _to_file(log)
    # Forked before this process computes.
    coordinator = processes.start(_coordinate, file, log, name="coordinator")
    keep_freed_memory()
    set_threads(config.site.threads, ranks_here=1)
    device = resolve_device(config.site)
    loop = plain_loop(config, device)
    endpoint = config.folder / "coordinator" / ENDPOINT
    while coordinator.is_alive() and not endpoint.exists():
        time.sleep(0.1)
    site = dilocox.site(config, name="here", model=loop.model, optimizer=loop.optimizer)
    with site:
        for step, (inputs, labels) in enumerate(site.batches()):
            if step % steps_per_turn == 0:
                waiting.turn_over(device)
            site.step(loss=loop.step(inputs, labels))
    coordinator.join(60.0)
    sys.exit(0 if site.outcome == "finished" and coordinator.exitcode == 0 else 1)


def _coordinate(file: Path, log: Path) -> None:
    _to_file(log)
    run_command(["coordinator", str(file)])


def run_plain(config: RunConfig, waiting: Waiting, steps_per_turn: int, turns: int) -> None:
    """Train the plain loop. Called in a process of its own."""
    keep_freed_memory()
    set_threads(config.site.threads, ranks_here=1)
    device = resolve_device(config.site)
    loop = plain_loop(config, device)
    batch = config.site.batch_size
    steps = steps_per_turn * turns
    sequences = torch.from_numpy(np.asarray(sequence_space(config).read(0, steps * batch)))
    inputs, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
    losses: list[torch.Tensor] = []
    for step in range(steps):
        if step % steps_per_turn == 0:
            waiting.turn_over(device, _mean(losses))
            losses = []
        rows = slice(step * batch, (step + 1) * batch)
        losses.append(loop.step(inputs[rows], labels[rows]))
    waiting.turn_over(device, _mean(losses))


def plain_loop(config: RunConfig, device: torch.device) -> PlainLoop:
    """Return the plain loop with the run's model and settings."""
    files = TokenFiles.open(config.data_folder)
    return PlainLoop(
        load_model_config(config.model, files.vocabulary_size),
        recipe(config),
        device,
        resolve_precision(config.site, device),
        config.model.attention,
        compile_layers=compiles(config, device),
    )


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Return whether the run's layers are compiled. The value "auto" compiles on GPUs."""
    asked: object = config.model.compile
    return device.type == "cuda" if asked == "auto" else bool(asked)


def recipe(config: RunConfig) -> Recipe:
    """Return the settings of the run file's inner optimizer, for the plain loop."""
    inner = config.inner
    return Recipe(
        batch=config.site.batch_size,
        micro_batch=config.site.micro_batch_size,
        learning_rate=inner.learning_rate,
        betas=inner.betas,
        eps=inner.eps,
        weight_decay=inner.weight_decay,
        clip=inner.clip,
        warmup_steps=inner.warmup_steps,
        total_steps=config.total_steps,
        final_fraction=inner.final_fraction,
    )


def _mean(losses: list[torch.Tensor]) -> float | None:
    return float(torch.stack(losses).mean()) if losses else None


def _to_file(log: Path) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.close(stream)
