"""A device with streams, played on a CPU: its memory is the host's, its copies come late.

A copy is done when somebody waits for it, and not before: who does not wait reads what was there.
What runs within a stream (PyTorch's calls) runs at once, as on any CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from dilocox.compression import sparse, tensor_ops
from dilocox.outer import staging

CPU = torch.device("cpu")


@dataclass(eq=False)
class Stream:
    """Copies in their order, of which some are still to come."""

    name: str
    waiting: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    @property
    def end(self) -> int:
        """How many copies it has been given."""
        return self.done + len(self.waiting)

    def run_to(self, end: int) -> None:
        """Do the copies up to number `end`."""
        while self.done < end:
            self.waiting.pop(0)()
            self.done += 1


@dataclass(eq=False)
class FakeMark:
    """A place in a stream."""

    driver: FakeDriver
    stream: Stream
    place: int

    def wait(self) -> None:
        """The calling thread's stream has it behind it."""
        self.driver.waits.append((self.driver.here.name, self.stream.name))
        self.synchronize()

    def synchronize(self) -> None:
        """All that comes before it is done."""
        with self.driver.lock:
            self.stream.run_to(self.place)


class FakeDriver:
    """See `staging.Driver`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams = threading.local()
        self._numbers = itertools.count()
        self._default = Stream("training")
        self.waits: list[tuple[str, str]] = []
        """(who waits, for whom)."""
        self.held: list[tuple[str, int]] = []
        """(stream, bytes) of tensors that a stream uses and another has made."""
        self.pinned: list[int] = []
        """Bytes of host memory that was asked for."""
        self.copied: list[int] = []
        """Bytes of each copy, as it was asked for."""
        self.uploaded: list[int] = []
        """Bytes of each copy to the device of which it is a new tensor."""

    @property
    def here(self) -> Stream:
        """The calling thread's stream."""
        found: Stream = getattr(self._streams, "stream", self._default)
        return found

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """See `Driver`: it holds anything."""
        self.pinned.append(count * dtype.itemsize)
        return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See `Driver`: late."""
        self.copied.append(source.nbytes)
        with self.lock:
            self.here.waiting.append(lambda: into.detach().copy_(source))

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Driver`."""
        self.uploaded.append(tensor.nbytes)
        return tensor.clone()

    def stream(self) -> Stream:
        """See `Driver`."""
        return Stream(f"stream {next(self._numbers)}")

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """See `Driver`."""
        before = self.here
        self._streams.stream = stream
        try:
            yield
        finally:
            self._streams.stream = before

    def record(self) -> FakeMark:
        """See `Driver`."""
        with self.lock:
            return FakeMark(self, self.here, self.here.end)

    def hold(self, tensor: Tensor) -> None:
        """See `Driver`."""
        self.held.append((self.here.name, tensor.nbytes))


def _in_host_memory(*_: object, **__: object) -> object:
    raise AssertionError("numpy was given what is on a device")


def play_device(patch: pytest.MonkeyPatch) -> FakeDriver:
    """Take the CPU for a device with streams, that numpy does not reach."""
    driver = FakeDriver()
    patch.setitem(staging._KNOWN, CPU, staging.DeviceStaging(driver))
    patch.setattr(tensor_ops, "numpy_reaches", lambda tensor: False)
    for name in ("strongest", "pack", "unpack"):
        patch.setattr(sparse, name, _in_host_memory)
    return driver
