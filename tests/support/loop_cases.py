"""What the workers run of a site around a loop of a user's own in several processes."""

from __future__ import annotations

import copy
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from dilocox.data.rows import NOT_COUNTED
from dilocox.inner.loop_optimizers import LoopOptimizers
from dilocox.training.launch.several_processes import DividedSite
from dilocox.training.loop.model import LoopModel, trained_tensors
from dilocox.training.loop.ranks import SiteRanks
from dilocox.training.loop.turns import Turns
from tests.support.counted_cases import batch
from tests.support.site_cases import CPU, rows_of
from tests.support.toy_model import VOCABULARY


def held_out(empty: tuple[int, ...], own: bool) -> tuple[float, float]:
    """The held-out loss of a model that FSDP2 divides, and of the whole model and all rows.

    `empty`: rows of eight without a label that counts. `own`: with a function of the user's own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    def mean(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            model(inputs).flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED
        )

    ids, labels = batch(8, 0, empty)
    with torch.no_grad():
        expected = float(mean(whole, ids, labels))
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    site = DividedSite.__new__(DividedSite)
    site.ranks = SiteRanks("paris")
    turns, trained = Turns(CPU, lambda: None), trained_tensors(model)
    optimizers = LoopOptimizers(trained, [torch.optim.SGD(model.parameters(), lr=0.1)], {})
    loop = LoopModel(
        model, trained, optimizers, turns, mean if own else None, lambda: (0, False), site._mean
    )
    found: list[float] = []

    def train() -> None:
        found.append(loop.evaluate(rows_of(rank, world, ids), rows_of(rank, world, labels)))
        turns.end(None)

    threading.Thread(target=train, daemon=True).start()
    assert turns.take() is None
    return found[0], expected
