"""Four worker processes that run many distributed cases one after the other."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage, and is not looked at again
    while True:
        job = pipe.recv()
        if job is None:
            return
        module, function, ranks, store, arguments = job
        if store is None:
            arguments = {"rank": rank, **arguments}
        try:
            if ranks > 1 and store is not None:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, ranks),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=60),
                )
            result = getattr(importlib.import_module(module), function)(**arguments)
            pipe.send((True, result))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _free_groups()


def _free_groups() -> None:
    """Free the process groups of the last case.

    Gloo's threads wake a hundred times a second as long as something refers to their group. Models
    do in cycles, and so do PyTorch's caches of how operations on sharded tensors are sharded.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()


class Pool:
    """Calls a function of a module in the first `ranks` workers, under one Gloo group."""

    def __init__(self) -> None:
        # A server forks the workers: clean children, whatever this process did before, and one
        # import of torch for all four.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                __name__,
                "dilocox.models",
                "tests.support.site_model_cases",
                "transformers.models.qwen3.modeling_qwen3",
            ]
        )
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(
        self, ranks: int, module: str, function: str, *, join: bool = True, **arguments: Any
    ) -> list[Any]:
        """What the function returned in each rank. Raises `AssertionError` with its traceback.

        Without `join` the function makes its process group itself and is told its `rank`.
        """
        self._count += 1
        store = str(Path(self._folder.name) / f"store-{self._count}") if join else None
        for pipe in self._pipes[:ranks]:
            pipe.send((module, function, ranks, store, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(90):
                raise AssertionError(f"rank {rank} gave no answer to {function}({arguments})")
            answers.append(pipe.recv())
        failed = [f"rank {i}:\n{text}" for i, (good, text) in enumerate(answers) if not good]
        if failed:
            raise AssertionError(f"{function}({arguments})\n" + "\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the workers."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()
