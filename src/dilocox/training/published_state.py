"""First state of a site that comes later, from the published bundles of the run.

The bundles hold theta_0 and all payloads, from which the outer steps are replayed exactly
(`dilocox.record.verify.replay`). Nothing is believed: a piece is used only if the donor's piece has
the same digest, and most sites confirm the digest (`dilocox.training.anchor_digests`). So the
bundles save the donor's transfer, and whatever is wrong with them costs time alone.

The bundles are used if they are expected to be there sooner than a donor's transfer: by the bytes
of both, the rate at which the bundles come, and the rate of the run's links: as the newest plan
has it, else as the run file declares it. Without such a rate fewer bytes are taken for sooner, and
rounds that nobody publishes are given up after `LONGEST`.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dilocox.config.codec_spec import parse_spec
from dilocox.errors import DilocoxError, RecordError
from dilocox.record.bundles.fetch import (
    BundleStorage,
    Fetched,
    fetch_into,
    open_bundles,
    read_index,
)
from dilocox.record.bundles.publication import Publication
from dilocox.record.log.blob_store import Store, Stores
from dilocox.record.log.step_statements import Step
from dilocox.record.log.transparency_log import ENTRIES
from dilocox.record.verify.replay import Get, Stage, StartTensors, read_listing, replay_steps
from dilocox.record.verify.run_history import HistoryReader, RunHistory
from dilocox.training.control_plane import ControlPlane
from dilocox.training.rank_state import RankState
from dilocox.transport.state_transfer import OwnPiece
from dilocox.utils.json_lines import lines_of_text

log = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two looks for a newer index, and between two estimates during a bundle."""
LONGEST = 180.0
"""Seconds for which missing rounds are waited for if the run's link is not known. A donor at the
rate of the bundles may take longer: then as long as that. The publisher may hold an index back for
a minute."""
_ERRORS = (DilocoxError, OSError, ValueError, RuntimeError, KeyError)
"""What strange bytes may lead to."""


class SlowerError(DilocoxError):
    """A donor is expected to be faster."""


