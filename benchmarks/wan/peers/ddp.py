"""PyTorch's DistributedDataParallel over Gloo: gradients are averaged in every step."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wan.peers.peer import allreduce_bytes, job, make_loop, measure, parameters


def main() -> None:
    """Train at one of several sites."""
    told = job()
    dist.init_process_group("gloo")
    # Weights are equal already. Sending them first would only cost the time of a step.
    loop = make_loop(told, lambda model: DistributedDataParallel(model, init_sync=False))
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1

    loop.optimizer.register_step_post_hook(count)
    each = allreduce_bytes(parameters(loop), told.sites)
    measure(told, loop, lambda: done * each)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
