"""Publishes checkpoints of a run's log with a command of the operator (`record.anchor`).

The command gets a signed checkpoint on its standard input. It may, for example, write the
checkpoint to a blockchain, get a time stamp for it, or mail it. The run never waits for the
command. Of checkpoints that arrive while the command runs only the newest is kept, because each
checkpoint covers all earlier ones.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


class CheckpointPublisher:
    """Runs the command in a background thread, one call at a time."""

    def __init__(self, command: Sequence[str], patience: float) -> None:
        """`command`: program and arguments. `patience`: seconds that one call may take."""
        self._command, self._patience = tuple(command), patience
        self._taken = ""
        self._newest: str | None = None
        self._trouble: str | None = None
        self._failing = False
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "anchor")

    def take(self, checkpoint: str) -> None:
        """Queue a checkpoint, a signed note; it replaces a checkpoint that still waits.

        A checkpoint equal to the last one is ignored.
        """
        if checkpoint == self._taken:
            return
        with self._lock:
            self._taken = self._newest = checkpoint
        self._beside.submit(self._anchor_newest)

    def trouble(self) -> str | None:
        """Return one line about a failed call since the last `trouble`; None if there is none.

        Only the first of consecutive failures is reported.
        """
        with self._lock:
            trouble, self._trouble = self._trouble, None
        return trouble

    def close(self) -> None:
        """Publish the waiting checkpoint and wait: at most two calls, one of them running."""
        self._beside.shutdown()

    def _anchor_newest(self) -> None:
        with self._lock:
            checkpoint, self._newest = self._newest, None
        if checkpoint is None:
            return  # an earlier call has published a newer checkpoint already
        problem = self._called(checkpoint)
        with self._lock:
            if problem is not None and not self._failing:
                self._trouble = f"record.anchor: {self._command[0]} {problem}"
            self._failing = problem is not None

    def _called(self, checkpoint: str) -> str | None:
        """Run the command once. Returns the reason of a failure, or None."""
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