class PublishedState:
    """The pieces of one entering rank, as they follow from the published bundles."""

    def __init__(
        self,
        own: RankState,
        client: ControlPlane,
        from_round: int,
        pause: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Nothing is fetched yet.

        Args:
            own: The rank. Its state is not changed.
            client: Gives the newest plan, and takes a warning.
            from_round: The first round that the site receives: its state is that before.
            pause: Seconds after which a donor is told to keep waiting.
            clock: Returns monotonic seconds.
            sleep: Waits for a number of seconds.
        """
        self._own, self._client, self._from = own, client, from_round
        self.pause, self._clock, self._sleep = pause, clock, sleep
        self._tried = False
        self._found: Mapping[int, OwnPiece] = {}

    def pieces(self) -> Mapping[int, OwnPiece]:
        """Return the rank's pieces after all rounds before `from_round`, by number.

        Empty, with one line in the log and a warning, if a donor is faster or the bundles cannot be
        used. Later calls return the same.
        """
        if not self._tried:
            self._tried = True
            url = self._own.config.record.published
            try:
                self._found = self._prepared(url)
                log.info("%d pieces are replayed from %s", len(self._found), url)
            except _ERRORS as error:
                self._say(f"the state comes from a donor, not from published bundles: {error}")
        return self._found

    def _prepared(self, url: str) -> Mapping[int, OwnPiece]:
        begun = self._clock()
        with tempfile.TemporaryDirectory(prefix="dilocox-published-") as folder:
            found = _Bundles(open_bundles(url), Path(folder), self._clock)
            while True:
                found.take(lambda got, left, spent: self._check_speed(begun, got, left, spent))
                steps = self._steps(found.course)
                if steps is not None:
                    break
                self._check_speed(begun, found.size, 0, found.seconds)
                self._sleep(LOOK)
            return self._replayed(found.course, steps, found.get)

    def _check_speed(self, begun: float, got: int, left: int, spent: float) -> None:
        """Raise `SlowerError` if a donor is expected to be faster.

        Args:
            begun: When the fetching began, seconds.
            got: Bytes that were fetched.
            left: Bytes that are published and were not fetched yet.
            spent: Seconds in which `got` was fetched, without waits for what was not published.
        """
        size = sum(state.anchor.nbytes + state.momentum.nbytes for state in self._own.rank.states)
        expected = self._clock() - begun + (left * spent / got if got else 0.0)
        rate = self._link_rate()
        if rate:
            if expected > size / rate:
                raise SlowerError(
                    f"they would take {expected:.1f} s or more, and a donor about "
                    f"{size / rate:.1f} s ({size:,} bytes at {rate:,} bytes/s)"
                )
            return
        # No link was measured or declared: the same rate for both.
        if got + left > size:
            raise SlowerError(f"they have {got + left:,} bytes, and a donor sends {size:,}")
        longest = max(LONGEST, size * spent / got if got else 0.0)
        if expected > longest:
            raise SlowerError(
                f"they would take {expected:.1f} s or more, and without a known link the longest "
                f"wait is {longest:.1f} s"
            )

    def _link_rate(self) -> int:
        """Return the run's link in bytes per second: measured, else declared, else 0."""
        for round_ in (self._from, self._from - 1):
            plan = self._client.poll_plan(round_, 0.0).plan if round_ >= 0 else None
            if plan is not None and plan.estimate is not None:
                return plan.estimate.rate
        return self._own.config.control.link_rate or 0

    def _steps(self, course: RunHistory | None) -> list[Step] | None:
        """Return the outer steps before `from_round`; None if not all of them are published.

        Raises `RecordError` if they have a codec whose basis is no part of the record's replay.
        """
        if course is None:
            return None
        steps = [
            step for step in course.of(self._own.rank.place.stage) if step.key.round < self._from
        ]
        if any(parse_spec(step.codec).record.agrees_first for step in steps):
            raise RecordError("the run's low-rank codec keeps a basis that no bundle has")
        pieces = set(range(course.pieces))
        for round_ in range(self._from):
            own = [step.pieces(course.pieces) for step in steps if step.key.round == round_]
            if {piece for run in own for piece in run} != pieces:
                return None
        return steps

    def _replayed(
        self, course: RunHistory | None, steps: list[Step], get: Get
    ) -> Mapping[int, OwnPiece]:
        """Replay `steps` for this rank."""
        assert course is not None
        place, states = self._own.rank.place, self._own.rank.states
        theta = course.state("initial", place.stage)
        if not theta or len(states) != course.pieces:
            raise RecordError("they do not hold the start of this run")
        listing = read_listing(get, theta[-1].listing, theta[-1].root)
        stage = Stage.of(course, place.stage, listing)
        found = {}
        for run, own in stage.blocks(steps):
            start = StartTensors.load(stage, stage.names(run), get)
            flats = replay_steps(own, stage, run, start, place.shard, get, course.momentum_dtype)
            for piece in run:
                at = stage.place(range(piece, piece + 1), run, place.shard)
                tensors = {
                    name: flat[at].clone()
                    for name, flat in zip(("anchor", "momentum"), flats, strict=True)
                }
                found[piece] = OwnPiece(states[piece].digest_of(tensors), tensors)
        return found

    def _say(self, text: str) -> None:
        log.warning("%s", text)
        if self._own.rank.place.leads:
            self._client.report(0, {"text": f"{self._own.site}: {text}"}, kind="warning")


class _Bundles:
    """The published bundles, as far as they were fetched to a folder."""

    def __init__(self, storage: BundleStorage, folder: Path, clock: Callable[[], float]) -> None:
        self._storage, self._clock = storage, clock
        self._fetched = Fetched(folder, storage.url)
        self._reader: HistoryReader | None = None
        self._read = 0
        """Bytes of the statements that were read."""
        self.size = 0
        """Bytes of the bundles that were fetched."""
        self.seconds = 0.0
        """Seconds in which they were fetched."""

    def get(self, digest: str) -> bytes:
        """Return an object of the bundles by its SHA-256. Raises `RecordError`."""
        return Stores([Store(str(self._fetched.folder / "record" / "store"))]).get(digest)

    @property
    def course(self) -> RunHistory | None:
        """The run's history; None before there is a statement."""
        return self._reader.course if self._reader is not None and self._read else None

    def take(self, progress: Callable[[int, int, float], None]) -> None:
        """Fetch the bundles that are new, and read their statements.

        `progress`: called before each bundle with the bytes that were fetched, the bytes that are
        left, and the seconds of fetching. Called every `LOOK` seconds while a bundle comes, with 0
        for the bytes that are left: nothing is extrapolated from a part. It may raise. Raises
        `RecordError` if the storage fails or the bundles are not authentic.
        """
        index, before = read_index(self._storage), self._fetched.publication
        if before is not None and index.lines[: len(before.lines)] != before.lines:
            raise RecordError("their index has changed")
        for number in range(len(self._fetched.bundles), len(index.bundles)):
            begun = self._clock()
            progress(self.size, sum(each.size for each in index.bundles[number:]), self.seconds)
            ahead = Publication(index.log, index.run, index.bundles[: number + 1])
            self._fetched.publication = ahead
            fetch_into(self._fetched, self._storage, self._at_times(progress))
            self.size += index.bundles[number].size
            self.seconds += self._clock() - begun
        self._fetched.publication = index
        if self._reader is None:
            self._reader = HistoryReader(index.log)
        self._reader.take(self._new_entries())

    def _at_times(
        self, progress: Callable[[int, int, float], None]
    ) -> Callable[[str, float], None]:
        told = self._clock()

        def tell(what: str, share: float) -> None:
            nonlocal told
            if self._clock() >= told + LOOK:
                told = self._clock()
                progress(self.size, 0, self.seconds)

        return tell

    def _new_entries(self) -> Iterable[str]:
        path = self._fetched.folder / "record" / ENTRIES
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        return lines_of_text(data.decode("utf-8"))
