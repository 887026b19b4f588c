"""One rank's line to the coordinator: beats beside the training, and what they bring back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dilocox.coordinator.protocol.messages import BeatReply
from dilocox.errors import DilocoxError, RunEndedError, RunStoppedError, TrainingError

log = logging.getLogger(__name__)


class Beats(Protocol):
    """The calls of `CoordinatorClient` that this needs."""

    def beat(
        self, tick: int, round_: int, slot: int, slot_seconds: float | None = None
    ) -> BeatReply:
        """Say where this rank is."""

    def building(self) -> BeatReply:
        """Say that this rank is alive, but not there yet."""


class RankControl:
    """Beats from a thread of its own and holds the newest reply.

    It beats only while the training loop makes progress (`touch`): a rank whose loop hangs must
    not look alive. While the run waits for sites no loop makes progress, and all ranks are alive.

    All waiting methods raise what ended the rank's part in the run: `SiteGone`,
    `CoordinatorUnreachable`, `RunEndedError` when the run has failed, or `RunStoppedError` when the
    run has stopped where it stands. If the training loop has
    not taken notice of it `patience` seconds later, `on_stuck` is called with it in this thread: a
    loop that waits for a neighbour which is gone would hang for as long as the neighbour may.

    An unexpected exception of this thread ends the rank's part in the run, too. Without beats the
    coordinator takes the site for dead, whatever the training loop does.
    """

    def __init__(
        self,
        beats: Beats,
        every: float,
        stall: float,
        patience: float,
        on_stuck: Callable[[DilocoxError], None],
    ) -> None:
        self._beats = beats
        self._every = every
        self._stall = stall
        self._patience = patience
        self._on_stuck = on_stuck
        self._noticed = threading.Event()
        self._loop = 0
        self._position = (0, 0, 0)
        self._slot_seconds: float | None = None
        self._touched = time.monotonic()
        self._reply: BeatReply | None = None
        self._error: DilocoxError | None = None
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._closed = False
        self._building = False
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self, *, building: bool = False) -> None:
        """Begin to beat; returns after the first reply. The calling thread is the training loop.

        With `building` beats say that the model is still being built, until `built`.
        """
        self._loop = threading.get_ident()
        self._building = building
        self._thread.start()
        with self._changed:
            while self._reply is None:
                self._raise_if_over()
                self._changed.wait(1.0)

    def built(self) -> None:
        """This rank can take part from now on."""
        self.touch()
        self._building = False
        self.hurry()

    def close(self) -> None:
        """Stop beating; nothing is called any more."""
        self._closed = True
        self._noticed.set()
        self._hurry.set()
        self._thread.join(timeout=5.0)

    def touch(self) -> None:
        """The training loop makes progress."""
        self._touched = time.monotonic()

    def at(self, tick: int, round_: int, slot: int, slot_seconds: float | None) -> None:
        """Slots finished so far, and how long one takes."""
        self._position = (tick, round_, slot)
        self._slot_seconds = slot_seconds
        self.touch()

    @property
    def news(self) -> BeatReply:
        """The newest reply."""
        self._raise_if_over()
        assert self._reply is not None
        return self._reply

    def epoch(self) -> int:
        """Id of the newest membership epoch heard of."""
        return self.news.epoch.id

    def hurry(self) -> None:
        """Beat now: what the next reply says is being waited for."""
        self._hurry.set()

    def may_finish(self, tick: int) -> bool:
        """Wait until the slot that ends at `tick` may be finished; False if the run stops before.

        While it may not, the rank beats as fast as it can to hear of a longer lease. It beats early
        where the next beat that is due would find the lease used up: the answer takes a round trip,
        which on a link that is full of payloads can be seconds.
        """
        while True:
            news = self.news
            if news.stop_tick is not None and news.stop_tick < tick:
                return False
            if news.lease >= tick:
                if news.stop_tick is None and self._runs_out(news.lease - tick):
                    self._hurry.set()
                return True
            with self._changed:
                self._hurry.set()
                self._changed.wait(0.05)
            self.touch()

    def _runs_out(self, slots: int) -> bool:
        """A lease of so many more slots is over before a beat that is due has its answer."""
        each = self._slot_seconds
        return each is not None and slots * each < self._every

    def wait_while_role(self, role: str) -> None:
        """Wait until this rank's site no longer has `role`, which is asked once a second."""
        with self._changed:
            while self.news.role == role:
                # A reply wakes this wait too: only a second without one asks for the next.
                if not self._changed.wait(1.0):
                    self._hurry.set()
                self.touch()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            if threading.get_ident() == self._loop:
                self._noticed.set()
            raise self._error

    def _run(self) -> None:
        try:
            self._beat_on()
        except Exception as error:
            if self._closed:  # nobody needs another beat
                return
            log.exception("this rank's beats to the coordinator have ended")
            failed = TrainingError(f"beats to the coordinator: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._end(failed)

    def _beat_on(self) -> None:
        while not self._closed:
            silent = time.monotonic() - self._touched
            if silent < self._stall:
                try:
                    if self._building:
                        reply = self._beats.building()
                    else:
                        reply = self._beats.beat(*self._position, self._slot_seconds)
                except DilocoxError as error:
                    self._end(error)
                    return
                if reply.waits_for_sites:
                    # One rank of a site hears of it from its exchange; others wait for that rank.
                    self.touch()
                with self._changed:
                    self._reply = reply
                    self._changed.notify_all()
                if reply.phase == "failed":
                    self._end(RunEndedError(f"the run has failed: {reply.reason}"))
                    return
                # An active site of a run that stops at a slot end writes its checkpoint there.
                here = reply.role != "active" or reply.stop_tick is None
                if reply.phase == "stopped" and here:
                    self._end(RunStoppedError(f"the run is stopped: {reply.reason}"))
                    return
                if reply.role != "active" and reply.phase == "finished":
                    self._end(RunEndedError("the run is finished: this site never entered"))
                    return
            else:
                log.error("no progress for %.0f s: this rank no longer counts as alive", silent)
            self._hurry.wait(self._every)
            self._hurry.clear()

    def _end(self, error: DilocoxError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        if not self._noticed.wait(self._patience):
            self._on_stuck(error)
