"""Calls beside the training: their order, their results, and what becomes of a failed one."""

from __future__ import annotations

import threading

import pytest

from dilocox.coordinator.client.errors import CoordinatorUnreachableError
from dilocox.utils.background import Errands

pytestmark = pytest.mark.waits


def test_calls_run_in_order_beside_the_caller() -> None:
    errands, go, seen = Errands(), threading.Event(), []

    def first() -> str:
        assert go.wait(10)
        seen.append((1, threading.current_thread().name))
        return "one"

    one = errands.do(first)
    two = errands.do(lambda: seen.append((2, threading.current_thread().name)))
    assert not one.done()
    assert not two.done()
    go.set()
    errands.wait()
    assert seen == [(1, "errands"), (2, "errands")]
    assert one.result() == "one"
    assert two.done()


def test_after_a_failure_nothing_is_run_and_everybody_hears_of_it() -> None:
    errands, ran = Errands(), []

    def fail() -> None:
        raise CoordinatorUnreachableError("coordinator: no answer")

    failed = errands.do(fail)
    later = errands.do(lambda: ran.append(1))
    for future in (failed, later):
        with pytest.raises(CoordinatorUnreachableError, match="no answer"):
            future.result(10)
    with pytest.raises(CoordinatorUnreachableError):
        errands.wait()
    with pytest.raises(CoordinatorUnreachableError):
        errands.do(lambda: ran.append(2)).result(10)
    assert ran == []


def test_a_process_with_nothing_to_do_has_no_thread_more() -> None:
    before = threading.active_count()
    errands = Errands()
    errands.wait()
    assert threading.active_count() == before
