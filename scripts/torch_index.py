"""Chooses the build of PyTorch that a machine can run, and its index. Standard library only.

PyTorch's builds per release, Linux x86-64 and aarch64 alike (PyTorch's release notes and its CUDA
support matrix, issues 172663, 178665, 190355 and 190385 of pytorch/pytorch):

2.11: cu126, cu128, cu130; 2.12 to 2.14: cu126, cu130 (and cu132); from 2.15 on no cu126.
The default index has cu130 for 2.11 to 2.13, and cu132 for 2.14.

cu126 has code for compute capability 5.0 to 9.0, cu128 for 7.5 to 12.0, cu130 for 7.5 to 12.0.
On aarch64 (GH200, GB200) cu126 has 8.0 and 9.0, cu128 also 10.0 and 12.0, cu130 also 11.0.
A driver runs every build of its own CUDA's major version, and older ones.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

PYTORCH = "https://download.pytorch.org/whl/"
VARIABLE = "DILOCOX_TORCH_INDEX"
LAST_WITH_CU128 = "torch==2.11.0"


@dataclass(frozen=True)
class Choice:
    """The PyTorch to install, and the reason."""

    index: str | None
    """URL of a package index; None for the default one."""
    requirement: str | None
    """Requirement that replaces the constraints' torch, if no build of that one fits. Otherwise
    None."""
    why: str


def choose(smi: str | None, capabilities: str, override: str | None, linux: bool) -> Choice:
    """Return the build that fits the output of `nvidia-smi`.

    Args:
        smi: Output of `nvidia-smi`. None: there is no `nvidia-smi`.
        capabilities: Output of `nvidia-smi --query-gpu=compute_cap --format=csv,noheader`. May be
            empty.
        override: Value of DILOCOX_TORCH_INDEX: a URL, a name such as "cu126" or "cpu", or
            "default". May be None.
        linux: Whether the machine runs Linux.

    Raises:
        ValueError: No build fits; the message gives the reason and the mend.
    """
    if override:
        return Choice(index_url(override), None, f"{VARIABLE}={override}")
    if not linux:
        return Choice(None, None, "not Linux")
    if smi is None:
        return Choice(index_url("cpu"), None, "no NVIDIA GPU here")
    cuda = driver_cuda(smi)
    found = [float(text) for text in re.findall(r"^\s*(\d+\.\d+)\s*$", capabilities, re.MULTILINE)]
    oldest, newest = (min(found), max(found)) if found else (8.0, 9.0)
    if cuda is None:
        return Choice(None, None, "nvidia-smi does not say which CUDA the driver runs")
    seen = f"the driver runs CUDA {cuda[0]}.{cuda[1]}"
    if cuda < (12, 0):
        raise ValueError(
            f"{seen}, PyTorch needs 12.0 or newer: update the NVIDIA driver to 525 or newer, or "
            f"set {VARIABLE}=cpu"
        )
    if oldest < 7.5:
        return Choice(index_url("cu126"), None, f"a GPU of compute capability {oldest}")
    if cuda >= (13, 0):
        return Choice(index_url("cu130"), None, seen)
    if newest < 10.0:
        return Choice(index_url("cu126"), None, seen)
    if cuda >= (12, 8):
        return Choice(index_url("cu128"), LAST_WITH_CU128, f"{seen}, a GPU has capability {newest}")
    raise ValueError(
        f"{seen}, a GPU of compute capability {newest} needs 12.8 or newer: update the NVIDIA "
        f"driver to 580 or newer, or set {VARIABLE}=cpu"
    )


def index_url(name: str) -> str | None:
    """Return the URL of an index given by URL or short name. None for "default"."""
    if name == "default":
        return None
    return name if "://" in name else PYTORCH + name


def driver_cuda(smi: str) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver runs, from the output of `nvidia-smi`."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", smi)
    return (int(found[1]), int(found[2])) if found else None


def with_torch(constraints: str, requirement: str) -> str:
    """Return the text of a constraints file with its torch replaced by `requirement`."""
    return re.sub(r"^torch[=<>!~].*$", requirement, constraints, flags=re.MULTILINE)


def ask_nvidia_smi() -> tuple[str | None, str]:
    """Return (output of `nvidia-smi` or None, compute capabilities) of this machine."""
    return _output("nvidia-smi"), _output(
        "nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"
    ) or ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
