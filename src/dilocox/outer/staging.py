"""Copies between a rank's device and host memory, and the order of work on a GPU.

A GPU runs streams, and a stream runs its operations in order. Training has one stream. Each thread
beside training has a stream of its own, so that training never queues behind that thread. A stream
uses the tensors of another stream after an event (`Mark`). Copies use pinned host memory: such a
copy runs at the speed of the bus, beside the computation. PyTorch caches freed pinned memory, so
the copies of every round use the same pages.

On a CPU, tensors are in host memory already and calls run in order. `HostStaging` therefore has
neither streams, events nor pinned memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BLOCK = 1 << 25
"""Bytes of one block of a read from a device. The next block is copied while one is used."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(target, source) of each copy; both have one shape and one dtype."""


class Mark(Protocol):
    """Event in the stream of the thread that made the event."""

    def wait(self) -> None:
        """Let later operations of the calling thread's stream begin after this event."""

    def synchronize(self) -> None:
        """Block the host until the device has reached this event."""


class Staging(Protocol):
    """Access of a rank's threads to the tensors of one device."""

    def empty(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Uninitialised [count] in host memory, pinned where the device copies."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy of a host tensor on the device; the tensor itself where the device is the CPU."""

    def copy(self, pairs: Pairs) -> None:
        """Copy between host memory and the device, or within one of them; complete on return."""

    def beside(self) -> AbstractContextManager[None]:
        """Within the context, the calling thread works in a stream of its own."""

    def mark(self) -> Mark | None:
        """Event at the end of the calling thread's stream. May be None: calls run in order."""

    def use(self, *tensors: Tensor | None) -> None:
        """Keep the memory of another stream's tensors until the calling thread's stream has used
        the tensors."""

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        """Bytes of a tensor of the device, row by row, in blocks. A block is valid until the caller
        asks for the next block."""

    def begin_copy(self, pairs: Pairs) -> Mark | None:
        """Begin to copy device tensors as they stand now. Returns the event of the last copy; None
        if the copies are complete. Call `before_change` before a source changes."""

    def before_change(self) -> None:
        """Let later operations of the calling thread's stream begin after all copies of
        `begin_copy`. Only the thread that calls `begin_copy` may call this."""


class HostStaging:
    """Staging of a CPU: every call is complete on return."""

    def empty(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """See `Staging`."""
        return torch.empty(count, dtype=dtype)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return tensor

    def copy(self, pairs: Pairs) -> None:
        """See `Staging`."""
        for into, source in pairs:
            into.copy_(source)

    def beside(self) -> AbstractContextManager[None]:
        """See `Staging`."""
        return contextlib.nullcontext()

    def mark(self) -> Mark | None:
        """See `Staging`."""
        return None

    def use(self, *tensors: Tensor | None) -> None:
        """See `Staging`."""

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        """See `Staging`. The whole tensor is one block."""
        yield _bytes(tensor).numpy().data

    def begin_copy(self, pairs: Pairs) -> Mark | None:
        """See `Staging`."""
        self.copy(pairs)
        return None

    def before_change(self) -> None:
        """See `Staging`."""


class Driver(Protocol):
    """Operations of one kind of device. "Its stream" is the calling thread's stream."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] in pinned host memory."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Queue a copy in its stream; may return before the copy begins."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A new tensor on the device, copied in its stream."""

    def stream(self) -> Any:
        """A new stream."""

    def within(self, stream: Any) -> AbstractContextManager[None]:
        """Within the context, `stream` is the calling thread's stream."""

    def record(self) -> Mark:
        """Event at the end of its stream."""

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` until its stream has run all operations queued so far."""


class DeviceStaging:
    """Staging of a device with streams."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._own = threading.local()
        self._copying = driver.stream()
        self._open: list[Mark] = []

    def empty(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """See `Staging`."""
        return self._driver.empty(count, dtype)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return self._driver.to_device(tensor)

    def copy(self, pairs: Pairs) -> None:
        """See `Staging`. Queues all copies, then waits once."""
        for into, source in pairs:
            self._driver.copy(into, source)
        self._driver.record().synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See `Staging`."""
        if not hasattr(self._own, "stream"):
            self._own.stream = self._driver.stream()
        with self._driver.within(self._own.stream):
            yield

    def mark(self) -> Mark | None:
        """See `Staging`."""
        return self._driver.record()

    def use(self, *tensors: Tensor | None) -> None:
        """See `Staging`."""
        for tensor in tensors:
            if tensor is not None:
                self._driver.hold(tensor)

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        """See `Staging`. Uses two buffers: one block is copied while the caller reads another."""
        data = _bytes(tensor)
        size = min(BLOCK, data.numel())
        buffers = [self._driver.empty(size, torch.uint8) for _ in range(2)]
        before: tuple[Tensor, Mark] | None = None
        for number, start in enumerate(range(0, data.numel(), BLOCK)):
            part = data[start : start + BLOCK]
            host = buffers[number % 2][: part.numel()]
            self._driver.copy(host, part)
            here = host, self._driver.record()
            if before is not None:
                yield _arrived(*before)
            before = here
        if before is not None:
            yield _arrived(*before)

    def begin_copy(self, pairs: Pairs) -> Mark | None:
        """See `Staging`. The copies run in a stream that has no other operations."""
        now = self._driver.record()
        with self._driver.within(self._copying):
            now.wait()
            for into, source in pairs:
                self._driver.copy(into, source)
                self._driver.hold(source)
            done = self._driver.record()
        self._open.append(done)
        return done

    def before_change(self) -> None:
        """See `Staging`."""
        while self._open:
            self._open.pop().wait()


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes] of a tensor, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _arrived(host: Tensor, mark: Mark) -> memoryview:
    mark.synchronize()
    data: memoryview = host.numpy().data
    return data


class _CudaMark:
    """CUDA event; a host thread that waits for the event sleeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """See `Mark`."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """See `Mark`."""
        self._event.synchronize()


class CudaDriver:
    """See `Driver`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """See `Driver`. Falls back to pageable memory, with slower copies, if no more memory can be
        pinned."""
        try:
            return torch.empty(count, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            log.warning(
                "host memory for %d %s values is not pinned, so copies are slow (%s)",
                count,
                dtype,
                reason,
            )
            return torch.empty(count, dtype=dtype)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See `Driver`."""
        into.copy_(source, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Driver`."""
        return tensor.to(self._device, non_blocking=True)

    def stream(self) -> Any:
        """See `Driver`."""
        return torch.cuda.Stream(self._device)

    @contextlib.contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        """See `Driver`."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def record(self) -> Mark:
        """See `Driver`."""
        return _CudaMark(self._device)

    def hold(self, tensor: Tensor) -> None:
        """See `Driver`."""
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(self._device))


HOST: Staging = HostStaging()
_KNOWN: dict[torch.device, Staging] = {torch.device("cpu"): HOST}
_FINDING = threading.Lock()


def staging_of(device: torch.device) -> Staging:
    """The staging of `device`; each process has one per device."""
    with _FINDING:
        if device not in _KNOWN:
            _KNOWN[device] = DeviceStaging(CudaDriver(device)) if device.type == "cuda" else HOST
        return _KNOWN[device]


def before_change() -> None:
    """Let later operations of the calling thread begin after all pending copies, on all devices.

    Call this before this process changes its parameters or its training state.
    """
    for staging in list(_KNOWN.values()):
        staging.before_change()


def sha256_of(tensor: Tensor) -> str:
    """SHA-256, hex, of a tensor's little-endian bytes, row by row, on any device."""
    total = hashlib.sha256()
    for block in staging_of(tensor.device).read(tensor):
        total.update(block)
    return total.hexdigest()


class Snapshot:
    """Copies in host memory of tensors, as they stood when `snapshot` was called."""

    def __init__(self, copies: dict[str, Tensor], marks: Sequence[Mark]) -> None:
        self._copies = copies
        self._marks = marks

    def tensors(self) -> dict[str, Tensor]:
        """All copies by name. Blocks until every copy is complete."""
        for mark in self._marks:
            mark.synchronize()
        return self._copies


SHARED = 1 << 30
"""Bytes of host memory that tensors of one snapshot share: PyTorch rounds each piece of pinned
memory up to a power of two."""
_APART = 64


def snapshot(tensors: Mapping[str, Tensor]) -> Snapshot:
    """Copy `tensors` as they stand now. Call `before_change` before a GPU's tensor changes."""
    copies: dict[str, Tensor] = {}
    elsewhere: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if staging_of(tensor.device) is HOST:
            copies[name] = tensor.detach().to("cpu", copy=True)
        else:
            elsewhere.setdefault(tensor.device, {})[name] = tensor.detach()
    marks = []
    for device, some in elsewhere.items():
        staging = staging_of(device)
        into = _places(staging, some)
        mark = staging.begin_copy([(into[name], each) for name, each in some.items()])
        copies |= into
        if mark is not None:
            marks.append(mark)
    return Snapshot({name: copies[name] for name in tensors}, marks)


def _places(staging: Staging, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate host memory for a copy of each tensor, with its shape and dtype."""
    sizes: list[int] = []
    places = {}
    for name, tensor in tensors.items():
        size = -(-tensor.nbytes // _APART) * _APART
        if not sizes or sizes[-1] + size > SHARED:
            sizes.append(0)
        places[name] = len(sizes) - 1, sizes[-1]
        sizes[-1] += size
    pieces = [staging.empty(size) for size in sizes]
    found = {}
    for name, tensor in tensors.items():
        piece, start = places[name]
        some = pieces[piece][start : start + tensor.nbytes]
        found[name] = some.view(tensor.dtype).view(tensor.shape)
    return found
