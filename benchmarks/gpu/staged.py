"""A process group for several ranks on one GPU: collectives through host memory and Gloo.

NCCL before 2.30 refuses two ranks on one GPU, and Gloo sends no CUDA tensors from rank to rank. So
the stages and shards of a site cannot share a GPU by either. `Staged` is a test double for this
one case. Every call copies its tensors to the host, exchanges them by Gloo, and copies them back
when its work is waited for.

It shows streams, shapes, schedules and bytes of the product on a GPU. It shows nothing of NCCL: its
point-to-point calls, its abort and its watchdog need two GPUs. It is slow, so no speed is measured
with it. `AVG` is a sum and a division; bf16 sums are Gloo's.
"""

# PyTorch's stubs of a process group overload what Python code overrides by one signature.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_AVG, _SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
NAME = "staged"
Start = Callable[..., Any]


class _Work(dist._Work):
    """A work of Gloo, followed once by the copy to the device."""

    def __init__(self, inner: Any, after: Callable[[], object] | None) -> None:
        super().__init__()
        self._inner, self._after, self._done = inner, after, False
        self._future: Any = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Wait for Gloo, and copy to the device."""
        if not self._done:
            if self._inner is not None:
                self._inner.wait()
            if self._after is not None:
                self._after()
            self._done = True
            self._future.set_result(None)
        return True

    def is_completed(self) -> bool:
        """Return whether waiting would return at once."""
        return self._done or (self._inner is None or bool(self._inner.is_completed()))

    def get_future(self) -> Any:
        """Return a future that is complete."""
        self.wait()
        return self._future


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _SUM if op == _AVG else op
    return options


class Staged(dist.ProcessGroup):
    """The calls that pipelines, FSDP2 and DTensor make of a process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._own, self._count = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self._count

    def rank(self) -> int:
        """Return this rank."""
        return self._own

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the name under which the backend is registered."""
        return NAME

    @property
    def pg_name(self) -> str:
        """The group's name in PyTorch's registry."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """See `pg_name`."""
        return self.pg_name

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Work:
        """Send a tensor to one rank."""
        host = _host(tensors[0])
        # The buffer lives until the work is done.
        return _Work(self._gloo.send([host], dst, tag), lambda: host.numel())

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Work:
        """Receive a tensor from one rank."""
        host = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
        into = tensors[0].detach()
        return _Work(self._gloo.recv([host], src, tag), lambda: into.copy_(host))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """Send the root's tensor to all ranks."""
        host, into = _host(tensors[0]), tensors[0].detach()
        options = dist.BroadcastOptions()
        options.rootRank = opts.rootRank if opts is not None else 0
        return _Work(self._gloo.broadcast([host], options), lambda: into.copy_(host))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """Give the sum or the mean to all ranks."""
        host, into, op = _host(tensors[0]), tensors[0].detach(), getattr(opts, "reduceOp", _SUM)

        def after() -> None:
            into.copy_(host.div_(self._count) if op == _AVG else host)

        return _Work(self._gloo.allreduce([host], _options(op)), after)

    def _gather(self, output: Tensor, given: Tensor) -> _Work:
        host = _host(given).view(-1)
        parts = [torch.empty_like(host) for _ in range(self._count)]
        into = output.detach().view(-1)
        return _Work(self._gloo.allgather([parts], [host]), lambda: into.copy_(torch.cat(parts)))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        return self._gather(output, given)

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        """Give every rank's tensor to all ranks."""
        host = _host(inputs[0])
        parts = [torch.empty_like(host) for _ in range(self._count)]

        def after() -> None:
            for into, part in zip(outputs[0], parts, strict=True):
                into.detach().copy_(part)

        return _Work(self._gloo.allgather([parts], [host]), after)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        op, host, into = getattr(opts, "reduceOp", _SUM), _host(given).view(-1), output.detach()

        def after() -> None:
            own = host.chunk(self._count)[self._own]
            into.view(-1).copy_(own.div_(self._count) if op == _AVG else own)

        return _Work(self._gloo.allreduce([host], _options(op)), after)

    reduce_scatter_single = _reduce_scatter_base

    # The functional collectives of DTensor call these in C++.
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        """Do several gathers."""
        works = [self._gather(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return _Work(None, lambda: [work.wait() for work in works])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        """Do several reductions."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self._reduce_scatter_base(o, i, opts) for o, i in pairs]
        return _Work(None, lambda: [work.wait() for work in works])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """Compute several sums or means."""
        works = [self.allreduce([each], opts) for each in tensors]
        return _Work(None, lambda: [work.wait() for work in works])

    def alltoall_base(
        self, output: Tensor, given: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> _Work:
        """Send equal parts, each to its rank."""
        own = torch.cat([_host(part).reshape(-1) for part in given.chunk(self._count)])
        got = []
        for root in range(self._count):
            host = own if root == self._own else torch.empty(given.numel(), dtype=given.dtype)
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._gloo.broadcast([host], options).wait()
            got.append(host.chunk(self._count)[self._own])
        into = output.detach().view(-1)
        return _Work(None, lambda: into.copy_(torch.cat(got)))

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> _Work:
        """Wait until all ranks have arrived."""
        return _Work(self._gloo.barrier(), None)

    def shutdown(self) -> None:
        """Do nothing, because every call ends with its work."""

    def abort(self) -> None:
        """See `shutdown`."""


def register(device: str) -> Start:
    """Register the backend for `device` ("cuda" or "cpu").

    Returns an `init_process_group` that takes this backend, whichever is asked for.
    """
    dist.Backend.register_backend(NAME, Staged, devices=[device])
    plain = dist.init_process_group

    def start(backend: Any = None, **options: Any) -> Any:
        # With a device PyTorch would connect the group at once, by a call that only NCCL has.
        options.pop("device_id", None)
        return plain(NAME, **options)

    return start
