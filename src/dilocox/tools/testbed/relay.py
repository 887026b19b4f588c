"""A process that holds every packet of a lab for a while: delay where the kernel has no `netem`.

python -m dilocox.tools.testbed.relay SECONDS DEVICE...: makes a TAP device per name in the
network namespace it runs in, says `ready`, and gives back each frame that the kernel hands to one
of them after so many seconds, on the same device. It runs until it is killed; its devices go with
it.
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
"""Bytes: more than any frame of the lab has."""
_TOGETHER = 64
"""Frames that are read before others' turn comes."""


def open_tap(name: str) -> int:
    """A TAP device of this name; its file descriptor, which does not block."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def relay(handles: list[int], seconds: float) -> None:
    """Hold frames for `seconds`, for ever."""
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
            # A queue that is full loses packets, as a router's does.
            with contextlib.suppress(BlockingIOError):
                write(handle, frame)


def main() -> None:
    """As the module says."""
    seconds, names = float(sys.argv[1]), sys.argv[2:]
    handles = [open_tap(name) for name in names]
    print("ready", flush=True)
    relay(handles, seconds)


if __name__ == "__main__":
    main()
