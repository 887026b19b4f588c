"""Child processes that end with their parent, and one line from each that fails."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from dilocox.errors import DilocoxError

# Forking costs milliseconds where a fresh interpreter imports torch for seconds. It is safe because
# the parents here never compute: they hold no threads and no CUDA context. macOS's frameworks do
# not survive a fork.
CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_PR_SET_PDEATHSIG = 1
ONE_REQUEST = 2.0
"""Seconds in which further signals belong to the same request to end. `make`, for one, passes on a
signal that the whole process group has received."""


class Requests:
    """How often somebody has asked this process to end: signals, counted as requests."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.times = 0
        self._now = now
        self._last = 0.0

    def heard(self) -> bool:
        """A signal has come: whether it is a request of its own."""
        moment = self._now()
        if self.times and moment - self._last < ONE_REQUEST:
            return False
        self._last = moment
        self.times += 1
        return True


def start(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start `target(*arguments)` in a child that dies with this process, ignoring SIGINT, SIGTERM.

    A terminal's Ctrl-C, and the SIGTERM of systemd, Slurm and containers, reach every process of a
    group. The parent decides what they mean: it may need its children for a checkpoint. `target`'s
    exit code is what it passes to `sys.exit`.
    """
    process: BaseProcess = CONTEXT.Process(
        target=_child, args=(target, os.getpid(), arguments), name=name
    )
    try:
        process.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise DilocoxError(
            f"{name}: a process cannot be started with these functions on this system ({error}); "
            "define dataset, loss and callbacks at the top level of a module"
        ) from None
    return process


@contextlib.contextmanager
def term_as_interrupt() -> Iterator[None]:
    """SIGTERM, by which batch systems and containers ask a process to end, is a Ctrl-C in here:
    `KeyboardInterrupt`. It stays what it is outside the main thread, and where it is handled."""
    handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _child(target: Callable[..., None], parent: int, arguments: tuple[Any, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _name_process(multiprocessing.current_process().name)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    target(*arguments)


def _name_process(name: str) -> None:
    """Show `name` in process lists (Linux keeps 15 characters)."""
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name.replace("-stage", ":").replace("-shard", ".")[:15])
    except OSError:
        return  # a name is a convenience


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def end(processes: Iterable[BaseProcess], grace: float) -> None:
    """Wait `grace` seconds for all, then kill the rest."""
    processes = list(processes)
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def exit_now(code: int) -> NoReturn:
    """End this process at once, after what it has written.

    For a process that has failed: neither Python nor a library cleans up, since a communication
    library may wait there for peers that never come.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def why_ended(process: BaseProcess) -> str:
    """How a process ended, for people."""
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed (signal {-code})"
    return f"ended with code {code}"


def call_in_child(
    function: Callable[..., Any], *arguments: Any, on_progress: Callable[[str, float], None]
) -> Any:
    """`function(*arguments, progress)` in a child of its own; its result.

    For work that starts threads: the parent stays fit for forking. Raises the child's
    `DilocoxError`, or `DilocoxError` if it ended with another error (its traceback is in the
    notes) or was killed.
    """
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = start(_answer, theirs, function, arguments, name=function.__name__)
    theirs.close()
    answer: tuple[str, Any] | None = None
    try:
        while True:
            kind, value = ours.recv()
            if kind == "progress":
                on_progress(*value)
            else:
                answer = (kind, value)
                break
    except EOFError:
        process.join()
        raise DilocoxError(
            f"{function.__name__}: its process {why_ended(process)}; is there enough memory?"
        ) from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join(5.0)
    assert answer is not None
    if answer[0] == "error":
        raise answer[1]
    return answer[1]


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments, lambda step, share: pipe.send(("progress", (step, share))))
    except DilocoxError as error:
        pipe.send(("error", error))
    except Exception as error:
        crash = DilocoxError(f"{function.__name__}: {type(error).__name__}: {error}")
        crash.add_note(traceback.format_exc())
        pipe.send(("error", crash))
    else:
        pipe.send(("result", result))


def is_alive(process: int) -> bool:
    """Tell whether a process of this machine lives, by its id; another user's does, too."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
