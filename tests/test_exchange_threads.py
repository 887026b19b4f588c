"""Beside training on a CPU the exchange's thread has no OpenMP team, and the training keeps its."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from dilocox import processes, rank_process


def _numbers(_progress: Any) -> tuple[int, int]:
    torch.set_num_threads(2)
    rank: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")))
    prepare = rank_process._beside_training(rank)
    assert prepare is not None
    seen: list[int] = []

    def work() -> None:
        prepare()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen[0], torch.get_num_threads()


def test_exchange_has_one_thread_and_training_its_own() -> None:
    numbers = processes.call_in_child(_numbers, on_progress=lambda _step, _share: None)
    assert numbers == (1, 2)


def test_on_a_gpu_the_exchange_may_use_the_cores() -> None:
    rank: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cuda", 0)))
    assert rank_process._beside_training(rank) is None
