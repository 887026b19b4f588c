"""A recorded run whose rounds are audited; it may still go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.data.folder import folder_of_run
from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Prefix, Selection
from dilocox.record.log.blob_store import DOCUMENT_BYTES, Store, Stores
from dilocox.record.log.merkle import Frontier, leaf_hash, roots_at
from dilocox.record.log.run_end import has_summary
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
from dilocox.training.builder import Hooks
from dilocox.training.code_file import load_hooks


@dataclass(frozen=True)
class Chosen:
    """A round of a site that was chosen for an audit."""

    round: int
    site: str
    selection: Selection


class AuditedRun:
    """A run as its log describes it, up to the last signed checkpoint of the log."""

    def __init__(
        self,
        folder: Path,
        stores: tuple[str, ...],
        data: Path | None,
        key: str | None = None,
        code: Path | None = None,
    ) -> None:
        """Read the run's log.

        Args:
            folder: The run folder.
            stores: Further stores with payloads and states.
            data: Folder of the token files. None: the run folder's own.
            key: The log's key, from another source than the run folder. None: the folder's key.
            code: The auditor's copy of the file with the run's functions (`site.code`). The run
                folder may come from a stranger, so nothing in it is run.

        Raises:
            ConfigError: The file `code` is not the one on which the run agreed.
            RecordError: The log cannot be read, or does not match its key.
        """
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
        self._hooks: Hooks | None = None
        if code is not None:
            self._hooks = load_hooks(str(code), self._config.run.code, "--code")
            self._hooks.check(self._config, required=True)

    @property
    def course(self) -> RunHistory:
        """History of the run, as far as the log was read."""
        return self._reader.course

    def refresh(self) -> bool:
        """Read new entries of the log, and return whether there were any.

        Raises `RecordError` if the log does not begin with the entries that were read before.
        """
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
        """Yield the entries after the `known` first ones, and add each to the Merkle tree."""
        for entry in itertools.islice(entries, known, None):
            self._tree.append(leaf_hash(entry.encode()))
            yield entry

    def case(self) -> Case:
        """Return the run in the form that `judge` takes."""
        found = Stores([Store(each) for each in self._stores], most=DOCUMENT_BYTES)
        return Case(
            course=self.course,
            config=self._config,
            get=found.get,
            has=found.has,
            stores=self._stores,
            data=self._data or folder_of_run(self.folder),
            hooks=self._hooks,
            look_again=self.refresh,
        )

    def seen(self) -> Prefix:
        """Return size and root of the log as it was read."""
        return Prefix(self._tree.size, self._tree.root.hex())

    def steps_of(self, site: str, round_: int) -> int:
        """Return the inner steps of a site in the plan of a round; 0 if no plan names the site."""
        said = self.course.plans.get(round_)
        plan = None if said is None else RoundPlan.model_validate(said)
        return plan.steps_of(site) if plan is not None and site in plan.members else 0

    def over(self) -> bool:
        """Return whether the run has ended, so that nothing more will be written."""
        course = self.course
        if all(course.state("final", stage) for stage in range(course.stages)):
            return True
        return has_summary(self.folder)

    def requested(self, site: str | None, round_: int | None) -> list[Chosen]:
        """Return the requested audits. `site`, `round_`: None stands for all that are possible."""
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
        """Return (draw, audit) for all sites of a round. A site is audited if its draw is below
        `rate`."""
        point = self._point(round_)
        chosen = Selection("beacon", rate, point.size, point.root, randomness.hex())
        return [
            (point.draw(randomness, site), Chosen(round_, site, chosen))
            for site in sites_of(self.course, round_)
        ]

    def _point(self, round_: int) -> Point:
        """Return a round's selection point. The points of all due rounds are computed together."""
        if round_ not in self._points:
            rounds = {round_, *due_rounds(self.course)}
            self._points = points_of(self.course, self.entries, rounds)
        return self._points[round_]

    def sampled(self, rate: float, randomness: Mapping[int, bytes] | None = None) -> list[Chosen]:
        """Return the audits that the beacon selects at `rate`.

        If none is selected, the audit with the smallest draw is returned. `randomness`: public
        randomness by round; None: the log alone selects. Raises `RecordError` if a round's value
        is missing, because the log alone would then select from this round.
        """
        due = due_rounds(self.course)
        lacking = [] if randomness is None else [each for each in due if each not in randomness]
        if lacking:
            more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            raise RecordError(
                f"--randomness has no value of round {lacking[0]}{more}: add the values; "
                "`dilocox auditor` audits the rounds whose values are there"
            )
        values = randomness or {}
        drawn = [each for n in due for each in self.drawn(n, rate, values.get(n, b""))]
        found = [chosen for draw, chosen in drawn if draw < rate]
        return found or [chosen for _, chosen in sorted(drawn, key=lambda each: each[0])[:1]]
