"""Keeps a process fit for forking: its forked children must be able to use threads and GPUs."""

from __future__ import annotations

import os

import torch

from dilocox.errors import ConfigError
from dilocox.training.launch.cuda_driver import machine_has_gpu
from dilocox.utils import processes

BAD_FORK = 3
"""Exit code of a forked child in which CUDA refuses to work."""


def stay_forkable(device: str = "auto") -> None:
    """Keep this process fit for forking. Call this before anything else in a process that forks.

    `device` is the run's `site.device`. Raises `ConfigError` if this process has used a GPU,
    because ranks that are forked from it could not use one.
    """
    if device != "cpu" and processes.CONTEXT.get_start_method() == "fork" and _has_used_gpu():
        raise ConfigError(
            "this process has used CUDA already, so ranks that are forked from it could not use a "
            "GPU; start the run before any other code uses a GPU (in a notebook: "
            'restart its kernel), or in a new process by "dilocox train RUN_FILE", or set '
            'site.device = "cpu"'
        )
    torch.set_num_threads(1)  # a forked child would lack the threads of a pool
    # A check for a GPU must not start CUDA, because no child could use CUDA then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def _has_used_gpu() -> bool:
    """Return whether CUDA would refuse to work in a forked child of this process.

    A query for the number of GPUs, as in `torch.cuda.is_available()`, is enough to cause that.
    Only a child can find out.
    """
    if torch.cuda.is_initialized():
        return True
    if not machine_has_gpu():
        return False
    child = processes.start(_tell_bad_fork, name="cuda")
    child.join()
    return child.exitcode == BAD_FORK


def _tell_bad_fork() -> None:
    processes.exit_now(BAD_FORK if torch.cuda._is_in_bad_fork() else 0)
