"""Relay process that delays every packet of a lab, for kernels without `netem`.

`python -m dilocox.tools.testbed.relay SECONDS DEVICE...` creates a TAP device per name in its
network namespace, and prints `ready`. It returns each frame that the kernel sends to one of the
devices after SECONDS, on the same device. It runs until it is killed; its devices vanish then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST = 2048
"""Bytes of a read buffer; larger than any frame of the lab."""
_TOGETHER = 64
"""Most frames that are read from one device before the next device's turn."""


def open_tap(name: str) -> int:
    """Create the TAP device `name`, and return its non-blocking file descriptor."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def relay(handles: list[int], seconds: float) -> None:
    """Delay all frames of the devices `handles` by `seconds`. Never returns."""
    held: deque[tuple[float, int, bytes]] = deque()
    read, write, now = os.read, os.write, time.monotonic
    while True:
        left = max(0.0, held[0][0] - now()) if held else None
        for handle in select.select(handles, [], [], left)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_TOGETHER):
                    frame = read(handle, _LARGEST)
                    held.append((now() + seconds, handle, frame))
        while held and held[0][0] <= now():
            _, handle, frame = held.popleft()
            # A full queue drops packets, as a router does.
            with contextlib.suppress(BlockingIOError):
                write(handle, frame)


def main() -> None:
    """Run the relay (see the module docstring)."""
    seconds, names = float(sys.argv[1]), sys.argv[2:]
    handles = [open_tap(name) for name in names]
    print("ready", flush=True)
    relay(handles, seconds)


if __name__ == "__main__":
    main()
