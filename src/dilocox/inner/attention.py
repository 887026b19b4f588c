"""The backends of PyTorch's scaled dot product attention (SDPA) that a rank on a GPU tries.

PyTorch takes the first backend that supports an operation's inputs. The settings belong to the
process and are made before the first layer is compiled. So they hold for training, for evaluation
and for the pass that looks for operations without a deterministic kernel, compiled or not.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from dilocox.utils import torch_internals

ORDER = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""From the fastest to the most general one, as torchtitan has them. PyTorch itself writes this
order over any other at the first attention of a process on recent GPUs."""
CUDNN_LENGTHS = 128
"""The cuDNN backend is used for sequence lengths that are a multiple of this number. For other
lengths some releases of cuDNN compute wrong values (pytorch/pytorch#169849) or NaN gradients
(pytorch/pytorch#196678)."""


def set_sdpa_backends(attention: str, length: int, device: torch.device) -> None:
    """Let attention on a GPU try the backends in `ORDER`, in the determinism mode that is set.

    Does nothing on CPUs, or if `attention`, the run file's `model.attention`, is not "sdpa".
    `length`: tokens of a sequence. Call this after each change of the determinism mode.

    The backward pass of the cuDNN backend is not deterministic (pytorch/pytorch#182551). PyTorch
    skips this backend in the strict mode but uses it in the warning mode, so ranks that ask for
    deterministic kernels have it off.
    """
    if attention != "sdpa" or device.type != "cuda":
        return
    cudnn = not torch.are_deterministic_algorithms_enabled() and length % CUDNN_LENGTHS == 0
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    ours = [backend.value for backend in ORDER]
    others = [each for each in torch_internals.sdpa_priority() if each not in ours]
    torch_internals.set_sdpa_priority([*ours, *others])


def sdpa_backends() -> tuple[str, ...]:
    """Return the names of the enabled SDPA backends, in the order in which PyTorch tries them."""
    switched_on = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    order = torch_internals.sdpa_priority()
    ranked = sorted((order.index(each.value), each.name) for each, on in switched_on.items() if on)
    return tuple(name.lower() for _, name in ranked)
