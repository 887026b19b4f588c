"""Keeps one site in its run: restarts it after a crash, as long as the run lasts."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import DilocoxError, JoinError, RetryLaterError
from dilocox.utils.backoff import backoff_delays
from dilocox.utils.plain_text import plain_lines
from dilocox.utils.processes import Requests

FRUITLESS = 5
"""A site gives up after this number of incarnations in a row that took part in no round."""


@dataclass(frozen=True)
class Ended:
    """How one incarnation of a site has ended."""

    code: int
    """Exit code: 0 finished, 130 asked to leave, 1 failed."""
    reason: str = ""
    permanent: bool = False
    """Whether another incarnation would end in the same way."""
    took_part: bool = True
    """Whether this incarnation contributed to the run before it ended."""


class Asked(Requests):
    """Counts how often a signal has asked this process to end."""

    def __init__(
        self, second_interrupts: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(now)
        self.signal = 0
        self._second_interrupts = second_interrupts

    def __call__(self, number: int, _frame: object) -> None:
        """Handle a signal. Raises `KeyboardInterrupt` at a second request if asked to."""
        if not self.heard():
            return
        self.signal = number
        if self._second_interrupts and self.times > 1:
            raise KeyboardInterrupt


@contextlib.contextmanager
def listening(second_interrupts: bool = False, asked: Asked | None = None) -> Iterator[Asked]:
    """Context in which SIGTERM and SIGINT are counted and do not end the process.

    A terminal's Ctrl-C reaches every process of a run. A process that ignores SIGINT keeps
    ignoring it, because its parent decides: a site must not leave while the run stops with a
    checkpoint. A handler of the caller's own stays in place. Outside the main thread no signal
    is counted.

    `second_interrupts`: raise `KeyboardInterrupt` at the second request. `asked`: the counter;
    None makes a new one.
    """
    asked = asked or Asked(second_interrupts)
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = (signal.SIGTERM, signal.SIGINT)
    old = {n: handler for n in numbers if (handler := signal.getsignal(n)) in usual}
    for number in old:
        signal.signal(number, asked)
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def keep_in_run(
    site: str,
    start: Callable[[], Ended],
    timeouts: Timeouts,
    say: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], bool] | None = None,
) -> Ended:
    """Run incarnations of `site` until the run ends or another incarnation is useless.

    An error of the first start is raised, so that a mistyped name or address is seen at once.
    After that the site retries with growing pauses. It gives up if it is refused, or if
    `FRUITLESS` incarnations in a row took part in no round. It also gives up if the coordinator
    could not be joined for `timeouts.rejoin` seconds.

    Args:
        start: runs one incarnation of the site, and returns how it ended.
        say: gets one line per failure.
        now: clock, in seconds.
        sleep: waits for a number of seconds, and returns whether a signal asked to end.

    Raises:
        JoinError: the coordinator refuses the site.
        DilocoxError: the first start failed.
    """
    ended = start()
    waits = backoff_delays(timeouts.retry, timeouts.retry_most)
    fruitless, joined, sleep = 0, now(), sleep or _sleep
    while True:
        if ended.code != 1 or ended.permanent:
            return ended
        fruitless = 0 if ended.took_part else fruitless + 1
        if ended.took_part:
            waits = backoff_delays(timeouts.retry, timeouts.retry_most)
        if fruitless == FRUITLESS:
            return Ended(
                1,
                f"site {site}: failed {FRUITLESS} times in a row before it took part in the run; "
                f"the last reason: {ended.reason}; remove that cause and start the site again",
                permanent=True,
            )
        say(ended.reason)
        while True:
            pause = next(waits)
            say(f"site {site} joins again in {pause:.1f} s")
            if sleep(pause):
                return Ended(130, "asked to go")
            try:
                ended = start()
                joined = now()
                break
            except RetryLaterError as error:
                if now() - joined > timeouts.rejoin:
                    return Ended(
                        1,
                        f"site {site}: gave up after {timeouts.rejoin:g} s ({error}); run the same "
                        "command again when the coordinator can be reached",
                        permanent=True,
                    )
                say(str(error))
            except JoinError:
                raise
            except DilocoxError as error:
                # The first start did not fail in this way, so a later start may succeed.
                ended = Ended(1, str(error), took_part=False)
                break


def _sleep(seconds: float) -> bool:
    """Wait `seconds`, or until a signal asks this process to end. Returns whether it was asked."""
    end = time.monotonic() + seconds
    with listening() as asked:
        while not asked.times and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return asked.times > 0


def print_error(line: str) -> None:
    """Print a line for the user to standard error."""
    print(f"dilocox: {plain_lines(line)}", file=sys.stderr, flush=True)
