"""Out of memory on purpose: one start, one line, and no restart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

TOO_MUCH = 1 << 46
"""Number of bytes that no GPU has."""
SITES = 2
SLOWEST = 60.0
"""Longest time from the first failure to the end of the command, in seconds. The NCCL time-out is
605 s."""


def memory(context: Context) -> None:
    """Measure one row: the end of a run that lacks GPU memory."""
    context.check("out of memory", lambda: _memory(context))


def _memory(context: Context) -> Outcome:
    path = sizes.run_file(
        context.folder, "memory", sizes.SITE["tiny"], context.shared, context.scale,
        outer={"rounds": 2, "inner_steps": 4},
    )  # fmt: skip
    product.prepare(path, context.shared)
    starts = context.folder / "starts.txt"
    starts.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.faults", str(path), str(starts)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    ended = time.time()
    # The log of this part is all that is left of the run if it fails in another way.
    print(done.stdout, flush=True)
    if not starts.exists():
        return Outcome(False, f"no step began; {runs.last_line(done)}")
    times = [float(line) for line in starts.read_text(encoding="ascii").splitlines()]
    lines = [line for line in done.stdout.splitlines() if line.startswith("dilocox: ")]
    said = lines[-1] if lines else f"exit code {done.returncode} and no line"
    found = {"exit": done.returncode, "starts": len(times), "seconds_to_exit": ended - times[0]}
    # The run may be over before the second of its two sites begins its first step.
    ok = done.returncode == 1 and len(times) <= SITES and "memory" in said.lower()
    return Outcome(ok and ended - times[0] < SLOWEST, said[:300], found)


class TooLarge:
    """A loss that requests more memory than any device has, and records each request."""

    def __init__(self, starts: Path) -> None:
        self._starts = starts

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Raise `torch.OutOfMemoryError`."""
        with self._starts.open("a", encoding="ascii") as file:
            file.write(f"{time.time()}\n")
        if logits.device.type == "cuda":
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=logits.device)
        # The CPU's allocator has an error of another type.
        raise torch.OutOfMemoryError(f"out of memory on purpose: asked for {TOO_MUCH} bytes")


def main() -> int:
    """Train a run whose first step does not fit. As with `dilocox train`, the last line has the
    reason."""
    import dilocox

    path, starts = map(Path, sys.argv[1:])
    try:
        dilocox.train(dilocox.load_run(path), overwrite=True, loss=TooLarge(starts))
    except dilocox.DilocoxError as error:
        print(f"dilocox: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
