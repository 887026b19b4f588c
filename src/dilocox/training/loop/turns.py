"""The user's loop and the trainer take turns, each in a thread of its own.

The trainer's thread decides when an inner step is due, and changes the parameters between steps.
The user's thread computes the step. Exactly one of the two threads runs at a time, so neither needs
a lock for the model.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dilocox.errors import DilocoxError
from dilocox.inner.step_result import ReportedStep

LOOK = 0.2
"""Seconds between two looks of the waiting trainer at the state of the run."""


class LoopLeftError(DilocoxError):
    """The user's loop has ended before the run.

    `failed`: whether an error of the user's code ended the loop.
    """

    def __init__(self, reason: str, *, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


@dataclass(frozen=True)
class StepWork:
    """One inner step that is due."""

    step: int
    """Number of the inner step in the run, from 0."""
    learning_rate: float
    """Learning rate of the run file's schedule for this step."""
    last: bool
    """Whether the step is the site's last one of its round."""


@dataclass(frozen=True)
class _Call:
    """A computation with the model that the trainer asks for, such as an evaluation."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class _End:
    """The trainer has ended, because of `error` or without one."""

    error: BaseException | None


class Turns:
    """Passes inner steps from the trainer's thread to the user's thread, and results back."""

    def __init__(self, device: torch.device, look: Callable[[], object]) -> None:
        """Begin with the trainer's turn.

        Args:
            device: device of the model.
            look: called while the trainer waits; raises an error that ends this site's part.
        """
        self._device, self._look = device, look
        self._to_loop: queue.SimpleQueue[tuple[Any, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._to_trainer: queue.SimpleQueue[tuple[Any, torch.cuda.Event | None]]
        self._to_trainer = queue.SimpleQueue()
        self._left: LoopLeftError | None = None

    def step(self, work: StepWork) -> ReportedStep:
        """Have the user's loop take an inner step. Called by the trainer.

        Raises `LoopLeftError` if the loop has ended, and the error of `look`.
        """
        found = self._ask(work)
        assert isinstance(found, ReportedStep)
        return found

    def call(self, function: Callable[[], Any]) -> Any:
        """Have the user's thread call `function`, and return its result. Called by the trainer.

        Raises the errors of `step`.
        """
        return self._ask(_Call(function))

    def end(self, error: BaseException | None) -> None:
        """Tell the user's loop that no step follows. Called by the trainer, once."""
        self._to_loop.put((_End(error), self._mark()))

    def take(self) -> StepWork | None:
        """Wait for the next inner step; None if no step follows. Called by the user's thread.

        Raises the error that ended the trainer, and errors of the functions that it had called.
        """
        while True:
            item, mark = self._to_loop.get()
            self._after(mark)
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return None
            if isinstance(item, StepWork):
                return item
            self._to_trainer.put((item.function(), self._mark()))

    def done(self, result: ReportedStep) -> None:
        """Give the result of the step that `take` has returned. Called by the user's thread."""
        self._to_trainer.put((result, self._mark()))

    def leave(self, reason: str, *, failed: bool) -> None:
        """End the trainer's wait for the user's loop, now and later, by a `LoopLeftError`."""
        self._left = self._left or LoopLeftError(reason, failed=failed)

    def _ask(self, item: StepWork | _Call) -> Any:
        self._to_loop.put((item, self._mark()))
        while True:
            if self._left is not None:
                raise self._left
            self._look()
            try:
                answer, mark = self._to_trainer.get(timeout=LOOK)
            except queue.Empty:
                continue
            self._after(mark)
            return answer

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event after all that this thread has had a GPU do; None on a CPU."""
        if self._device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _after(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)
