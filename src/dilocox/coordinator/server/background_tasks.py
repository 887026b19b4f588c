"""Tasks in the background of a coordinator: what one raises is said, and the task goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dilocox.errors import TrainingError

_log = logging.getLogger(__name__)


async def repeat(call: Callable[[], None], seconds: float, what: str) -> None:
    """`call()` every so many seconds, for ever. What it raises is logged in one line, once as long
    as it stays the same; then `call` is tried again. `what` names the task in that line."""
    trouble = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            call()
            before, trouble = trouble, ""
            if before:
                _log.warning("coordinator: %s goes on", what)
        except Exception as error:  # also what nobody has thought of: a dead task is seen by nobody
            known = isinstance(error, TrainingError)
            text = str(error) if known else f"internal error in {what}: {error!r}; tried again"
            if text != trouble:
                _log.error("%s", text)
                _log.debug("%s", what, exc_info=error)
            trouble = text


def say_if_it_dies(task: asyncio.Task[None], what: str) -> None:
    """Log in one line what ends `task`, unless it was cancelled."""

    def ended(done: asyncio.Task[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _log.error("coordinator: internal error in %s: %r", what, error)
            _log.debug("%s", what, exc_info=error)

    task.add_done_callback(ended)
