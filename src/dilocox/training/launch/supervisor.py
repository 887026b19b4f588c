"""Keeps one site in its run: starts it again after a crash, for as long as the run lasts."""

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
"""So many incarnations in a row that never took part in a round, and the site gives up."""


@dataclass(frozen=True)
class Ended:
    """How one incarnation of a site has ended."""

    code: int
    """Exit code: 0 done, 130 asked to go, 1 failed."""
    reason: str = ""
    permanent: bool = False
    """Another incarnation would end the same way."""
    took_part: bool = True
    """It contributed to the run before it ended."""


class Asked(Requests):
    """Whether someone has asked this process to go, and how often."""

    def __init__(
        self, second_interrupts: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(now)
        self.signal = 0
        self._second_interrupts = second_interrupts

    def __call__(self, number: int, _frame: object) -> None:
        """A signal's handler. Raises `KeyboardInterrupt` at the second request, if told to."""
        if not self.heard():
            return
        self.signal = number
        if self._second_interrupts and self.times > 1:
            raise KeyboardInterrupt


@contextlib.contextmanager
def listening(second_interrupts: bool = False, asked: Asked | None = None) -> Iterator[Asked]:
    """Count SIGTERM and SIGINT instead of ending by them.

    A terminal's Ctrl-C reaches every process of a run. Where the parent decides what it means it is
    ignored: the site must not leave while the run stops with a checkpoint. A handler of the
    caller's own stays in place, and outside the main thread nothing is heard.
    `second_interrupts`: the second request raises `KeyboardInterrupt`. `asked`: what hears the
    signals, if not a new one.
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
    """Call `start`, which runs one incarnation of `site`, until another would be of no use.

    What goes wrong at the first start is raised: a mistyped name or address has to be seen at
    once. Later the site tries again with growing pauses, and gives up when it is refused, when
    `FRUITLESS` incarnations in a row took part in nothing, or when the coordinator could not be
    joined for `timeouts.rejoin` seconds. `say` gets a line per failure. `sleep` waits and
    returns whether it was asked to go.
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
                f"site {site}: failed {FRUITLESS} times in a row before it took part in the run, "
                f"the last time so: {ended.reason}; mend that and start it again",
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
                        f"site {site}: gave up after {timeouts.rejoin:g} s ({error}); run the join "
                        "line again when the run is there",
                        permanent=True,
                    )
                say(str(error))
            except JoinError:
                raise
            except DilocoxError as error:
                # What the first start got past may be in order again by the next.
                ended = Ended(1, str(error), took_part=False)
                break


def _sleep(seconds: float) -> bool:
    """Wait, but for someone who asks this process to go: whether that was so."""
    end = time.monotonic() + seconds
    with listening() as asked:
        while not asked.times and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return asked.times > 0


def print_error(line: str) -> None:
    """A line for the person at the terminal, or in its log."""
    print(f"dilocox: {plain_lines(line)}", file=sys.stderr, flush=True)
