"""Heartbeats of one rank, in a thread beside training, and the coordinator's replies to them."""

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
    """The calls of `CoordinatorClient` that `RankControl` needs."""

    def beat(
        self, tick: int, round_: int, slot: int, slot_seconds: float | None = None
    ) -> BeatReply:
        """See `CoordinatorClient.beat`."""

    def building(self) -> BeatReply:
        """See `CoordinatorClient.building`."""


class RankControl:
    """Sends heartbeats from its own thread and holds the newest reply.

    Beats are sent only while the training loop makes progress (`touch`), because a rank whose loop
    hangs must not look alive. While the run waits for sites, all ranks count as making progress.

    Waiting methods raise the error that ended the rank's part in the run: `SiteGoneError`,
    `CoordinatorUnreachableError`, `RunEndedError` if the run has failed, or `RunStoppedError` if it
    has stopped at once. If the training loop has not seen the error after `patience` seconds,
    `on_stuck` is called with it in the heartbeat thread. Otherwise a loop that waits for a lost
    neighbour would hang until its own limit.

    An unexpected exception in the heartbeat thread ends the rank's part in the run, too: without
    beats the coordinator counts the site as lost.
    """

    def __init__(
        self,
        beats: Beats,
        every: float,
        stall: float,
        patience: float,
        on_stuck: Callable[[DilocoxError], None],
    ) -> None:
        """Create the control of a rank; `start` begins the beats.

        Args:
            beats: The client that sends beats.
            every: Seconds between two beats.
            stall: Seconds without progress after which no more beats are sent.
            patience: Seconds that the training loop has to see an error.
            on_stuck: Called with the error if the training loop has not seen it by then.
        """
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
        """Begin to send beats, and return after the first reply.

        The calling thread is the training loop. With `building` the beats say that the model is
        still being built, until `built` is called.
        """
        self._loop = threading.get_ident()
        self._building = building
        self._thread.start()
        with self._changed:
            while self._reply is None:
                self._raise_if_over()
                self._changed.wait(1.0)

    def built(self) -> None:
        """Note that the model is built, so this rank can take part."""
        self.touch()
        self._building = False
        self.hurry()

    def close(self) -> None:
        """Stop the beats. `on_stuck` is not called any more."""
        self._closed = True
        self._noticed.set()
        self._hurry.set()
        self._thread.join(timeout=5.0)

    def touch(self) -> None:
        """Note that the training loop makes progress."""
        self._touched = time.monotonic()

    def at(self, tick: int, round_: int, slot: int, slot_seconds: float | None) -> None:
        """Note the position: slots finished since the start, round, slot, and seconds per slot."""
        self._position = (tick, round_, slot)
        self._slot_seconds = slot_seconds
        self.touch()

    @property
    def news(self) -> BeatReply:
        """The newest reply. Raises the error that ended the rank's part in the run, if any."""
        self._raise_if_over()
        assert self._reply is not None
        return self._reply

    def epoch(self) -> int:
        """Return the id of the newest known membership epoch."""
        return self.news.epoch.id

    def hurry(self) -> None:
        """Send the next beat now, because a caller waits for its reply."""
        self._hurry.set()

    def may_finish(self, tick: int) -> bool:
        """Wait until the lease allows to finish the slot that ends at `tick`.

        Returns False if the run stops before that slot. While the lease is too short, beats are
        sent as fast as possible. A beat is also sent early if the lease would be used up before the
        next one, because a round trip on a link full of payloads can take seconds.
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
        """Return whether `slots` more slots take less time than the interval between two beats."""
        each = self._slot_seconds
        return each is not None and slots * each < self._every

    def wait_while_role(self, role: str) -> None:
        """Wait until this rank's site no longer has `role`; a beat goes out every second."""
        with self._changed:
            while self.news.role == role:
                # Replies wake this wait, so a beat is requested only after a second without one.
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
            if self._closed:  # No further beat is needed.
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
                    # The site's exchanging rank hears of this wait by its exchange. The other ranks
                    # wait for that rank, so their loops make no progress.
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
