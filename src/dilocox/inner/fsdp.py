"""FSDP2 inside a stage: wrap a chunk's layers, and see its shards as plain tensors."""

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
    """The modules of a chunk whose parameters FSDP gathers together, beside what is left over."""

    embedding: nn.Module | None
    layers: list[nn.Module]
    """A unit each."""
    closing: list[nn.Module]
    """One unit: final norm and head, in order of use. Every forward pass calls the first one."""

    @classmethod
    def of(cls, chunk: nn.Module) -> Units:
        """The units of torchtitan. A tied embedding and head of one chunk share a parameter. Only
        one unit can have a parameter, so both are left over."""
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

    `mesh` is of shards, or of replicas x shards: then FSDP shards over its last dimension and
    keeps equal copies over its first.

    Parameters stay fp32; with bf16 they are gathered and used as bf16, and gradients are reduced
    in fp32. `reshard_after_forward` counts for the embedding and the layers. Final norm and head
    stay gathered: the backward pass begins with them.
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
        # Its gradient hangs on the tokens alone.
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
    """Make one unit of `modules` that the first one's forward pass gathers; their parameters.

    `fully_shard` of a list would wait for a call of each module. A loss may use the head's weight
    without a call of the head, or call the head once for every chunk of tokens.
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
    """Fix the chunk as an FSDP root once its shards are filled.

    FSDP does this at the first forward pass. Schedules that gather parameters before it would
    otherwise gather through modules that do not know their root yet.
    """
    if isinstance(chunk, FSDPModule):
        torch_internals.make_fsdp_root(chunk)


def drop_gathered(chunk: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers what the shards hold by then."""
    if isinstance(chunk, FSDPModule):
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def reduce_gradients(chunk: nn.Module, last: bool) -> None:
    """Say whether the next backward pass of `chunk` is the `last` one of the step.

    Before the last one gradients are summed up whole, in fp32, and gathered parameters stay; the
    last one reduces the sums and frees the parameters.
    """
    if isinstance(chunk, FSDPModule):
        chunk.set_is_last_backward(last)
        chunk.set_requires_gradient_sync(last)
        chunk.set_reshard_after_backward(last)


def reduce_over_replicas(chunk: nn.Module, last: bool) -> None:
    """Say whether the next backward pass of `chunk` is the `last` one of the step.

    Every pass reduces gradients over the shards of a replica. The last one reduces the sums over
    the replicas, too.
    """
    if isinstance(chunk, FSDPModule):
        chunk.set_requires_all_reduce(last)


def keep_gradient_sums_fp32(chunk: nn.Module) -> None:
    """Of a sharded chunk, keep the sums over micro-batches in fp32 after half a backward pass."""
    if isinstance(chunk, FSDPModule):
        torch_internals.keep_gradient_sums_fp32(chunk)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor` as a plain tensor on the same storage, outside autograd."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
