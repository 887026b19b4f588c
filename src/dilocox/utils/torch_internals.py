"""Private names of PyTorch that dilocox needs, for PyTorch 2.11 to 2.14, and code that uses them.

PyTorch may rename private names with any release. `missing_name` finds a name that a release lacks,
so that a run is refused at its start (`dilocox.utils.versions`) instead of in the middle of a step.
Importing this module imports no private name.
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
_DISTRIBUTED = "torch.distributed.distributed_c10d"
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
    (_DISTRIBUTED, "", ("_get_default_store",), "a loop of several processes"),
    ("torch.utils._python_dispatch", "", ("TorchDispatchMode",), "activation_checkpointing"),
    ("torch.utils._pytree", "", ("tree_leaves",), "activation_checkpointing"),
    ("torch._dynamo.config", "", ("suppress_errors",), "model.compile"),
    ("torch._dynamo.utils", "", ("counters",), "model.compile"),
    ("torch._C", "", ("_get_sdp_priority_order",), "attention on a GPU"),
    ("torch._C", "", ("_set_sdp_priority_order",), "attention on a GPU"),
    ("torch._subclasses.fake_tensor", "", ("FakeTensorMode",), "dilocox plan"),
    ("torch", "UntypedStorage", ("_cdata",), "dilocox plan"),
)
"""(module, class, names, feature). The class is "" if names belong to the module itself. At least
one of the names must exist. The feature is the part of dilocox that needs the name."""


def missing_name(
    names: Iterable[tuple[str, str, tuple[str, ...], str]] = NAMES,
) -> tuple[str, str] | None:
    """Returns the first entry of `names` that this PyTorch lacks, or None if it has all.

    The entry is returned as (full name, feature that needs it).
    """
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
    """Returns whether a module, a class, or instances of the class have attribute `name`.

    An attribute of instances is found by its annotation or by its assignment in `__init__`.
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
    """A pipeline stage that allocates receive buffers only while they are needed.

    PyTorch allocates one buffer per micro-batch before the first step and keeps all of them. With
    many micro-batches they take more memory than the stage's activations. In this class, a "meta"
    tensor, which has no memory, replaces each buffer that is not needed.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Within this context, PyTorch creates the stage's buffers on the "meta" device."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Allocate the micro-batch's input buffers, then call PyTorch's method."""
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """Allocate the micro-batch's gradient buffers, then call PyTorch's method."""
        if self.has_backward:
            self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Call PyTorch's method, then drop the input buffers; autograd keeps what it needs."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _empty(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Call PyTorch's method, then drop the buffers of the received gradients."""
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            _empty(self.grad_recv_info[bwd_chunk_id])
        return result

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skip the check for the last chunk: PyTorch 2.11 has not been told its output shape."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Returns PyTorch's operations that warm up links, without those from a rank to itself.

        In V-shaped schedules, PyTorch 2.11 also warms up the link from a rank to itself. Gloo
        cannot send to the own rank, and schedules never do.
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
        buffer = getattr(info, "buffer", None)  # inputs of the whole model have no buffer
        if buffer is not None and not buffer.is_meta:
            info.buffer = torch.empty_like(
                buffer, device="meta", requires_grad=buffer.requires_grad
            )


def make_fsdp_root(chunk: FSDPModule) -> None:
    """Initialise `chunk` as an FSDP root now, instead of at its first forward pass."""
    fully_shard.state(chunk)._lazy_init()  # type: ignore[attr-defined]


def keep_gradient_sums_fp32(chunk: FSDPModule) -> None:
    """Move gathered gradients into FSDP's fp32 sums.

    FSDP's own backward hooks do the same, but they do not run in the weight half of a split
    backward pass. Without this call the gradients of micro-batches would be summed in bf16.
    """
    for state in fully_shard.state(chunk)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _parameter_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP state.

    A state has at most one group in PyTorch 2.11, and may have several from 2.12 on.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def checkpoint_writer(files: Any, path: str, finished: Callable[[Any, Any], None]) -> Any:
    """Returns PyTorch's writer of distributed checkpoints for a folder.

    Args:
        files: fsspec file system of the folder.
        path: the folder in this file system.
        finished: called when all data is written, with the checkpoint's `Metadata` and the lists
            of its `WriteResult`.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    class Writer(FsspecWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            finished(metadata, results)

    # The writer opens its place by fsspec, which takes `::` in a path for the border of two places.
    writer: Any = Writer("/")
    writer.fs.fs, writer.path = files, path
    return writer


def tensors_without_memory() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which tensors have no memory and operations compute only shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """Returns an identifier of a tensor's storage.

    Two tensors that are alive have the same identifier if and only if they share their storage.
    """
    return int(tensor.untyped_storage()._cdata)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the 2-norm of each tensor; on a GPU all are computed in one launch."""
    return list(torch._foreach_norm(tensors))


def sdpa_priority() -> list[int]:
    """Returns `SDPBackend` values in the order in which attention on a GPU tries the backends."""
    return list(torch._C._get_sdp_priority_order())


def set_sdpa_priority(order: list[int]) -> None:
    """Set the order in which attention on a GPU tries the backends.

    `order` must contain each value of `sdpa_priority()` once.
    """
    torch._C._set_sdp_priority_order(order)


def weight_half_takes_functions() -> bool:
    """Returns whether the weight half of a split backward pass may begin at a Python function.

    This means a `torch.autograd.Function`. PyTorch 2.11 frees its node between the two halves of
    the backward pass; PyTorch 2.13 keeps the node.
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def default_store() -> torch.distributed.Store:
    """Return the store in which the processes of the default process group have met."""
    module = importlib.import_module(_DISTRIBUTED)
    store: torch.distributed.Store = module._get_default_store()
    return store
