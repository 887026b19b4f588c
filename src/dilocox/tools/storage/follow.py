"""Publishes a run once, or beside the run until it has ended.

A storage that fails never touches the run. Its first failure is said once, and so is its return.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dilocox.errors import RecordError
from dilocox.record.bundles.place import DeniedError
from dilocox.record.writer.one_writer import held
from dilocox.tools.storage.publisher import Publisher
from dilocox.utils.backoff import backoff_delays
from dilocox.utils.plain_text import plain

PATIENCE = 20.0
"""Seconds for which a failing call to a storage is repeated."""
LOOK_EVERY = 5.0
"""Seconds between two looks at a run in progress."""
_FIRST, _MOST = 5.0, 120.0
"""Seconds of the first and of the longest pause after a failure."""
ALONE = 12
"""Looks in succession without a coordinator after which a line says so."""
LOCK = "publish.lock"


def publish_once(publisher: Publisher) -> None:
    """Publish what is complete. Raises `DilocoxError` like `Publisher.publish`."""
    with _only_one(publisher):
        publisher.publish()


def publish_to_the_end(
    publisher: Publisher,
    tell: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Publish a run until it has ended and everything is published.

    Args:
        publisher: Publishes to one place.
        tell: Called with one line when publishing begins to fail, when it works again, and when no
            coordinator runs any more.
        sleep: Waits for a number of seconds.

    Raises:
        DilocoxError: Files of the run cannot be published, whatever the storage does, or the place
            refuses them for good.
    """
    pauses, failed, told, alone = backoff_delays(_FIRST, _MOST), 0, False, 0
    with _only_one(publisher):
        while not publisher.ended:
            try:
                publisher.publish(later=True)
            except (RecordError, OSError) as error:
                # A place that has taken a bundle may refuse access for a time only.
                denied = isinstance(error, DeniedError) and not publisher.bundles
                if denied or getattr(error, "permanent", False):
                    raise
                failed += 1
                # A payload may reach the disk a moment after the statement that names it.
                if failed == 2:
                    told = True
                    tell(f"dilocox: not published: {plain(str(error))}; trying again")
                sleep(next(pauses) if failed > 1 else LOOK_EVERY)
                continue
            if told:
                tell("dilocox: publishing goes on")
            pauses, failed, told = backoff_delays(_FIRST, _MOST), 0, False
            if not publisher.ended:
                alone = 0 if publisher.source.coordinated else alone + 1
                if alone == ALONE:
                    tell(
                        f"dilocox: no coordinator runs on {publisher.source.folder}, and the run "
                        "has not ended; waiting until it is resumed (Ctrl-C ends this command)"
                    )
                sleep(LOOK_EVERY)


@contextmanager
def _only_one(publisher: Publisher) -> Iterator[None]:
    folder = publisher.source.folder
    with held(folder / "coordinator", name=LOCK) as own:
        if not own:
            raise RecordError(
                f"{folder}: another command is publishing this run; wait for it, or stop it"
            )
        yield
