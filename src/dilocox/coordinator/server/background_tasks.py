"""Background tasks of a coordinator: their errors are logged, and a repeated task continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dilocox.errors import TrainingError

_log = logging.getLogger(__name__)


async def repeat(call: Callable[[], None], seconds: float, what: str) -> None:
    """Call `call` every `seconds` forever, also after errors.

    An error is logged in one line, and not again while it stays the same. `what` names the task in
    this line.
    """
    trouble = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            call()
            before, trouble = trouble, ""
            if before:
                _log.warning("coordinator: %s goes on", what)
        except Exception as error:  # Any error: a task that ended would go unnoticed.
            known = isinstance(error, TrainingError)
            text = str(error) if known else f"internal error in {what}: {error!r}; tried again"
            if text != trouble:
                _log.error("%s", text)
                _log.debug("%s", what, exc_info=error)
            trouble = text


def say_if_it_dies(task: asyncio.Task[None], what: str) -> None:
    """Log the error that ends `task` in one line, unless the task was cancelled."""

    def ended(done: asyncio.Task[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _log.error("coordinator: internal error in %s: %r", what, error)
            _log.debug("%s", what, exc_info=error)

    task.add_done_callback(ended)
