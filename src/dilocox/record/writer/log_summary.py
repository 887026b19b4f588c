"""What the coordinator knows of its log: enough to go on, and no more the longer a run is.

A mark is this knowledge as it was at some statement, with the place of that in the log. A start
reads the newest mark and what follows in the log. The signed checkpoint of the log says whether the
mark fits: a mark that does not, that is damaged or that other code has made is passed over, and the
whole log is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptances, run_of
from dilocox.record.log.recommitments import Courses
from dilocox.record.log.transparency_log import Mark
from dilocox.record.writer.state_rules import Holds
from dilocox.utils.storage import sync_folder
from dilocox.utils.typed_json import decode, encode

log = logging.getLogger(__name__)

REMEMBERED = 4
"""Rounds whose statements are known yet: the event log may lose a decision that the record has,
which then is taken again."""
MARK_EVERY = 10_000
"""Statements from one mark to the next: reading so many takes about a second."""
MARK_FILE = "record-mark"
"""In the coordinator's folder."""
_FOR_EVER = 2**53
_BY_ROUND = (s.COMMITMENT, s.CONTRIBUTION, s.ROUND, s.ANCHOR, s.REPORT)


@dataclass
class Memory:
    """What of the log is known."""

    run: str = ""
    resumes: int = 0
    acceptances: Acceptances = field(default_factory=Acceptances)
    keys: dict[str, str] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Outer steps of the latest rounds, as they were said, by exchange."""
    plans: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Plans of the latest rounds."""
    payloads: dict[str, dict[str, str]] = field(default_factory=dict)
    """SHA-256 of payloads by exchange and attempt, by `SITE/SHARD`."""
    commitments: dict[str, dict[tuple[str, int], dict[str, str]]] = field(default_factory=dict)
    """What was committed to, by exchange, by (site, shard)."""
    oldest: int = 0
    """First round of which they are kept."""
    filed: dict[bytes, int] = field(default_factory=dict)
    """SHA-256 of what sites and auditors have signed, and the round that it is about."""
    holds: Holds = field(default_factory=Holds)
    resumed_in: int = 0
    """The round that the run was resumed in last."""
    _courses: Courses | None = field(default=None, compare=False)
    _resumed_lately: bool = field(default=False, compare=False)

    @property
    def courses(self) -> Courses | None:
        """What courses of the run that were left have committed to, as far as it can matter."""
        return self._courses

    @property
    def resumed_lately(self) -> bool:
        """A resume was read since the mark: `look_back` is due."""
        return self._resumed_lately

    def look_back(self, entries: Iterable[str], shards: int) -> None:
        """The run was resumed, as the log's `entries` say: know what was committed to before.

        Exchanges that were in flight at the checkpoint are begun again, too. Raises `RecordError`.
        """
        oldest = self.resumed_in - REMEMBERED
        self._courses = Courses.read_back(entries, oldest, shards)

    def take(self, entry: str) -> None:
        """An entry of the log. Raises `RecordError`."""
        statement = s.opened(entry)[0]
        if not self.run:
            self.run = run_of(entry, statement.predicate)
            self.acceptances.begun(entry, statement.predicate)
        else:
            self.remember(statement)

    def remember(self, statement: s.Statement) -> None:
        """A statement is in the log."""
        predicate, kind = dict(statement.predicate), statement.kind
        if kind == s.ENROLMENT:
            self.keys[predicate["site"]] = predicate["key"]
        elif kind == s.PLAN:
            self.plans[predicate["round"]] = predicate["plan"]
            self._forget(int(predicate["round"]) - REMEMBERED)
        elif kind == s.STEP:
            self.steps[predicate["exchange_key"]] = predicate
            self._forget(int(predicate["round"]) - REMEMBERED)
        elif kind == s.COMMITMENT:
            place = (predicate["site"], predicate["shard"])
            there = self.commitments.setdefault(predicate["exchange_key"], {})
            there[place] = dict(statement.subjects)
        elif kind == s.CONTRIBUTION:
            attempt = f"{predicate['exchange_key']}#{predicate['attempt']}"
            of = f"{predicate['site']}/{predicate['shard']}"
            self.payloads.setdefault(attempt, {})[of] = statement.subjects["payload"]
        elif kind == s.RESUME:
            self.resumes, self.resumed_in = self.resumes + 1, int(predicate["round"])
            self._resumed_lately = True
            for known in (self.steps, self.plans, self.commitments, self.payloads, self.filed):
                known.clear()
            self.oldest = 0
        self.holds.remember(statement)
        self.acceptances.remember(statement)
        if self._courses is not None and kind != s.RESUME:
            self._courses.take(statement)
        if kind in (*s.BY_SITE, s.VERDICT):
            round_ = int(predicate["round"]) if kind in _BY_ROUND else _FOR_EVER
            self.filed[hashlib.sha256(statement.to_bytes()).digest()] = round_

    def _forget(self, oldest: int) -> None:
        if oldest <= self.oldest:
            return
        self.oldest = oldest
        if self._courses is not None:
            self._courses.forget(oldest)
        for known in (self.commitments, self.payloads, self.steps):
            for key in [k for k in known if ExchangeKey.parse(k.split("#")[0]).round < oldest]:
                del known[key]
        self.plans = {round_: plan for round_, plan in self.plans.items() if round_ >= oldest}
        self.filed = {each: round_ for each, round_ in self.filed.items() if round_ >= oldest}


CODE = (
    "writer/log_summary.py",
    "log/acceptance.py",
    "writer/state_rules.py",
    "log/state_statements.py",
    "log/statements.py",
    "log/merkle.py",
)
"""Modules below `record` whose code makes this knowledge."""


@functools.cache
def code() -> str:
    """SHA-256, hex, of the code that makes this knowledge of a log."""
    total = hashlib.sha256()
    for name in CODE:
        total.update((Path(__file__).parents[1] / name).read_bytes())
    return total.hexdigest()


def marked(path: Path, memory: Memory, mark: Mark) -> Callable[[], None]:
    """What writes a mark to `path`: `memory` as it is now, of the log up to `mark`. To be called
    once a checkpoint covers that; raises `OSError`."""
    said: Mapping[str, Any] = {
        "code": code(),
        "mark": encode(Mark, mark),
        "memory": encode(Memory, memory),
    }
    text = json.dumps(said, separators=(",", ":"))

    def write() -> None:
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_private(path, f"{digest}\n{text}\n".encode())
        sync_folder(path.parent)

    return write


def read_mark(path: Path) -> tuple[Memory, Mark | None]:
    """What was known at the newest mark, and where that is; nothing if there is none to go by."""
    if not os.path.exists(path):
        return Memory(), None
    try:
        digest, text, end = path.read_text(encoding="utf-8").split("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest or end:
            raise ValueError("it is damaged")
        said = json.loads(text)
        if said["code"] != code():
            raise ValueError("another dilocox has made it")
        return decode(Memory, said["memory"]), decode(Mark, said["mark"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s: passed over, the whole log is read (%s)", path, error)
        return Memory(), None
