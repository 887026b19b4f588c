"""A publisher beside a run: indexes that wait, indexes that fail, and payloads that are late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.bundled_run import CutPlace, publisher
from tests.support.coordinator_driver import run_config
from tests.support.manual_clock import ManualClock
from tests.support.older_record import resign

from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import RecordError
from dilocox.record.bundles.place import Place
from dilocox.record.bundles.publication import INDEX, Publication
from dilocox.record.log import statements as s
from dilocox.record.log.step_statements import Step
from dilocox.record.log.transparency_log import read_log
from dilocox.record.writer.one_writer import held
from dilocox.record.writer.rank_recorder import anchor_state
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.absences import Absences
from dilocox.tools.storage.destination import FilesDestination
from dilocox.tools.storage.follow import publish_once, publish_to_the_end
from dilocox.tools.storage.publisher import INDEX_SECONDS
from dilocox.tools.storage.uplink import Uplink

pytestmark = pytest.mark.waits


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/public"


def published(url: str) -> Publication:
    return Publication.parse((Path(url.removeprefix("file://")) / INDEX).read_text())


class NoIndex(CutPlace):
    """A place that refuses the index for some time."""

    def __init__(self, url: str, refused: int) -> None:
        super().__init__(url)
        self.refused = refused
        self.read = 0

    def put(self, path: str, data: bytes) -> None:
        if path == INDEX and self.refused:
            self.refused -= 1
            raise RecordError(f"{self.url}/{path}: cannot be written")
        super().put(path, data)

    def get(self, path: str, most: int, usual: int | None = None) -> bytes:
        self.read += path != INDEX
        return super().get(path, most, usual)


def test_an_index_that_is_refused_sends_no_part_again(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2_000)
    place = NoIndex(url, refused=3)
    found = publisher(run, place)
    for _ in range(3):
        with pytest.raises(RecordError, match="cannot be written"):
            found.publish()
    found.publish()
    parts = [path for path in place.written if path != INDEX]
    assert len(parts) == sum(len(each.parts) for each in published(url).bundles)
    assert len(set(parts)) == len(parts)
    assert place.read == 0, "what this process has sent is not read, either"
    assert found.size == sum(each.size for each in published(url).bundles)


# --- an index that is not due -------------------------------------------------------------------


@pytest.fixture
def growing(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run under a coordinator, with two complete rounds and an index larger than these."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 40)
    whole = list(read_log(run / "record").entries)
    steps = [n for n, line in enumerate(whole) if s.opened(line)[0].kind == s.STEP]
    resign(run, lambda entries: entries.__delitem__(slice(steps[-1] + 1, None)))
    with held(run / "coordinator") as own:
        assert own
        yield run


class SmallParts(CutPlace):
    """A place for very many small files, which do not wait for the disk."""

    def _write(self, path: str, data: bytes) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@pytest.mark.slow
def test_an_index_waits_for_a_minute_at_most(growing: Path, url: str) -> None:
    place, clock = SmallParts(url), ManualClock()
    found = publisher(growing, place)
    found.clock = clock
    found.publish(later=True)
    assert found.bundles == 2
    while INDEX not in place.written:
        clock.now += 5.0
        found.publish(later=True)
    assert clock.now == INDEX_SECONDS
    assert len(published(url).bundles) == 2
    clock.now += 1000.0
    found.publish(later=True)
    assert place.written.count(INDEX) == 1, "the storage has it"


def test_an_index_waits_for_the_uplink_s_share(growing: Path, url: str) -> None:
    """An index that takes a minute of the uplink waits for four."""
    place, clock = SmallParts(url), ManualClock()
    found = publisher(growing, place)
    found.clock = clock
    found.publish(later=True)
    size = len(found._published.text)
    sent = sum(len(each.parts) * 40 for each in found._published.bundles)
    assert size > sent
    found.uplink = Uplink(size // 60, clock, clock.sleep)
    begun = clock.now
    while INDEX not in place.written:
        clock.now += 5.0
        assert clock.now < begun + 400
        found.publish(later=True)
    # The index is whole once the next byte could be sent.
    assert 240 <= clock.now - begun <= 250
    found.uplink.take(1)
    assert 300 <= clock.now - begun <= 311


@pytest.mark.slow
def test_an_index_is_shown_although_the_next_round_s_payload_is_missing(
    growing: Path, url: str
) -> None:
    place, clock = SmallParts(url), ManualClock()
    found = publisher(growing, place)
    found.clock = clock
    found.publish(later=True)

    def refuse() -> None:
        raise RecordError("a payload is in no store")

    found.source.look_again = refuse  # type: ignore[method-assign]
    clock.now += INDEX_SECONDS
    with pytest.raises(RecordError, match="in no store"):
        found.publish(later=True)
    assert INDEX in place.written


@pytest.mark.slow
def test_an_index_that_is_paid_for_waits_until_it_is_due(growing: Path, url: str) -> None:
    class Paid(FilesDestination):
        @property
        def paid(self) -> bool:
            return True

    place, clock = SmallParts(url), ManualClock()
    found = publisher(growing, place)
    found.place, found.clock = Paid(place), clock
    found.publish(later=True)
    clock.now += 10_000.0
    found.publish(later=True)
    assert found.bundles == 2
    assert INDEX not in place.written


# --- payloads that are late, and payloads that are gone -----------------------------------------


def steps_of(run: Path) -> list[s.Statement]:
    statements = [s.opened(each)[0] for each in read_log(run / "record").entries]
    return [each for each in statements if each.kind == s.STEP]


@pytest.mark.parametrize("keep", ["2", '"1GB"', '"auto"'])
def test_a_payload_that_is_late_is_waited_for(run: Path, url: str, keep: str) -> None:
    """A rank stores it behind the outcome; the run cannot have removed it yet."""
    text = (run / "run.toml").read_text()
    assert 'keep = "auto"' in text
    (run / "run.toml").write_text(text.replace('keep = "auto"', f"keep = {keep}"))
    digest = next(iter(steps_of(run)[0].subjects.values()))
    path = run / "record" / "store" / "sha256" / digest[:2] / digest[2:]
    path.rename(run / "late")
    with pytest.raises(RecordError, match=f"{digest[:12]}….*in no store; name the sites'"):
        publish_once(publisher(run, Place(url)))
    said: list[str] = []
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (run / "late").rename(path)

    publish_to_the_end(publisher(run, Place(url)), said.append, sleep)
    assert len(looks) == 3
    assert len(said) == 2
    assert "in no store" in said[0]
    assert [each.missing for each in published(url).bundles] == [0, 0, 0]


def test_a_store_that_is_away_is_waited_for(run: Path, url: str) -> None:
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace('keep = "auto"', "keep = 50"))
    store = run / "record" / "store"
    store.rename(run / "unmounted")
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            (run / "unmounted").rename(store)

    publish_to_the_end(publisher(run, Place(url)), lambda line: None, sleep)
    assert [each.missing for each in published(url).bundles] == [0, 0, 0]


def anchored(found: Absences, *rounds: int, site: str = "a", stage: int = 0) -> None:
    """Let a rank of a site begin windows with these rounds."""
    for number in rounds:
        subjects = {"state": "1" * 64, "tensors": "2" * 64}
        rank = RankId(site=site, stage=stage, shard=0)
        said = anchor_state("run", rank, number, 4 * number, [number - 1], subjects)
        found.note(said, 100 + number)


@pytest.mark.parametrize(
    ("keep", "begun", "gone"),
    [
        ("all", (1, 2, 3), 0),
        ("auto", (), 0),
        ("auto", (1, 2, 3), 2),
        ("1GB", (), 0),
        ("1GB", (2,), 0),
        ("1GB", (1, 2), 1),
        (1, (1,), 0),
        (1, (1, 2), 1),
        (2, (1, 2), 0),
        (2, (1, 2, 3, 4), 2),
        (9, (3, 6, 9), 0),
        (9, (3, 6, 9, 12), 3),
    ],
)
def test_windows_say_which_payloads_may_be_gone(
    run: Path, keep: int | str, begun: tuple[int, ...], gone: int
) -> None:
    """`gone`: the first round that no rank can have removed."""
    config, found = run_config(record={"keep": keep}), Absences()
    anchored(found, *begun)
    for step in steps_of(run):
        round_ = Step.of(step).key.round
        assert found.excuse(step, 7, config) == (round_ < gone), round_
    averaging = run_config(record={"keep": keep}, outer={"method": "allreduce", "fragments": 1})
    assert not any(found.excuse(step, 7, averaging) for step in steps_of(run))


def test_windows_of_any_site_count_and_not_those_of_other_stages(run: Path) -> None:
    config, found = run_config(record={"keep": 1}), Absences()
    anchored(found, 1, 2, 3, stage=1)
    first = steps_of(run)[0]
    assert Step.of(first).key.round == 0
    assert not found.excuse(first, 7, config)
    anchored(found, 1)
    assert not found.excuse(first, 7, config)
    anchored(found, 1, 2, site="b")
    assert found.excuse(first, 7, config), "the stores of site a may be out of reach"


def test_a_resume_excuses_what_was_before_it_alone(run: Path) -> None:
    config, found = run_config(), Absences()
    statements = [s.opened(each)[0] for each in read_log(run / "record").entries]
    states = [each for each in statements if each.kind == s.CHECKPOINT]
    assert not found.excuse(states[0], 3, config)
    found.note(s.Statement(s.RESUME, {}, {"round": 0, "tick": 0}), 20)
    for each in (*states, *steps_of(run)):
        assert found.excuse(each, 19, config)
        assert not found.excuse(each, 21, config)
