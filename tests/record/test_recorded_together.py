"""The shards of a site wait for the one that hashes and keeps theta_0 outside of any collective."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilocox.inner import SiteMesh
from dilocox.training import checkpointing, whole_anchor
from dilocox.training.checkpointing import record_state

pytestmark = pytest.mark.waits

LIMIT, STORE = 6.0, 9.0
"""Seconds that a collective may last, and that the store takes for theta_0."""


class SlowRecord:
    """A `RankRecord` on a slow store."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def state(self, kind: str, round_: int, tensors: dict[str, torch.Tensor], *_: Any) -> None:
        """It hashes and writes."""
        time.sleep(STORE)
        self.kept = dict(tensors)


def shard(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    mesh = SiteMesh.create(1, 2, torch.device("cpu"))
    dist.barrier()  # both are there, however busy the machine is
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT), dist.group.WORLD)
    whole = torch.arange(12.0).reshape(4, 3)
    checkpointing.MEETING = 0.3
    whole_anchor.anchors = lambda _: {"w": whole[2 * number : 2 * number + 2]}
    rank: Any = SimpleNamespace(
        mesh=mesh, states=[], shapes={"w": whole.shape},
        place=SimpleNamespace(shard=number, leads=number == 0),
    )  # fmt: skip
    record: Any = SlowRecord()
    touched: list[float] = []
    record_state(record, "initial", 0, rank, lambda: touched.append(time.monotonic()))
    # The first collective of training.
    assert mesh.gather(torch.tensor([float(number)])).tolist() == [[0.0], [1.0]]
    kept = {name: tensor.tolist() for name, tensor in record.kept.items()}
    assert kept == ({"w": whole.tolist()} if number == 0 else {})
    gaps = [later - earlier for earlier, later in itertools.pairwise(touched)]
    assert max(gaps, default=LIMIT) < LIMIT, "it counts as alive meanwhile"
    dist.destroy_process_group()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.waits
def test_a_store_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=shard, args=(number, tmp_path)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
