"""Calls beside the training: their order, their results, and what becomes of a failed one."""

from __future__ import annotations

import threading
import weakref

import pytest

from dilocox.coordinator.client.errors import CoordinatorUnreachableError
from dilocox.utils.background import BackgroundQueue

pytestmark = pytest.mark.waits


def test_calls_run_in_order_beside_the_caller() -> None:
    background, go, seen = BackgroundQueue(), threading.Event(), []

    def first() -> str:
        assert go.wait(10)
        seen.append((1, threading.current_thread().name))
        return "one"

    one = background.submit(first)
    two = background.submit(lambda: seen.append((2, threading.current_thread().name)))
    assert not one.done()
    assert not two.done()
    go.set()
    background.wait()
    assert seen == [(1, "background"), (2, "background")]
    assert one.result() == "one"
    assert two.done()


def test_after_a_failure_nothing_is_run_and_everybody_hears_of_it() -> None:
    background, ran = BackgroundQueue(), []

    def fail() -> None:
        raise CoordinatorUnreachableError("coordinator: no answer")

    failed = background.submit(fail)
    later = background.submit(lambda: ran.append(1))
    for future in (failed, later):
        with pytest.raises(CoordinatorUnreachableError, match="no answer"):
            future.result(10)
    with pytest.raises(CoordinatorUnreachableError):
        background.wait()
    with pytest.raises(CoordinatorUnreachableError):
        background.submit(lambda: ran.append(2)).result(10)
    assert ran == []


def test_a_process_with_nothing_to_do_has_no_thread_more() -> None:
    before = threading.active_count()
    background = BackgroundQueue()
    background.wait()
    assert threading.active_count() == before


def test_a_closed_queue_runs_what_it_has_and_its_thread_ends() -> None:
    background, ran = BackgroundQueue(), []
    before = set(threading.enumerate())
    last = background.submit(lambda: ran.append(1))
    (thread,) = set(threading.enumerate()) - before
    background.close()
    thread.join(10)
    assert last.done()
    assert ran == [1]
    assert not thread.is_alive()


def test_a_waiting_thread_keeps_neither_call_nor_result() -> None:
    class Data:
        """Large data that a call reads and returns."""

    background, freed = BackgroundQueue(), threading.Event()
    data = Data()
    weakref.finalize(data, freed.set)
    future = background.submit(lambda data=data: data)
    assert future.result(10) is data
    background.submit(lambda: None).result(10)
    # The queue itself has the future of its newest call.
    last = Data()
    gone = threading.Event()
    weakref.finalize(last, gone.set)
    background.submit(lambda last=last: None).result(10)
    del data, last, future
    assert freed.wait(10)
    assert gone.wait(10)
    background.close()
