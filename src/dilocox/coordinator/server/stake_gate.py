"""Asks whether a joining site has staked, in a process of its own (`settlement.admission`).

The coordinator never waits for a chain. A thread runs a command that looks at the chain. Until the
command has answered, a newcomer is told to ask again. A site that was in the run before with the
same signature is let in at once. So a dead or hanging server of a chain delays newcomers only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.protocol.messages import EnrolRequest
from dilocox.coordinator.server.refusals import Refused

FRESH, SOON = 300.0, 5.0
"""Seconds for which the answer "staked" counts, and any other answer."""
PATIENCE = 60.0
"""Seconds that one look at the chain may take."""


def look_command(folder: Path) -> tuple[str, ...]:
    """Return the command that looks at the chain for the run in `folder`."""
    return (sys.executable, "-m", "dilocox", "chain", "staked", str(folder))


@dataclass(frozen=True)
class _Answer:
    staked: bool | None
    """None: the chain could not be asked."""
    reason: str
    at: float
    """Moment of the answer, seconds of a monotonic clock."""


class StakeGate:
    """Answers about stakes, cached by question."""

    def __init__(
        self,
        command: Sequence[str],
        tell: Callable[[str], None],
        *,
        patience: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a gate; nothing is asked yet.

        Args:
            command: Gets a question, JSON, on its standard input, and prints JSON with `staked` and
                `reason`. It ends with another code than 0 if the chain cannot be asked.
            tell: Called with a line when the chain can no longer be asked. Called by the thread
                that calls `check`.
            patience: Seconds that the command may take.
            now: Monotonic clock, seconds.
        """
        self._command, self._tell, self._patience = tuple(command), tell, patience
        self._now = now
        self._answers: dict[str, _Answer] = {}
        """By question. Only the latest question of a site is kept."""
        self._latest: dict[str, str] = {}
        """Question by site."""
        self._waiting: dict[str, None] = {}
        """Questions without an answer, in their order."""
        self._asking: subprocess.Popen[bytes] | None = None
        self._busy = self._closed = self._failing = False
        self._lock = threading.Lock()

    def check(self, request: EnrolRequest, before: str) -> None:
        """Let a site in, or raise `Refused`.

        Args:
            request: The site's.
            before: Signature with which the site was admitted before; empty if it was not.

        Raises:
            Refused: `join`: the site has no stake, or no signature. `stake`: the chain has not
                answered yet; the site asks again.
        """
        site, proof = request.site, request.stake
        if proof is None or request.record_key is None:
            raise Refused(
                "join",
                f"site {site}: this run admits by stake: stake, and sign the site's key with "
                "dilocox chain enrol",
            )
        question = json.dumps(
            {"site": site, "key": request.record_key, **proof.model_dump()}, sort_keys=True
        )
        found = self._look_up(site, question)
        if found is not None and found.staked is None:
            self._say_once(found.reason)
        elif found is not None:
            self._failing = False
        if found is not None and found.staked is False:
            raise Refused("join", f"site {site}: {found.reason}")
        if (found is not None and found.staked) or before == proof.signature:
            return
        why = "is being looked up on the chain" if found is None else "cannot be looked up now"
        raise Refused("stake", f"site {site}: its stake {why}; the site asks again")

    def close(self) -> None:
        """End a command that runs."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._asking is not None:
                self._asking.kill()

    def _say_once(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            self._tell(
                f"stakes cannot be looked up ({reason}); new sites wait until they can, the others "
                "train on"
            )

    def _look_up(self, site: str, question: str) -> _Answer | None:
        """Return the answer so far; begin to ask if there is none, or if it is old."""
        with self._lock:
            before = self._latest.get(site)
            if before != question:
                self._latest[site] = question
                self._answers.pop(before or "", None)
                self._waiting.pop(before or "", None)
            found = self._answers.get(question)
            age = FRESH if found is not None and found.staked else SOON
            if found is None or self._now() - found.at > age:
                self._waiting.setdefault(question)
                if not self._busy and not self._closed:
                    self._busy = True
                    threading.Thread(target=self._ask_all, name="stakes", daemon=True).start()
                if found is not None and found.staked:
                    found = None  # too old to let a newcomer in
        return found

    def _ask_all(self) -> None:
        while True:
            with self._lock:
                question = next(iter(self._waiting), None)
                if question is None or self._closed:
                    self._busy = False
                    return
            staked, reason = self._ask(question)
            with self._lock:
                self._waiting.pop(question, None)
                if question in self._latest.values():
                    self._answers[question] = _Answer(staked, reason, self._now())

    def _ask(self, question: str) -> tuple[bool | None, str]:
        """Run the command once. Return what it says, or None with the reason of a failure."""
        try:
            with self._lock:
                if self._closed:
                    return None, "the run ends"
                self._asking = subprocess.Popen(  # noqa: S603 - dilocox itself
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )  # fmt: skip
            with self._asking as process:
                try:
                    out, err = process.communicate(question.encode(), timeout=self._patience)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return None, f"no answer for {self._patience:g} s"
            if process.returncode:
                said = err.decode(errors="replace").strip().splitlines()
                return None, said[-1][:300] if said else f"ended with {process.returncode}"
            answer = json.loads(out)
            if type(answer["staked"]) is not bool:
                raise ValueError("staked")
            return answer["staked"], str(answer["reason"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return None, f"{self._command[0]}: {error}"
        finally:
            self._asking = None
