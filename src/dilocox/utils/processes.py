"""Child processes that die with their parent, and requests to end a process."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from dilocox.errors import DilocoxError
from dilocox.utils.file_errors import file_problem

# A fork takes milliseconds, while a fresh interpreter needs seconds to import torch. Forking is
# safe because parent processes never compute, so they have no threads and no CUDA context. On
# macOS, system frameworks do not survive a fork.
CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_PR_SET_PDEATHSIG = 1
ONE_REQUEST = 2.0
"""Seconds after a signal in which further signals count as the same request to end. For example,
`make` forwards a signal that the whole process group has already received."""


class Requests:
    """Counts the requests to end this process, where several signals may be one request."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.times = 0
        self._now = now
        self._last = 0.0

    def heard(self) -> bool:
        """Count a signal. Returns False if it belongs to the previous request."""
        moment = self._now()
        if self.times and moment - self._last < ONE_REQUEST:
            return False
        self._last = moment
        self.times += 1
        return True


def start(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start `target(*arguments)` in a child process that dies with this process.

    The child ignores SIGINT and SIGTERM. Ctrl-C in a terminal, and SIGTERM from systemd, Slurm and
    containers, reach every process of a group. The parent alone reacts to them, since it may need
    its children for a checkpoint.

    The child's exit code is the value that `target` passes to `sys.exit`. Raises `DilocoxError` if
    `target` or an argument cannot be pickled on a system without fork.
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
    """Within this context, SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does.

    Batch systems and containers send SIGTERM to end a process. The context does nothing outside the
    main thread, or if the process has its own handler of SIGTERM.
    """
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
        _name_process(multiprocessing.current_process().name)
    die_with(parent)
    target(*arguments)


def die_with(parent: int) -> None:
    """Have this process killed when the thread that started this process ends.

    `parent`: process id of the parent. Without Linux, the end of the parent process counts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _name_process(name: str) -> None:
    """Set the process name that process lists show; Linux keeps 15 characters."""
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name.replace("-stage", ":").replace("-shard", ".")[:15])
    except OSError:
        return  # the name is only a convenience


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def end(processes: Iterable[BaseProcess], grace: float) -> None:
    """Wait up to `grace` seconds for all `processes` to end, then kill the others."""
    processes = list(processes)
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def exit_now(code: int) -> NoReturn:
    """Flush standard output and error, then end this process at once with exit code `code`.

    Use it for a process that has failed. It skips the cleanup of Python and libraries, in which a
    communication library might wait for peers that never come.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def why_ended(process: BaseProcess) -> str:
    """Returns how a process ended, as text for messages."""
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed (signal {-code})"
    return f"ended with code {code}"


def call_in_child(
    function: Callable[..., Any], *arguments: Any, on_progress: Callable[[str, float], None]
) -> Any:
    """Run `function(*arguments, progress)` in a child process and return its result.

    Use it for work that starts threads, so that this process stays able to fork. Calls of
    `progress(step, share)` in the child call `on_progress` here.

    Raises the child's `DilocoxError`. Any other error of the child becomes a `DilocoxError` with
    the traceback in its notes. Raises `DilocoxError` also if the child was killed.
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
        unexpected = f"{function.__name__}: {type(error).__name__}: {error}"
        crash = DilocoxError(file_problem(error) or unexpected)
        crash.add_note(traceback.format_exc())
        pipe.send(("error", crash))
    else:
        pipe.send(("result", result))


def may_live(host: str, process: int) -> bool:
    """Returns whether a process of the machine `host` lives; True if nobody here can know.

    Nobody knows of another machine's process, and of one whose id is not positive.
    """
    return host != socket.gethostname() or process <= 0 or is_alive(process)


def is_alive(process: int) -> bool:
    """Returns whether the process with this id lives on this machine, under any user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
