"""Child processes: they end with their parent, and say why they failed."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dilocox.errors import DataError, DilocoxError
from dilocox.utils import processes
from tests.support.dying import die

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux"),
]
Progress = Callable[[str, float], None]


def _wait_for_ever(write_end: int) -> None:
    os.write(write_end, b"x")
    signal.pause()


def _parent(write_end: int, depth: int) -> None:
    if depth:
        processes.start(_parent, write_end, depth - 1, name=f"level-{depth}").join()
    else:
        processes.start(_wait_for_ever, write_end, name="leaf").join()


@pytest.mark.parametrize("depth", [0, 1])
def test_children_die_with_a_killed_parent(depth: int) -> None:
    """At all levels: a pipe's last writer is gone when it reads as ended."""
    read_end, write_end = os.pipe()
    parent = processes.CONTEXT.Process(target=_parent, args=(write_end, depth))
    parent.start()
    os.close(write_end)
    assert os.read(read_end, 1) == b"x"
    os.kill(parent.pid, signal.SIGKILL)
    parent.join(10)
    ready, _, _ = select.select([read_end], [], [], 10)
    assert ready, "a child outlived its killed parent"
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def _ask_for_interrupts(pipe: Connection) -> None:
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    pipe.send((ignored, signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))


def test_children_leave_requests_to_end_to_their_parent() -> None:
    """Ctrl-C and SIGTERM to a whole process group."""
    ours, theirs = processes.CONTEXT.Pipe(duplex=False)
    child = processes.start(_ask_for_interrupts, theirs, name="child")
    assert ours.recv() == (True, True)
    child.join(10)


def _double(value: int, progress: Progress) -> int:
    progress("half", 0.5)
    progress("done", 1.0)
    return 2 * value


def _refuse(progress: Progress) -> None:
    raise DataError("data.source x: no such file; name one")


def _break(progress: Progress) -> None:
    raise RuntimeError("wires crossed")


def _read(path: Path, progress: Progress) -> None:
    path.read_text(encoding="utf-8")


def _vanish(progress: Progress) -> None:
    die()


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[tuple[str, float]]]:
    seen: list[tuple[str, float]] = []
    result = processes.call_in_child(
        function, *arguments, on_progress=lambda step, share: seen.append((step, share))
    )
    return result, seen


def test_a_call_in_a_child_gives_its_result_and_progress() -> None:
    assert _call(_double, 21) == (42, [("half", 0.5), ("done", 1.0)])


def test_the_childs_refusal_is_the_parents() -> None:
    with pytest.raises(DataError, match="no such file; name one"):
        _call(_refuse)


def test_an_unexpected_error_keeps_its_name_and_its_traceback() -> None:
    with pytest.raises(DilocoxError) as caught:
        _call(_break)
    assert str(caught.value) == "_break: RuntimeError: wires crossed"
    assert "in _break" in "".join(caught.value.__notes__)


def test_a_file_that_the_child_cannot_read_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(DilocoxError) as caught:
        _call(_read, tmp_path)
    said = f"{tmp_path}: cannot be used (Is a directory); it is a folder, so name a file"
    assert str(caught.value) == said
    assert "in _read" in "".join(caught.value.__notes__)


def test_a_killed_child_is_named() -> None:
    with pytest.raises(DilocoxError, match=r"_vanish: its process was killed \(signal 9\)"):
        _call(_vanish)


def test_the_child_ends_when_its_parent_gives_up() -> None:
    def interrupted(step: str, share: float) -> None:
        raise KeyboardInterrupt

    # Other tests of the session may have children of their own.
    before = set(processes.CONTEXT.active_children())
    with pytest.raises(KeyboardInterrupt):
        processes.call_in_child(_double, 1, on_progress=interrupted)
    assert set(processes.CONTEXT.active_children()) <= before


def _exit(code: int) -> None:
    sys.exit(code)


def test_how_processes_ended() -> None:
    exited = processes.start(_exit, 3, name="exits")
    sleeper = processes.start(signal.pause, name="sleeps")
    exited.join(10)
    processes.end([exited, sleeper], grace=0.0)
    assert processes.why_ended(exited) == "ended with code 3"
    assert processes.why_ended(sleeper) == "was killed (signal 9)"
