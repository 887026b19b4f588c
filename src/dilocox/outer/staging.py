"""Copies between a rank's device and host memory, and what waits for what on a GPU.

A GPU works through streams, each in its order. Training has one; each thread that works beside
training has one of its own, so that nothing of training queues behind it. What one stream has made
is used by another after a mark. Host memory that a GPU copies from and to is pinned: a copy then
runs at the speed of the bus, beside everything else. PyTorch keeps pinned memory that is freed for
the next one who asks, so the copies of every round use the same.

On a CPU all of this is nothing: tensors are where they are needed, and calls are in order.
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
"""Bytes that are read from a device at a time: one block is used while the next one comes."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(into, source): what is copied, of the same shapes and dtypes."""


class Mark(Protocol):
    """A moment in the stream that was the calling thread's when it was made."""

    def wait(self) -> None:
        """What the calling thread asks of the device from now on begins after this moment."""

    def synchronize(self) -> None:
        """Return when the device has come to this moment."""


class Staging(Protocol):
    """How a rank's threads get at what is on one device."""

    def empty(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """[count] in host memory, which the device copies from and to fast."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of what is in host memory, or the tensor itself where that is the device."""

    def copy(self, pairs: Pairs) -> None:
        """Copy between host memory and the device, or within one of them; complete on return."""

    def beside(self) -> AbstractContextManager[None]:
        """The calling thread works in a stream of its own."""

    def mark(self) -> Mark | None:
        """This moment of the calling thread's stream; none where calls are in order anyway."""

    def use(self, *tensors: Tensor | None) -> None:
        """The calling thread's stream uses what another one has made: its memory is not given away
        before that is over."""

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor of the device, row by row, in blocks. A block is to be used before
        the next one is asked for."""

    def begin_copy(self, pairs: Pairs) -> Mark | None:
        """Begin to copy out of the device what stands there now; the mark of its end, if copies do
        not end at once. What would change a source waits in `before_change`."""

    def before_change(self) -> None:
        """What the calling thread asks of the device from now on begins after the copies that
        `begin_copy` has begun. To be called by the thread that begins them."""


class HostStaging:
    """Of a CPU."""

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
        """See `Staging`: in one block."""
        yield _bytes(tensor).numpy().data

    def begin_copy(self, pairs: Pairs) -> Mark | None:
        """See `Staging`."""
        self.copy(pairs)
        return None

    def before_change(self) -> None:
        """See `Staging`."""


class Driver(Protocol):
    """What a kind of device has to offer. "Its stream" is the calling thread's."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] in pinned host memory."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy in its stream; may return before that has begun."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A new tensor on the device, copied in its stream."""

    def stream(self) -> Any:
        """A new stream."""

    def within(self, stream: Any) -> AbstractContextManager[None]:
        """`stream` is the calling thread's."""

    def record(self) -> Mark:
        """Its stream, now."""

    def hold(self, tensor: Tensor) -> None:
        """The memory of `tensor` stays until its stream has passed this moment."""


class DeviceStaging:
    """Of a device with streams."""

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
        """See `Staging`: all together, then one wait."""
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
        """See `Staging`: through two buffers, so that the next block comes while one is used."""
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
        """See `Staging`: in a stream for such copies, which training meets before it changes
        anything."""
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
    """An event; who waits on the host sleeps."""

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
        """See `Driver`. Where the machine has no more memory to pin, ordinary memory does it, more
        slowly."""
        try:
            return torch.empty(count, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            log.warning("%d values of %s are not pinned (%s): slow copies", count, dtype, reason)
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
    """The one of this process for `device`."""
    with _FINDING:
        if device not in _KNOWN:
            _KNOWN[device] = DeviceStaging(CudaDriver(device)) if device.type == "cuda" else HOST
        return _KNOWN[device]


def before_change() -> None:
    """What this process trains on is about to change: copies of it that were begun end first, on
    any device."""
    for staging in list(_KNOWN.values()):
        staging.before_change()


def sha256_of(tensor: Tensor) -> str:
    """SHA-256, hex, of a tensor's little-endian bytes, row by row, on any device."""
    total = hashlib.sha256()
    for block in staging_of(tensor.device).read(tensor):
        total.update(block)
    return total.hexdigest()


class Snapshot:
    """Copies in host memory of tensors as they stood when they were asked for."""

    def __init__(self, copies: dict[str, Tensor], marks: Sequence[Mark]) -> None:
        self._copies = copies
        self._marks = marks

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name, once they are whole."""
        for mark in self._marks:
            mark.synchronize()
        return self._copies


SHARED = 1 << 30
"""Bytes of host memory that tensors of one snapshot share: PyTorch rounds each piece of pinned
memory up to a power of two."""
_APART = 64


def snapshot(tensors: Mapping[str, Tensor]) -> Snapshot:
    """Of `tensors` as they stand now. What changes those of a GPU waits in `before_change`."""
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
    """Host memory for a copy of each, of its shape and dtype."""
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
