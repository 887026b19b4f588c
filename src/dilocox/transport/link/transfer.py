"""The transfer of one message to or from a site."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from dilocox.errors import ExchangeError
from dilocox.utils import tracing

STEP_BYTES = 4 << 20
"""Bytes of one step of a transfer; each step must end within the `silence` limit."""
_LOOK = 0.5
"""Seconds between two checks whether the group has been cancelled."""


class Transfer:
    """Sends or receives one contiguous uint8 CPU tensor. Thread-safe.

    A send has ended when the kernel has its last byte. The tensor must not change even after that:
    the link sends bytes again that were lost with a broken connection. A transfer fails when its
    first byte takes more than `silence` seconds, or when any further `STEP_BYTES` do.
    """

    def __init__(
        self,
        site: str,
        tensor: torch.Tensor,
        what: Literal["send", "receive"],
        silence: float,
        group: str = "",
        cancelled: Callable[[], None] = lambda: None,
        withdraw: Callable[[Transfer], None] = lambda _: None,
    ) -> None:
        """Create a transfer; a `Link` moves its bytes.

        Args:
            site: The peer's site.
            tensor: Bytes to send, or space to receive into.
            what: Direction.
            silence: Seconds without movement after which the transfer fails.
            group: Name of the group, for the timeline.
            cancelled: Raises an exception once the group is no longer needed.
            withdraw: Is called with this transfer if it is cancelled, and tells the link.
        """
        self.site = site
        self.view: memoryview = tensor.numpy().data
        self.size = tensor.numel()
        """Bytes."""
        self.offset = 0
        """Bytes that have arrived, or that have been handed to the kernel."""
        self.sends = what == "send"
        self.moves = False
        """True once the first byte has moved or has been announced by the peer."""
        self._what = what
        self._silence = silence
        self._cancelled = cancelled
        self._withdraw = withdraw
        self._begun = threading.Event()
        self._over = threading.Event()
        self._failure: str | None = None
        self._moved = time.monotonic()
        self.posted = self.began = self.ended = time.time()
        """Times of creation, of the first byte and of the end, by `time.time`, seconds; final once
        the transfer has ended."""
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
        """Wait up to `seconds` for the end; return True if all bytes have moved.

        Raises `ExchangeError` if the link broke or was silent too long, and the exception of
        `cancelled`.
        """
        end = time.monotonic() + seconds
        while not self._over.wait(max(0.0, min(_LOOK, self._silence, end - time.monotonic()))):
            if time.monotonic() - self._moved > self._silence:
                self.fail(f"nothing has moved for {self._silence:g} s")
                self._withdraw(self)
                break
            self._cancelled()
            if time.monotonic() >= end:
                return False
        if self._failure is not None:
            raise ExchangeError(f"link to {self.site} broke: {self._failure}")
        return True

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the end, whether the transfer succeeds or fails."""
        self._over.wait(seconds)

    def give_up(self) -> None:
        """Cancel the transfer: no further bytes of it travel."""
        self._withdraw(self)

    def begin(self) -> None:
        """Record that the first bytes are on their way. Later calls have no effect.

        The bytes themselves become visible later: TLS decrypts a record of 16 KiB only when the
        whole record is there.
        """
        if not self._begun.is_set():
            self._moved = time.monotonic()
            self.began, self.moves = time.time(), True
            self._begun.set()

    def advance(self, count: int) -> None:
        """Record that `count` more bytes have moved."""
        self.begin()
        before, self.offset = self.offset, self.offset + count
        # Only a whole step counts as movement, so that a peer that sends single bytes from time to
        # time cannot keep this rank waiting for ever.
        if before // STEP_BYTES < self.offset // STEP_BYTES:
            self._moved = time.monotonic()
        if self.whole:
            self.finish()

    def finish(self) -> None:
        """End the transfer: all bytes have moved."""
        self._end(None)

    def fail(self, reason: str) -> None:
        """End the transfer with an error. Has no effect once the transfer has ended."""
        self._end(reason)

    def _end(self, failure: str | None) -> None:
        if not self._over.is_set():
            self._failure = failure
            self.ended = time.time()
            self._begun.set()
            self._over.set()

    def _show(self, group: str) -> None:
        """Record the transfer's rows of the timeline until it ends."""
        with tracing.span(self._what, site=self.site, bytes=self.size, group=group):
            with tracing.span("wait for peer", bytes=0):
                self._begun.wait()
            with tracing.span("travel", bytes=self.size):
                self._over.wait()
