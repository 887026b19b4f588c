"""Parts of the acceptance run that measure nothing: for the tests of its runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.child import Context, Outcome

from dilocox.utils import processes


def quick(context: Context) -> None:
    """Three rows: one that passes, one with figures, one that raises."""
    context.check("passes", lambda: Outcome(True, "as it should be"))
    context.check("figures", lambda: Outcome(None, "", {"speed": 2.0}))
    context.check("raises", _raises)


def hang(context: Context) -> None:
    """One row, and another that never comes."""
    context.check("before", lambda: Outcome(True))
    print("waiting", flush=True)
    time.sleep(600.0)


def crash(context: Context) -> None:
    """No row."""
    raise SystemExit("it has crashed")


def breaks(context: Context) -> None:
    """Three rows: the process ends hard in the second, CUDA becomes unusable in the third."""
    context.check("first", lambda: Outcome(True))
    context.check("second", lambda: os._exit(7))
    context.check("third", _cuda_error)
    context.check("fourth", lambda: Outcome(True, str(os.getpid())))


def stuck(context: Context) -> None:
    """A row that never ends, before another one."""
    context.check("endless", _sleeps)
    context.check("later", lambda: Outcome(True))


def tells(context: Context) -> None:
    """A row that tells the figures that were known before."""
    context.check("second", lambda: Outcome(True, f"first: {context.known['first']}"))


def family(context: Context) -> None:
    """A row that never ends, in a process that has started another one, as parts start runs."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.folder / "pids.part").write_text(f"{os.getpid()} {other.pid}")
    (context.folder / "pids.part").rename(context.folder / "pids")
    context.check("endless", _sleeps)


def hanging_rank(context: Context) -> None:
    """A row that never ends, and a rank that is slow to write where it hangs."""
    processes.start(_slow_to_tell, name="rank")
    context.check("endless", _sleeps)


def _slow_to_tell() -> None:
    """Sleep; write the stacks half a second after the signal to do so."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])
    while signal.SIGABRT not in signal.sigpending():
        time.sleep(0.01)
    time.sleep(0.3)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGABRT])
    time.sleep(600.0)


def _sleeps() -> Outcome:
    time.sleep(600.0)
    return Outcome(True)


def _cuda_error() -> Outcome:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _raises() -> Outcome:
    raise ValueError("a wrong\nvalue")
