"""Takes checkpoints of a run's log to where others can see them, with a command of the operator's.

The command gets a signed checkpoint on its standard input. Whether it puts it on a chain, stamps it
with a time or mails it is its own affair: a run never waits for it. Of checkpoints that come while
it works only the newest is kept, since each covers all that were before it.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


class CheckpointPublisher:
    """Runs the command beside everything else, one call at a time."""

    def __init__(self, command: Sequence[str], patience: float) -> None:
        """`command`: word by word. `patience`: seconds that one call may take."""
        self._command, self._patience = tuple(command), patience
        self._taken = ""
        self._newest: str | None = None
        self._trouble: str | None = None
        self._failing = False
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "anchor")

    def take(self, checkpoint: str) -> None:
        """Anchor this one as soon as the one under way is done, unless it was taken last.

        `checkpoint`: a signed note.
        """
        if checkpoint == self._taken:
            return
        with self._lock:
            self._taken = self._newest = checkpoint
        self._beside.submit(self._anchor_newest)

    def trouble(self) -> str | None:
        """What has gone wrong since this was asked last, if calls before it had gone well."""
        with self._lock:
            trouble, self._trouble = self._trouble, None
        return trouble

    def close(self) -> None:
        """Anchor what is left, and wait for it: two calls at most, with the one under way."""
        self._beside.shutdown()

    def _anchor_newest(self) -> None:
        with self._lock:
            checkpoint, self._newest = self._newest, None
        if checkpoint is None:
            return  # a call before this one has taken it
        problem = self._called(checkpoint)
        with self._lock:
            if problem is not None and not self._failing:
                self._trouble = f"record.anchor: {self._command[0]} {problem}"
            self._failing = problem is not None

    def _called(self, checkpoint: str) -> str | None:
        """What went wrong, or none."""
        try:
            done = subprocess.run(  # noqa: S603 - the operator's own command
                self._command,
                input=checkpoint.encode(),
                capture_output=True,
                timeout=self._patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {self._patience:g} s"
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        if done.returncode == 0:
            return None
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"ended with {done.returncode}" + (f" ({said[-1][:200]})" if said else "")
