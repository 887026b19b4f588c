"""Shared code of torchft's two peers: a manager per site, the model in fragments, the cycles.

Every site is a replica group of one worker. The Lighthouse, torchft's own binary
`torchft_lighthouse`, runs on the coordinator's host; TORCHFT_LIGHTHOUSE has its address.
Pseudo-gradients are averaged in one bucket per fragment, in fp32: torchft quantises on GPUs only.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.wan.peers.peer import PeerJob, allreduce_bytes, make_loop, measure

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
PATIENCE = timedelta(minutes=60)
"""Time-out longer than any exchange, so that torchft never takes a slow link for a broken one."""


def train(told: PeerJob) -> None:
    """Train at one site with torchft's DiLoCo, with fragments and delay of the job."""
    loop = make_loop(told)
    address = os.environ["SITE_ADDRESS"]
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=loop.model.load_state_dict,
        state_dict=loop.model.state_dict,
        min_replica_size=told.sites,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=os.environ["RANK"],
        hostname=address,
        init_sync=False,
    )
    parts = fragments(loop.model, told.fragments)
    sizes = [sum(each.numel() for each in part.parameters()) for part in parts]
    outer = [
        torch.optim.SGD(part.parameters(), OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
        for part in parts
    ]

    def sent() -> float:
        whole, begun = divmod(manager.current_step(), len(parts))
        return allreduce_bytes(whole * sum(sizes) + sum(sizes[:begun]), told.sites)

    with DiLoCo(
        manager,
        parts,
        loop.optimizer,
        outer,
        sync_every=told.sync_every,
        use_bucketization=True,
        fragment_sync_delay=told.delay,
        fragment_update_alpha=told.keep,
    ):
        measure(told, loop, sent)
    expected = (told.warm_up + told.cycles) * len(parts)
    if manager.current_step() != expected:
        raise SystemExit(
            f"torchft: {manager.current_step()} of {expected} exchanges were committed"
        )
    manager.shutdown(wait=False)


def fragments(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the model's layers in `count` runs.

    The embedding is in the first run, the norm in the last. Every parameter is in exactly one run.
    Raises `ValueError` if a parameter would be in none.
    """
    base: Any = model.model
    layers = list(base.layers)
    cuts = [number * len(layers) // count for number in range(count + 1)]
    parts: list[list[nn.Module]] = [layers[first:last] for first, last in pairwise(cuts)]
    parts[0] = [base.embed_tokens, *parts[0]]
    parts[-1] = [*parts[-1], base.norm]
    found = [nn.ModuleList(part) for part in parts]
    held = sum(p.numel() for part in found for p in part.parameters())
    if held != sum(p.numel() for p in model.parameters()):
        raise ValueError(f"the fragments hold {held} parameters, the model has others")
    return list(found)
