"""FSDP2 inside a stage: shard the modules of a chunk, and access its shards as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dilocox.utils import torch_internals

_TOGETHER = "dilocox_together_"


@dataclass(frozen=True)
class Units:
    """FSDP units of a chunk: FSDP gathers the parameters of one unit together. All parameters of
    the chunk outside these units form a last unit."""

    embedding: nn.Module | None
    layers: list[nn.Module]
    """Layers; each one is a unit."""
    closing: list[nn.Module]
    """Final norm and head, in order of use: one unit. Every forward pass calls the first module."""

    @classmethod
    def of(cls, chunk: nn.Module) -> Units:
        """Return the units, chosen as in torchtitan.

        A tied embedding and head of one chunk share a parameter. Only one unit can have a
        parameter, so both go into the last unit.
        """
        layers = [layer for layer in chunk.layers if isinstance(layer, nn.Module)]  # type: ignore[union-attr]
        embedding: nn.Module | None = chunk.embedding  # type: ignore[assignment]
        closing: list[nn.Module] = list(chunk.closing)  # type: ignore[arg-type]
        own = set() if embedding is None else set(embedding.parameters())
        if own & {each for module in closing for each in module.parameters()}:
            return cls(None, layers, [])
        return cls(embedding, layers, closing)


def shard_chunk(
    chunk: nn.Module, mesh: DeviceMesh, precision: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard `chunk` (still on the meta device) over `mesh`: each of its `Units`, then the rest.

    Parameters stay fp32. With bf16 they are gathered and used as bf16, and gradients are reduced in
    fp32.

    Args:
        chunk: the chunk.
        mesh: shards, or replicas x shards. With replicas, FSDP shards over the last dimension and
            keeps equal copies over the first dimension.
        precision: the compute dtype.
        reshard_after_forward: free gathered parameters of embedding and layers after the forward
            pass. Final norm and head stay gathered, because the backward pass begins with them.
    """
    policy = MixedPrecisionPolicy()
    if precision is not torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    units = Units.of(chunk)
    for layer in units.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if units.embedding is not None:
        embedding = fully_shard(
            units.embedding,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
        # The backward pass of the embedding needs the tokens, but not the weights.
        embedding.set_unshard_in_backward(False)
    closed = _shard_together(units.closing, mesh, policy)
    fully_shard(
        chunk,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=closed,
    )


def _shard_together(
    modules: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """Make one unit of `modules`, gathered by the forward pass of the first module.

    Returns the parameters of the other modules. `fully_shard` of a list would wait for a call of
    each module. But a loss may use the head's weight without a call of the head, or may call the
    head once per chunk of tokens.
    """
    if not modules:
        return set()
    first, *others = modules
    for number, other in enumerate(others):
        first.add_module(f"{_TOGETHER}{number}", other)
    fully_shard(first, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for number in range(len(others)):
        delattr(first, f"{_TOGETHER}{number}")
    return {parameter for other in others for parameter in other.parameters()}


def finish_sharding(chunk: nn.Module) -> None:
    """Make the chunk an FSDP root. Call this once its shards are filled.

    FSDP would do this at the first forward pass. Some schedules gather parameters before that pass,
    through modules that would not know their root yet.
    """
    if isinstance(chunk, FSDPModule):
        torch_internals.make_fsdp_root(chunk)


def drop_gathered(chunk: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers the shards' new values."""
    if isinstance(chunk, FSDPModule):
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def reduce_gradients(chunk: nn.Module, last: bool) -> None:
    """Tell FSDP whether the next backward pass of `chunk` is the `last` one of the step.

    Earlier passes add up whole gradients in fp32 and keep gathered parameters. The last pass
    reduces the sums over the shards and frees the parameters.
    """
    if isinstance(chunk, FSDPModule):
        chunk.set_is_last_backward(last)
        chunk.set_requires_gradient_sync(last)
        chunk.set_reshard_after_backward(last)


def reduce_over_replicas(chunk: nn.Module, last: bool) -> None:
    """Tell FSDP whether the next backward pass of `chunk` is the `last` one of the step.

    Every pass reduces gradients over the shards of a replica. The last pass also reduces the sums
    over the replicas.
    """
    if isinstance(chunk, FSDPModule):
        chunk.set_requires_all_reduce(last)


def keep_gradient_sums_fp32(chunk: nn.Module) -> None:
    """Keep a sharded chunk's gradient sums in fp32 after the weight half of a backward pass."""
    if isinstance(chunk, FSDPModule):
        torch_internals.keep_gradient_sums_fp32(chunk)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`: a plain tensor on the same storage, outside autograd."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def whole(tensor: Tensor) -> Tensor:
    """Return all of `tensor` as a plain tensor, outside autograd.

    Collective over the processes that divide `tensor`, if it is divided.
    """
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain
