"""Watchdog process that removes a lab when the lab's own process ends, even if it was killed.

`python -m dilocox.tools.testbed.watchdog OWNER` waits for process OWNER to end, and removes
everything that it has made. A lab that ends normally removes everything itself before.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dilocox.tools.testbed import cleanup


def watch_over_this_process() -> subprocess.Popen[bytes]:
    """Start a watchdog for the calling process. Signals of the terminal do not reach it."""
    return subprocess.Popen(  # noqa: S603 - this package's own module
        [sys.executable, "-m", "dilocox.tools.testbed.watchdog", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def watched() -> Iterator[None]:
    """Watch over this process meanwhile: what it has made in a lab goes even if it is killed.

    `Lab` does so by itself. This is for the users of a bare `Network`, or of control groups.
    """
    guard = watch_over_this_process()
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def main() -> None:
    """Run the watchdog (see the module docstring)."""
    owner = int(sys.argv[1])
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    cleanup.remove_of(owner)


if __name__ == "__main__":
    main()
