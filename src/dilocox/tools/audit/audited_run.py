"""A recorded run, finished or going on, whose rounds are audited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.data.folder import folder_of_run
from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Prefix, Selection
from dilocox.record.log.blob_store import DOCUMENT_BYTES, Store, Stores
from dilocox.record.log.merkle import Frontier, leaf_hash, roots_at
from dilocox.record.log.run_file_check import agreed_run
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import (
    PUBLIC,
    as_signed,
    check_log,
    leaves_of,
    read_covered,
    read_text,
)
from dilocox.record.verify.audit_sampling import Point, due_rounds, points_of, sites_of
from dilocox.record.verify.run_history import HistoryReader, RunHistory
from dilocox.tools.audit.judge import Case


@dataclass(frozen=True)
class Chosen:
    """A round of a site that is to be audited."""

    round: int
    site: str
    selection: Selection


class AuditedRun:
    """What is known of a run by its log, as far as a signed checkpoint covers it."""

    def __init__(
        self, folder: Path, stores: tuple[str, ...], data: Path | None, key: str | None = None
    ) -> None:
        """`key`: the log's, as it was told some other way. Raises `RecordError`."""
        self.folder = folder
        self._stores = (str(folder / "record" / "store"), *stores)
        self._data = data
        self._key = NoteKey.parse(key or read_text(folder / "record" / PUBLIC).strip())
        self._reader = HistoryReader(self._key)
        self.entries: Sequence[str] = ()
        self._tree = Frontier()
        self._points: dict[int, Point] = {}
        self.refresh()
        self._config = agreed_run(folder / "run.toml", self.course.manifest)

    @property
    def course(self) -> RunHistory:
        """What the log says so far."""
        return self._reader.course

    def refresh(self) -> bool:
        """Read what the log has grown by; whether it has. Raises `RecordError` if it has not
        grown from what was read before."""
        record = self.folder / "record"
        content = read_covered(record, self._key)
        check_log(content, self._key)
        known = self._tree.size
        before = roots_at(leaves_of(content.entries), [known])
        if before.get(known) != self._tree.root:
            raise RecordError(f"{record}: its statements are not those that were read before")
        self._reader.take(self._new(as_signed(content, self._key), known))
        self.entries, self._points = content.entries, {}
        return self._tree.size > known

    def _new(self, entries: Iterator[str], known: int) -> Iterator[str]:
        """The entries behind the known ones, all of which are hashed as they are read."""
        for entry in itertools.islice(entries, known, None):
            self._tree.append(leaf_hash(entry.encode()))
            yield entry

    def case(self) -> Case:
        """What `judge` takes."""
        found = Stores([Store(each) for each in self._stores], most=DOCUMENT_BYTES)
        return Case(
            course=self.course,
            config=self._config,
            get=found.get,
            has=found.has,
            stores=self._stores,
            data=self._data or folder_of_run(self.folder),
            look_again=self.refresh,
        )

    def seen(self) -> Prefix:
        """The log as it was read."""
        return Prefix(self._tree.size, self._tree.root.hex())

    def steps_of(self, site: str, round_: int) -> int:
        """Inner steps that the plan of a round asks of a site; 0: of none that is known."""
        said = self.course.plans.get(round_)
        plan = None if said is None else RoundPlan.model_validate(said)
        return plan.steps_of(site) if plan is not None and site in plan.members else 0

    def over(self) -> bool:
        """True if nothing more will be written."""
        course = self.course
        if all(course.state("final", stage) for stage in range(course.stages)):
            return True
        summary, begun = self.folder / "summary.json", self.folder / "record" / PUBLIC
        # A coordinator writes its log's key whenever it starts.
        return summary.exists() and summary.stat().st_mtime_ns > begun.stat().st_mtime_ns

    def requested(self, site: str | None, round_: int | None) -> list[Chosen]:
        """All rounds that can be audited, or those of a site, or a round."""
        rounds = due_rounds(self.course) if round_ is None else [round_]
        found = []
        for number in rounds:
            known = number in self.course.plans
            sites = sites_of(self.course, number) if known and site is None else []
            found += [
                Chosen(number, name, Selection("request"))
                for name in (sites if site is None else [site])
            ]
        return found

    def drawn(self, round_: int, rate: float, randomness: bytes) -> list[tuple[float, Chosen]]:
        """All sites of a round that is due, each with its draw."""
        point = self._point(round_)
        chosen = Selection("beacon", rate, point.size, point.root, randomness.hex())
        return [
            (point.draw(randomness, site), Chosen(round_, site, chosen))
            for site in sites_of(self.course, round_)
        ]

    def _point(self, round_: int) -> Point:
        """A round's selection point. Those of all due rounds come out of one reading."""
        if round_ not in self._points:
            rounds = {round_, *due_rounds(self.course)}
            self._points = points_of(self.course, self.entries, rounds)
        return self._points[round_]

    def sampled(self, rate: float, randomness: dict[int, bytes]) -> list[Chosen]:
        """What the beacon selects at `rate`; at least one, the one with the smallest draw."""
        drawn = [
            each
            for round_ in due_rounds(self.course)
            for each in self.drawn(round_, rate, randomness.get(round_, b""))
        ]
        found = [chosen for draw, chosen in drawn if draw < rate]
        return found or [chosen for _, chosen in sorted(drawn, key=lambda each: each[0])[:1]]
