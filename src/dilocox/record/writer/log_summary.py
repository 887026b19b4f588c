"""The coordinator's summary of its log: the state to continue a run, of bounded size.

A mark is the summary at one statement of the log, with the position of that statement. After a
restart the coordinator reads the newest mark and the entries after it. The log's signed checkpoint
shows whether the mark fits the log. A mark that does not fit, that is damaged, or that another
version of the code has made is ignored, and the whole log is read.
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
from dilocox.record.log.custody import Certificates, Custody
from dilocox.record.log.recommitments import Courses
from dilocox.record.log.transparency_log import Mark
from dilocox.record.writer.custody_rules import ROUNDS
from dilocox.record.writer.state_rules import Holds
from dilocox.utils.storage import sync_folder
from dilocox.utils.typed_json import decode, encode

log = logging.getLogger(__name__)

REMEMBERED = 4
"""Latest rounds whose statements stay in the summary. The event log may lose a decision that the
record has; then the coordinator takes that decision again."""
MARK_EVERY = 10_000
"""Statements between two marks; reading this many takes about a second."""
MARK_FILE = "record-mark"
"""Name of the mark's file in the coordinator's folder."""
_FOR_EVER = 2**53
_BY_ROUND = (s.COMMITMENT, s.CONTRIBUTION, s.ROUND, s.ANCHOR, s.REPORT, s.CUSTODY)


@dataclass
class Memory:
    """The summary of a log."""

    run: str = ""
    """Id of the run."""
    resumes: int = 0
    """Number of resumes."""
    acceptances: Acceptances = field(default_factory=Acceptances)
    keys: dict[str, str] = field(default_factory=dict)
    """Public key by site, 64 hex digits."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Predicates of the latest rounds' outer-step statements, by exchange key."""
    plans: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Plans of the latest rounds."""
    payloads: dict[str, dict[str, str]] = field(default_factory=dict)
    """SHA-256 of payloads by `EXCHANGE#ATTEMPT`, then by `SITE/SHARD`."""
    commitments: dict[str, dict[tuple[str, int], dict[str, str]]] = field(default_factory=dict)
    """Subjects of commitments by exchange key, then by (site, shard)."""
    oldest: int = 0
    """First round whose steps, plans, payloads and commitments are kept."""
    filed: dict[bytes, int] = field(default_factory=dict)
    """Round by SHA-256 of each statement of a site or an auditor."""
    holds: Holds = field(default_factory=Holds)
    custody: Certificates = field(default_factory=Certificates)
    """Custody of pieces of the latest `ROUNDS` rounds."""
    resumed_in: int = 0
    """Round of the latest resume."""
    _courses: Courses | None = field(default=None, compare=False)
    _resumed_lately: bool = field(default=False, compare=False)

    @property
    def courses(self) -> Courses | None:
        """Commitments of courses that a resume has abandoned; None before the first resume."""
        return self._courses

    @property
    def resumed_lately(self) -> bool:
        """True if a resume was read after the mark, so that `look_back` must be called."""
        return self._resumed_lately

    def look_back(self, entries: Iterable[str], shards: int) -> None:
        """Collect the commitments made before a resume, from all `entries` of the log.

        Exchanges that were in flight at the checkpoint are begun again, so a few rounds before the
        resume are read, too. Raises `RecordError` if an entry is malformed.
        """
        oldest = self.resumed_in - REMEMBERED
        self._courses = Courses.read_back(entries, oldest, shards)

    def take(self, entry: str) -> None:
        """Process the next entry of the log. Raises `RecordError` if it is malformed."""
        statement = s.opened(entry)[0]
        if not self.run:
            self.run = run_of(entry, statement.predicate)
            self.acceptances.begun(entry, statement.predicate)
        else:
            self.remember(statement)

    def remember(self, statement: s.Statement) -> None:
        """Process a statement that has been appended to the log."""
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
        elif kind == s.CUSTODY:
            self.custody.add(Custody.of(statement))
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
        self.custody.forget(oldest + REMEMBERED - ROUNDS)
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
    "log/custody.py",
    "writer/state_rules.py",
    "log/state_statements.py",
    "log/statements.py",
    "log/merkle.py",
)
"""Modules below `record` whose code makes a summary; a change of them invalidates marks."""


@functools.cache
def code() -> str:
    """Return the SHA-256, hex, of the code that makes a summary."""
    total = hashlib.sha256()
    for name in CODE:
        total.update((Path(__file__).parents[1] / name).read_bytes())
    return total.hexdigest()


def marked(path: Path, memory: Memory, mark: Mark) -> Callable[[], None]:
    """Encode `memory`, the summary of the log up to `mark`; return the function that writes it.

    Call that function once a checkpoint covers `mark`. It writes to `path`, and raises `OSError`.
    """
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
    """Read the newest mark: the summary and its position. (Empty, None) if no mark is usable."""
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
        log.warning("%s: ignored, the whole log is read (%s)", path, error)
        return Memory(), None
