"""Beside training on a CPU the exchange's thread has no OpenMP team, and the training keeps its."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.training.launch import rank as rank_process

pytestmark = pytest.mark.waits

# An interpreter of its own: whether a thread has asked for its number is inherited by forking.
SCRIPT = """\
import threading
from types import SimpleNamespace
import torch
from dilocox.training.launch import rank as rank_process
torch.set_num_threads(2)
rank = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")))
prepare = rank_process._beside_training(rank)
def work():
    prepare()
    print(torch.get_num_threads())
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(torch.get_num_threads())
"""


@pytest.mark.slow
def test_exchange_has_one_thread_and_training_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2"], done.stderr


def test_on_a_gpu_the_exchange_may_use_the_cores() -> None:
    rank: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cuda", 0)))
    assert rank_process._beside_training(rank) is None
