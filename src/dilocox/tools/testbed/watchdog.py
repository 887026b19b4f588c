"""A process that takes away what a lab made when the lab's own process ends, by whatever way.

python -m dilocox.tools.testbed.watchdog OWNER: waits for process OWNER to end and removes all that
it made. A lab that ends well removes everything itself; then there is nothing left to do here.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress

from dilocox.tools.testbed import cleanup


def watch_over_this_process() -> subprocess.Popen[bytes]:
    """Start a guard for the process that calls this; what a terminal sends does not reach it."""
    return subprocess.Popen(  # noqa: S603 - this package's own module
        [sys.executable, "-m", "dilocox.tools.testbed.watchdog", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """As the module says."""
    owner = int(sys.argv[1])
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    cleanup.remove_of(owner)


if __name__ == "__main__":
    main()
