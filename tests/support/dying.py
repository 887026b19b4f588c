"""How a test's process dies, or stops, at one place in the code."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, NoReturn


def die(*_: Any, number: int = signal.SIGKILL, **__: Any) -> NoReturn:
    """Send this process `number`, SIGKILL or SIGSTOP, and go no further.

    Another thread may take the signal a moment later: what follows in this thread must not happen.
    """
    os.kill(os.getpid(), number)
    threading.Event().wait()
    raise AssertionError("unreachable")
