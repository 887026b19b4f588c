"""Turns errors of libraries that end a rank into one line with cause and remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from dilocox.config.run_config import RunConfig
from dilocox.errors import TrainingError
from dilocox.inner.determinism_mode import refused_operation
from dilocox.training.builder import RankPlace

GIB = 2**30
_GPU_IS_FULL = ("CUDA out of memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_MACHINE_IS_FULL = ("can't allocate memory", "Cannot allocate memory")
HOST_MEND = "run fewer ranks or sites on this machine, or give it more memory"


class LibraryError(TrainingError):
    """A library's error as one line for users.

    `permanent`: whether another start would end with the same error.
    """

    def __init__(self, line: str, permanent: bool) -> None:
        super().__init__(line)
        self.permanent = permanent


@contextlib.contextmanager
def explained(
    config: RunConfig, place: RankPlace, first_round: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raise `LibraryError` in place of library errors whose remedy is known. Other errors pass.

    `first_round`: returns whether this process has not ended a round yet. A lack of memory in the
    first round is permanent, because the next start would fail in the same way.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        line = shortage(config, place, error)
        if line is not None:
            raise LibraryError(line, first_round()) from error
        operation = refused_operation(str(error))
        if operation is None:
            raise
        line = (
            f"{place}: {operation} has no deterministic kernel on this device; set "
            "site.deterministic = false"
        )
        raise LibraryError(line, True) from error


def shortage(config: RunConfig, place: RankPlace, error: Exception) -> str | None:
    """Return the line for users if `error` means a lack of memory. None for any other error."""
    text = str(error)
    first = (text.splitlines() or [""])[0]
    if isinstance(error, MemoryError) or any(each in text for each in _MACHINE_IS_FULL):
        why = f" ({first})" if first else ""
        return f"{place}: this machine is out of memory{why}; {HOST_MEND}"
    on_gpu = isinstance(error, torch.OutOfMemoryError) or any(each in text for each in _GPU_IS_FULL)
    if not on_gpu:
        return None
    return f"{place}: its GPU is out of memory{_held()}; {', or '.join(_mends(config))}"


def _mends(config: RunConfig) -> list[str]:
    """Return advice that lowers the memory of a step, without settings that cannot be lowered."""
    found = []
    if config.site.micro_batch_size > 1:
        found.append(f"lower site.micro_batch_size (now {config.site.micro_batch_size})")
    if config.model.activation_checkpointing is not True:
        found.append("set model.activation_checkpointing = true")
    return [*found, "raise site.shards or site.stages"]


def _held() -> str:
    """Describe how much of the GPU's memory this process and others hold.

    Empty if CUDA does not know it.
    """
    if not torch.cuda.is_initialized():
        return ""
    try:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        now = torch.cuda.memory_reserved(device)
    except RuntimeError:
        return ""
    held = (
        f": at most {allocated / GIB:.1f} GiB were allocated and {reserved / GIB:.1f} GiB reserved "
        f"of {total / GIB:.1f} GiB"
    )
    # Up to 2 GiB may be this process's own CUDA context and NCCL buffers.
    others = total - free - now
    return f"{held}, {others / GIB:.1f} GiB are outside of PyTorch" if others > 2 * GIB else held
