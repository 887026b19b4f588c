"""DistributedDataParallel with PyTorch's PowerSGD hook: low-rank gradients, with error feedback.

The hook sends dense gradients in its first two steps, which are part of the warm-up. All gradients
lie in one bucket. With several buckets, the hook's callbacks start collectives in a different order
at every rank. Gloo matches collectives by their order, so this fails with "Received data size
doesn't match expected size" (torch 2.13).
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wan.peers.peer import allreduce_bytes, job, make_loop, measure

BUCKET_MB = 4096
DENSE_STEPS = 2
"""Least number of dense steps that the hook allows with error feedback and warm start."""


def main() -> None:
    """Train at one of several sites."""
    told = job()
    if told.warm_up <= DENSE_STEPS:
        raise SystemExit(f"powersgd: warm_up {told.warm_up} must be above {DENSE_STEPS}")
    dist.init_process_group("gloo")
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=told.rank, start_powerSGD_iter=DENSE_STEPS
    )

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=BUCKET_MB)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    loop = make_loop(told, wrap)
    measure(
        told,
        loop,
        lambda: allreduce_bytes(state.total_numel_after_compression, told.sites),
    )
    # The site that ends first takes the store along, and the other one then aborts now and then.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
