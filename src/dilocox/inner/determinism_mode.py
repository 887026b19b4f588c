"""Deterministic kernels of a rank: the settings, and a test whether its model can train with them.

On CUDA some operations of PyTorch have no deterministic kernel. In its strict mode PyTorch refuses
such an operation, and a run would end in the middle of a step. The warning mode is no substitute:
in that mode PyTorch computes some further operations, such as attention's backward pass, in kernels
that are *not* deterministic, although deterministic kernels exist. So a rank on a GPU runs one
training pass in the warning mode at its start, and collects the warnings. Then the rank takes the
strict mode, or trains without a deterministic mode.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable

import torch

from dilocox.inner.mesh import SiteMesh

_CPU = torch.device("cpu")
_REFUSED = re.compile(r"^\s*(\S.*?) does not have a deterministic implementation")
_OF_THE_MODE = "defaults to a non-deterministic algorithm"
"""Part of PyTorch's message about attention in the warning mode. The message does not matter,
because the strict mode takes another kernel."""
_CUBLAS = "Deterministic behavior was enabled with"
"""Beginning of PyTorch's message about a non-deterministic value of CUBLAS_WORKSPACE_CONFIG."""


def set_determinism(
    deterministic: bool, device: torch.device = _CPU, attention: str = "sdpa"
) -> None:
    """Ask PyTorch, cuBLAS, cuDNN, NCCL and FlashAttention for kernels that repeat their bits.

    Call this before the first CUDA operation and before NCCL connects, because cuBLAS and NCCL read
    their settings once. The variables of cuBLAS and NCCL that the user has set stay.

    This sets PyTorch's warning mode: an operation without a deterministic kernel only warns. On a
    GPU, `settle_determinism` ends the warning mode. On a CPU the warning mode stays, because
    operations that warn still repeat their bits there.
    """
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # NVLink SHARP sums in an order that differs from call to call (NVIDIA/nccl#1497). NCCL may
        # also choose another algorithm for every communicator.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        if attention == "flash_attention_2":
            # flash-attn has a switch of its own, which transformers reads at every call.
            os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Filling every new tensor with NaN would reveal reads of unwritten memory, at the cost of a
    # pass over memory per allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic


def lacks_kernels(device: torch.device) -> bool:
    """Return True if operations on `device` may lack a deterministic kernel: on GPUs."""
    return device.type == "cuda"


def settle_determinism(mesh: SiteMesh, training_pass: Callable[[], object]) -> tuple[str, ...]:
    """Switch to PyTorch's strict mode, or to no deterministic mode if the strict mode refuses an
    operation of the model.

    `training_pass` runs the forward and the backward pass of training; its result is not used.
    Returns the operations without a deterministic kernel, at any rank of the site. If there are
    any, all ranks of the site train without deterministic kernels. Collective over the site. Does
    nothing on CPUs or without `site.deterministic`.
    """
    if not torch.are_deterministic_algorithms_enabled() or not lacks_kernels(mesh.device):
        return ()
    # Compiled code would have to be compiled again in the final mode.
    with torch.compiler.set_stance("force_eager"):
        own = operations_that_warn(training_pass)
    found = tuple(sorted({name for names in mesh.gather_names(own) for name in names}))
    if found:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    else:
        torch.use_deterministic_algorithms(True, warn_only=False)
    return found


def operations_that_warn(call: Callable[[], object]) -> list[str]:
    """Return the names of operations of `call` without a deterministic kernel, in PyTorch's words.

    Use this in the warning mode. Warnings about the mode itself are dropped; other warnings are
    passed on.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found: dict[str, None] = {}
    for each in caught:
        name = refused_operation(str(each.message))
        if name is None and _OF_THE_MODE not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif name is not None:
            found[name] = None
    return list(found)


def refused_operation(message: str) -> str | None:
    """Return the operation without a deterministic kernel that a PyTorch message names, or None."""
    if message.lstrip().startswith(_CUBLAS):
        return "cuBLAS with this CUBLAS_WORKSPACE_CONFIG"
    match = _REFUSED.match(message)
    return match and match[1]
