"""The private names of PyTorch without which dilocox cannot run, for PyTorch 2.11 to 2.14.

PyTorch may rename private names with any release. `missing_name` says which one a release lacks, so
that a run is refused at its start (`dilocox.utils.versions`) instead of in the middle of a step.
Nothing private is imported when this module is.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

_STAGE = ("torch.distributed.pipelining", "PipelineStage")
_STATE = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
_CONTEXT = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPStateContext")
_GROUP = ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup")
_PARAMETER = ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam")
_FILES = ("torch.distributed.checkpoint._fsspec_filesystem", "")

NAMES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (*_STAGE, ("_prepare_forward_infra",), "stages > 1"),
    (*_STAGE, ("_prepare_backward_infra",), "stages > 1"),
    (*_STAGE, ("args_recv_info",), "stages > 1"),
    (*_STAGE, ("grad_recv_info",), "stages > 1"),
    (*_STAGE, ("get_fwd_recv_ops",), "stages > 1"),
    (*_STAGE, ("get_bwd_recv_ops",), "stages > 1"),
    (*_STAGE, ("forward_one_chunk",), "stages > 1"),
    (*_STAGE, ("backward_one_chunk",), "stages > 1"),
    (*_STAGE, ("forward_maybe_with_nosync",), "stages > 1"),
    (*_STAGE, ("backward_maybe_with_nosync",), "stages > 1"),
    (*_STATE, ("_lazy_init",), "shards > 1"),
    (*_STATE, ("_state_ctx",), "shards > 1"),
    (*_STATE, ("_fsdp_param_groups", "_fsdp_param_group"), "shards > 1"),
    (*_CONTEXT, ("all_states",), "shards > 1"),
    (*_GROUP, ("fsdp_params",), "shards > 1"),
    (*_PARAMETER, ("_unsharded_param",), "shards > 1"),
    (*_PARAMETER, ("accumulate_unsharded_grad_if_needed",), "shards > 1"),
    (*_PARAMETER, ("to_accumulated_grad_if_needed",), "shards > 1"),
    (*_FILES, ("FsspecWriter",), "checkpoints"),
    ("torch", "", ("_foreach_norm",), "the norm of the gradient"),
    ("torch", "", ("_foreach_mul_",), "inner.optimizer muon"),
    ("torch", "", ("_foreach_add_",), "inner.optimizer muon"),
    ("torch", "", ("_foreach_copy_",), "site.precision bf16"),
    ("torch.cuda", "", ("_is_in_bad_fork",), "the start of ranks"),
    ("torch.utils._python_dispatch", "", ("TorchDispatchMode",), "activation_checkpointing"),
    ("torch.utils._pytree", "", ("tree_leaves",), "activation_checkpointing"),
    ("torch._dynamo.config", "", ("suppress_errors",), "model.compile"),
    ("torch._dynamo.utils", "", ("counters",), "model.compile"),
    ("torch._C", "", ("_get_sdp_priority_order",), "attention on a GPU"),
    ("torch._C", "", ("_set_sdp_priority_order",), "attention on a GPU"),
    ("torch._subclasses.fake_tensor", "", ("FakeTensorMode",), "dilocox plan"),
    ("torch", "UntypedStorage", ("_cdata",), "dilocox plan"),
)
"""(module, class or "" for the module itself, names of which one must be there, what needs it)."""


def missing_name(
    names: Iterable[tuple[str, str, tuple[str, ...], str]] = NAMES,
) -> tuple[str, str] | None:
    """The first of `names` that this PyTorch lacks, written in full, and what needs it; or None."""
    for module, kind, either, purpose in names:
        try:
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError):
            return ".".join(part for part in (module, kind) if part), purpose
        if not any(_has(owner, name) for name in either):
            return ".".join(part for part in (module, kind, either[0]) if part), purpose
    return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has `name`, or whether an instance of the class will.

    An attribute of instances is known by its annotation or by its assignment in `__init__`.
    """
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    for kind in owner.__mro__:
        code = getattr(vars(kind).get("__init__"), "__code__", None)
        if name in vars(kind).get("__annotations__", {}) or name in getattr(code, "co_names", ()):
            return True
    return False


class LeanStage(PipelineStage):
    """A pipeline stage that holds a receive buffer only while somebody needs the buffer.

    PyTorch makes one buffer per micro-batch before the first step and keeps all of them: with many
    micro-batches more memory than the stage's activations. Here a tensor without memory stands for
    a buffer that is not needed.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        """PyTorch makes the buffers on the stage's device: let that be "meta" meanwhile."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """PyTorch's, after the micro-batch got its buffers."""
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """PyTorch's, after the micro-batch got its buffers."""
        if self.has_backward:
            self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's; from then on autograd alone decides how long the input stays."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _empty(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's; the gradient that came in is not needed afterwards."""
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            _empty(self.grad_recv_info[bwd_chunk_id])
        return result

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """PyTorch 2.11 looks at the last chunk's output, too, whose shape nobody told it."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """PyTorch 2.11 warms up links, in V-shaped schedules also the one from a rank to itself.

        Gloo cannot send to itself, and the schedules never do.
        """
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def _fill(self, infos: Iterable[Any]) -> None:
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if buffer is not None and buffer.is_meta:
                info.buffer = torch.empty_like(
                    buffer, device=self.device, requires_grad=buffer.requires_grad
                )


def _empty(infos: Iterable[Any]) -> None:
    for info in infos:
        buffer = getattr(info, "buffer", None)  # inputs of the whole model have none
        if buffer is not None and not buffer.is_meta:
            info.buffer = torch.empty_like(
                buffer, device="meta", requires_grad=buffer.requires_grad
            )


def make_fsdp_root(chunk: FSDPModule) -> None:
    """Do now what FSDP does at the first forward pass of a root."""
    fully_shard.state(chunk)._lazy_init()  # type: ignore[attr-defined]


def keep_gradient_sums_fp32(chunk: FSDPModule) -> None:
    """Move gathered gradients into FSDP's fp32 sums.

    FSDP's own backward hooks do this, but the weight half of a split backward pass does not run
    them. Without this call the gradients of micro-batches would be summed in bf16.
    """
    for state in fully_shard.state(chunk)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _parameter_groups(state: Any) -> list[Any]:
    """A state has one group, or none, in PyTorch 2.11; from 2.12 on it may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def checkpoint_writer(folder: str, finished: Callable[[Any, Any], None]) -> Any:
    """PyTorch's writer of distributed checkpoints to a path or an fsspec URL.

    `finished` gets the `Metadata` and the lists of `WriteResult` of what lies on disk then.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    class Writer(FsspecWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            finished(metadata, results)

    return Writer(folder)


def tensors_without_memory() -> contextlib.AbstractContextManager[Any]:
    """In it, tensors have shapes and dtypes but no memory, and operations compute nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """A number that two living tensors share if, and only if, they share their memory."""
    return int(tensor.untyped_storage()._cdata)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in one launch on a GPU."""
    return list(torch._foreach_norm(tensors))


def sdpa_priority() -> list[int]:
    """Values of `SDPBackend` in the order in which attention on a GPU tries the backends."""
    return list(torch._C._get_sdp_priority_order())


def set_sdpa_priority(order: list[int]) -> None:
    """Let attention on a GPU try the backends in this order. `order` has each backend once."""
    torch._C._set_sdp_priority_order(order)


def weight_half_takes_functions() -> bool:
    """Whether the weight half of a split backward pass may begin at a Python autograd function.

    PyTorch 2.11 lets go of such a node between the two halves. 2.13 keeps the node.
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)
