"""One message on its way to or from a site."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from dilocox.errors import ExchangeError
from dilocox.utils import tracing

STEP_BYTES = 4 << 20
"""Bytes that may take as long as a link may be silent."""
_LOOK = 0.5
"""Seconds between two looks whether the group is still wanted."""


class Transfer:
    """A contiguous uint8 CPU tensor that travels between this rank and `site`. Thread-safe.

    A send has ended when the kernel has its last byte. The tensor must stay as it is after that:
    the link sends bytes again that a broken connection has lost. A transfer fails when its first
    byte, or `STEP_BYTES` after that, takes more than `silence` seconds, however large
    the tensor is.
    """

    def __init__(
        self,
        site: str,
        tensor: torch.Tensor,
        what: Literal["send", "receive"],
        silence: float,
        group: str = "",
        cancelled: Callable[[], None] = lambda: None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        """`cancelled` raises once the group is not wanted any more; `withdraw` tells the link that
        this transfer is given up."""
        self.site = site
        self.view: memoryview = tensor.numpy().data
        self.size = tensor.numel()
        """Bytes."""
        self.offset = 0
        """Bytes that have arrived, or that have been handed to the network."""
        self.sends = what == "send"
        self.moves = False
        """The peer has begun: its first byte has moved, or has been announced."""
        self._what = what
        self._silence = silence
        self._cancelled = cancelled
        self._withdraw = withdraw
        self._begun = threading.Event()
        self._over = threading.Event()
        self._failure: str | None = None
        self._moved = time.monotonic()
        self.posted = self.began = self.ended = time.time()
        """When it was asked for, when it began, and when all bytes had moved, by the machine's
        clock; once ended."""
        if tracing.recording_now():
            row = f"{what} {'to' if what == 'send' else 'from'} {site}"
            threading.Thread(target=self._show, args=(group,), name=row, daemon=True).start()
        if not self.size:
            self.finish()

    @property
    def whole(self) -> bool:
        """True when all bytes have moved."""
        return self.offset == self.size

    def poll(self, seconds: float = 0.0) -> bool:
        """True once it has ended well, waiting up to `seconds`.

        Raises `ExchangeError` if the link broke, and what `cancelled` raises.
        """
        end = time.monotonic() + seconds
        while not self._over.wait(max(0.0, min(_LOOK, self._silence, end - time.monotonic()))):
            if time.monotonic() - self._moved > self._silence:
                self.fail(f"nothing has moved for {self._silence:g} s")
                self._withdraw()
                break
            self._cancelled()
            if time.monotonic() >= end:
                return False
        if self._failure is not None:
            raise ExchangeError(f"link to {self.site} broke: {self._failure}")
        return True

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for its end, good or bad."""
        self._over.wait(seconds)

    def give_up(self) -> None:
        """Nobody waits for it any more: no further piece of it travels."""
        self._withdraw()

    def begin(self) -> None:
        """The first bytes are on their way; without effect from the second time on.

        The receiver sees them later: TLS opens a record of 16 KiB when all of it is there.
        """
        if not self._begun.is_set():
            self._moved = time.monotonic()
            self.began, self.moves = time.time(), True
            self._begun.set()

    def advance(self, count: int) -> None:
        """`count` more bytes have moved."""
        self.begin()
        before, self.offset = self.offset, self.offset + count
        # Who sends a byte now and then does not keep others waiting for ever.
        if before // STEP_BYTES < self.offset // STEP_BYTES:
            self._moved = time.monotonic()
        if self.whole:
            self.finish()

    def finish(self) -> None:
        """All bytes have moved."""
        self._end(None)

    def fail(self, reason: str) -> None:
        """Nothing of it moves any more; without effect once it has ended."""
        self._end(reason)

    def _end(self, failure: str | None) -> None:
        if not self._over.is_set():
            self._failure = failure
            self.ended = time.time()
            self._begun.set()
            self._over.set()

    def _show(self, group: str) -> None:
        """The rows of the timeline."""
        with tracing.span(self._what, site=self.site, bytes=self.size, group=group):
            with tracing.span("wait for peer", bytes=0):
                self._begun.wait()
            with tracing.span("travel", bytes=self.size):
                self._over.wait()
