"""Activation checkpointing of one layer, in a form that `torch.compile` can trace."""

from __future__ import annotations

from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Checkpointing = bool | Literal["selective"]
"""Parts that the backward pass recomputes: nothing (False), whole layers (True), or all operations
of a layer but attention and every second matrix product ("selective")."""

_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations of `torch.ops.aten` whose outputs "selective" always saves."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operations of which "selective" saves every second output."""


def recompute(layer: nn.Module, checkpointing: Checkpointing) -> None:
    """Make `layer` recompute its activations in the backward pass (non-reentrant checkpointing).

    The wrapper replaces `forward` and not `__call__`, so that FSDP's hooks run outside of it. The
    wrapper is a bound method, for two reasons. First, Dynamo skips the frame of a
    `functools.partial`, so it would not enter `checkpoint` and would compile nothing. Second, a
    deep copy of a bound method uses the parameters of the copy, while a deep copy of a closure
    would use the parameters of the original.
    """
    if checkpointing:
        run = _recomputed_in_part if checkpointing == "selective" else _recomputed
        setattr(layer, "forward", MethodType(run, layer))  # noqa: B010


class SelectedBytes(TorchDispatchMode):
    """Context that counts the bytes of the outputs which "selective" would save in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = _SaveSome()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and add the bytes that are saved. See `TorchDispatchMode`."""
        output = func(*args, **(kwargs or {}))
        context = SimpleNamespace(is_recompute=False)
        if self._policy(context, func) is CheckpointPolicy.MUST_SAVE:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.total += sum(tensor.nbytes for tensor in tensors)
        return output


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _recomputed_in_part(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        type(layer).forward, layer, *args, use_reentrant=False, context_fn=_contexts, **kwargs
    )


class _SaveSome:
    """Policy that saves attention outputs and every second matrix product, as torchtitan does.

    The forward pass and the recomputation run the same operations in the same order. Each of them
    has its own counter of products, so both decide alike.
    """

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _MATMULS:
            again = bool(context.is_recompute)
            self._products[again] += 1
            if self._products[again] % 2 == 1:
                return CheckpointPolicy.MUST_SAVE
        elif _is_attention(operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _is_attention(operation: Any) -> bool:
    namespace, _, name = str(getattr(operation, "name", lambda: "")()).partition("::")
    if namespace == "flash_attn":
        return "forward" in name
    return namespace == "aten" and name.partition(".")[0] in _ATTENTION


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, _SaveSome()))


def _policy(state: _SaveSome, context: Any, operation: Any, *args: Any, **kw: Any) -> Any:
    return state(context, operation, *args, **kw)
