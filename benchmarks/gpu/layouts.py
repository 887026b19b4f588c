"""Sites of two stages and of two shards on one GPU, and a rank that dies: all staged."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

LAYOUTS = {"two stages": {"stages": 2}, "two shards": {"shards": 2}}
DIES_AT = 6
"""Number of calls of the loss after which a rank dies."""
SLOWEST = 60.0
"""Longest time in seconds until its site trains again. NCCL's time-out is 605 s."""


def run(context: Context) -> None:
    """Measure two rows for each layout, and one for a rank that dies."""
    for name, site in LAYOUTS.items():
        if not context.wants(name, f"{name}, verify"):
            continue
        short = name.replace(" ", "-")
        shape, scale = sizes.SITE[context.scale], context.scale
        path = sizes.run_file(
            context.folder, short, shape, context.shared, scale, site=site,
            outer={"rounds": 3, "inner_steps": 4 if scale != "gpu" else 10},
        )  # fmt: skip
        product.prepare(path, context.shared)
        with product.ranks_share_gpu(context.cuda):
            context.check(name, partial(runs.trained, path, short))
        context.check(f"{name}, verify", partial(_verified, context, path, short))
    context.check("a rank dies", lambda: _dies(context))


def _verified(context: Context, path: Path, name: str) -> Outcome:
    """Verify a run, which another process may have trained."""
    with product.ranks_share_gpu(context.cuda):
        folder = runs.there(path, name, lambda: runs.train(path))
    return runs.verified(folder)


class DiesOnce:
    """A loss that ends rank 1 of a site hard, once. It records every start of a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the product's own loss."""
        import torch.distributed as dist

        from dilocox.inner import mean_cross_entropy

        self._calls += 1
        rank = dist.get_rank()
        if self._calls == 1:
            # The ranks of a site are children of one process, across restarts.
            (self._folder / f"start-{rank}-{os.getppid()}-{time.time()}").touch()
        dead = self._folder / "dead"
        if rank == 1 and self._calls == DIES_AT and not dead.exists():
            dead.write_text(f"{os.getppid()} {time.time()}", encoding="ascii")
            os._exit(9)
        return mean_cross_entropy(logits, labels)


def _dies(context: Context) -> Outcome:
    """Train two sites of two shards, one rank of which ends hard. Measures the time of recovery."""
    marks = context.folder / "marks"
    marks.mkdir(exist_ok=True)
    for old in marks.iterdir():
        old.unlink()
    path = sizes.run_file(
        context.folder, "dies", sizes.SITE["tiny"], context.shared, context.scale,
        site={"shards": 2, "batch_size": 8},
        outer={"rounds": 6, "inner_steps": 4},
    )  # fmt: skip
    product.prepare(path, context.shared)
    with product.ranks_share_gpu(context.cuda):
        result = runs.train(path, loss=DiesOnce(marks))
    site, moment = (marks / "dead").read_text(encoding="ascii").split()
    dead = float(moment)
    starts = [float(each.name.split("-")[3]) for each in marks.glob(f"start-0-{site}-*")]
    later = [each for each in starts if each > dead]
    if not later:
        return Outcome(False, f"{result.phase}, but the site of the dead rank did not come back")
    took = min(later) - dead
    ok = result.finished and took < SLOWEST
    return Outcome(ok, f"{result.phase}, the site came back", {"seconds_until_it_trains": took})
