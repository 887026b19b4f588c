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
"""What the backward pass computes again: nothing, whole layers, or the cheap half of them."""

_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations of `torch.ops.aten` whose output `selective` always saves."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operations of which `selective` saves every second output."""


def recompute(layer: nn.Module, checkpointing: Checkpointing) -> None:
    """Let `layer` compute its activations again in the backward pass (non-reentrant).

    The wrapper replaces `forward`, not the call, so that the hooks of FSDP stay outside. The
    wrapper is a bound method, for two reasons. Dynamo skips the frame of a `functools.partial`,
    does not enter `checkpoint` from there, and compiles nothing. And a deep copy of a bound method
    runs the copy's own parameters, where a deep copy of a closure would run the original's.
    """
    if checkpointing:
        run = _recomputed_in_part if checkpointing == "selective" else _recomputed
        setattr(layer, "forward", MethodType(run, layer))  # noqa: B010


class SelectedBytes(TorchDispatchMode):
    """Counts the bytes that `selective` saves of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = _SaveSome()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
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
    """Saves attention outputs and every second matrix product, after torchtitan's policy.

    Forward pass and recomputation meet the same operations in the same order, and each counts its
    own products.
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
