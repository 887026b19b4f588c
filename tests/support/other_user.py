"""Calls by a user who may not do everything, even if root runs the tests."""

from __future__ import annotations

import os
from collections.abc import Callable

NOBODY = 65534


def error_of_nobody(call: Callable[[], object]) -> str:
    """`Type: text` of the error that `call` raises without root's rights; "" without an error.

    Root makes the call in a forked process, as another user. So what `call` imports must be
    imported before.
    """
    if os.geteuid() != 0:
        return _error_of(call)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, _error_of(call).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
