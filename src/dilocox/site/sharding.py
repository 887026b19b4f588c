"""FSDP2 inside a stage: wrap a chunk's layers, and see its shards as plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_chunk(
    chunk: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    precision: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard `chunk` (still on the meta device) over `mesh`: each of its `layers`, then the rest.

    Parameters stay fp32; with bf16 they are gathered and used as bf16, and gradients are reduced
    in fp32.
    """
    policy = MixedPrecisionPolicy()
    if precision is not torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def finish_sharding(chunk: nn.Module) -> None:
    """Fix the chunk as an FSDP root once its shards are filled.

    FSDP does this at the first forward pass. Schedules that gather parameters before it would
    otherwise gather through modules that do not know their root yet.
    """
    if isinstance(chunk, FSDPModule):
        fully_shard.state(chunk)._lazy_init()  # type: ignore[attr-defined]


def drop_gathered(chunk: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers what the shards hold by then."""
    if isinstance(chunk, FSDPModule):
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def keep_gradient_sums_fp32(chunk: nn.Module) -> None:
    """Move gathered gradients into FSDP's fp32 sums.

    FSDP does this in its own backward hooks, which the weight half of a split backward pass does
    not run: without it, micro-batches would be summed up in bf16.
    """
    if not isinstance(chunk, FSDPModule):
        return
    for state in fully_shard.state(chunk)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor` as a plain tensor on the same storage, outside autograd."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
