"""The state that follows from published bundles is the one that sites have signed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.record.bundles.place import Place
from dilocox.record.bundles.publication import INDEX
from dilocox.record.log.digests import tensor_digest
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import open_log
from dilocox.record.verify.replay import Stage, read_listing
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.follow import publish_once
from dilocox.training import published_state
from dilocox.training.published_state import PublishedState
from tests.support.bundled_run import publisher
from tests.support.older_record import resign, unpacked

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "old")
    return tmp_path / "old"


def history_of(run: Path) -> RunHistory:
    log = open_log(run / "record")
    return read_history(log.entries, NoteKey.parse(log.public))


def stage_of(run: Path, number: int = 0) -> Stage:
    course = history_of(run)
    theta = course.state("initial", number)[-1]

    def get(digest: str) -> bytes:
        return (run / "record" / "store" / "sha256" / digest[:2] / digest[2:]).read_bytes()

    return Stage.of(course, number, read_listing(get, theta.listing, theta.root))


class Entering:
    """A rank that enters, and what it says."""

    def __init__(self, url: str, pieces: int, rate: int | None, values: int = 10**6) -> None:
        self.said: list[str] = []
        self.asked = 0
        state = SimpleNamespace(
            anchor=torch.empty(values), momentum=torch.empty(values), digest_of=self._digest
        )
        self.own: Any = SimpleNamespace(
            site="late", config=SimpleNamespace(
                record=SimpleNamespace(published=url), control=SimpleNamespace(link_rate=None)
            ),
            rank=SimpleNamespace(
                states=[state] * pieces, place=SimpleNamespace(stage=0, shard=0, leads=True)
            ),
        )  # fmt: skip
        estimate = None if rate is None else SimpleNamespace(rate=rate)
        plan = SimpleNamespace(plan=SimpleNamespace(estimate=estimate))
        self.client: Any = SimpleNamespace(
            poll_plan=lambda round_, wait: plan,
            report=lambda round_, said, kind: self.said.append(f"{kind}: {said['text']}"),
        )
        self.now = 0.0

    def _digest(self, tensors: Any) -> str:
        assert sorted(tensors) == ["anchor", "momentum"]
        return "ab" * 32

    def waits_for_parts(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let each part of a bundle take so long."""
        opened = published_state.open_bundles

        def slow(url: str) -> Any:
            place = opened(url)
            own = place.get_part

            def get_part(bundle: Any, number: int) -> bytes:
                self.now += seconds
                return own(bundle, number)

            place.get_part = get_part  # type: ignore[method-assign]
            return place

        monkeypatch.setattr(published_state, "open_bundles", slow)

    def state(self, from_round: int, more: Any = None) -> PublishedState:
        def sleep(seconds: float) -> None:
            self.now += seconds
            if more is not None:
                more()

        return PublishedState(self.own, self.client, from_round, 1.0, lambda: self.now, sleep)


def test_the_whole_run_leads_to_the_signed_state(run: Path, tmp_path: Path) -> None:
    """With the flush, whose anchor the sites have signed."""
    url, course, stage = f"file://{tmp_path}/public", history_of(run), stage_of(run)
    publish_once(publisher(run, Place(url)))
    rank = Entering(url, course.pieces, rate=100)
    last = max(step.key.round for step in course.of(0))
    found = rank.state(last + 1).pieces()
    assert rank.said == []
    assert set(found) == set(range(course.pieces))
    final = course.state("final", 0)[-1]
    listing = run / "record" / "store" / "sha256" / final.listing[:2] / final.listing[2:]
    signed = {
        each.name: each for each in read_listing(lambda _: listing.read_bytes(), "", final.root)
    }
    for piece, own in found.items():
        assert own.digest == "ab" * 32
        for name, view in (
            stage.layout(range(piece, piece + 1), 0).views(own.tensors["anchor"]).items()
        ):
            assert tensor_digest(name, view) == signed[name]
    # Fewer rounds, and none, lead elsewhere.
    before = rank.state(1).pieces()
    assert any(
        not torch.equal(before[n].tensors["anchor"], found[n].tensors["anchor"]) for n in found
    )
    start = rank.state(0).pieces()
    assert not any(own.tensors["momentum"].any() for own in start.values())


def test_it_waits_until_the_rounds_are_published(run: Path, tmp_path: Path) -> None:
    url, whole = f"file://{tmp_path}/public", list(open_log(run / "record").entries)
    last = max(step.key.round for step in history_of(run).of(0))
    resign(run, lambda entries: entries.__delitem__(slice(14, None)))
    publish_once(publisher(run, Place(url)))
    rank = Entering(url, history_of(run).pieces, rate=100)

    def more() -> None:
        resign(run, lambda entries: entries.__setitem__(slice(None), whole))
        publish_once(publisher(run, Place(url)))

    assert len(rank.state(last + 1, more).pieces()) == len(rank.own.rank.states)
    assert rank.now == 1.0


def test_a_faster_donor_is_taken(run: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/public"
    publish_once(publisher(run, Place(url)))
    count = history_of(run).pieces
    small = Entering(url, count, rate=None, values=100)
    assert small.state(1).pieces() == {}
    assert "bytes, and a donor sends" in small.said[0]
    # Rounds that are not published in the donor's time.
    late = Entering(url, count, rate=8_000_000 * count // 30)
    assert late.state(99).pieces() == {}
    assert 30 <= late.now <= 32
    assert "and a donor about 30.0 s" in late.said[0]
    assert len(late.said) == 1


def test_rounds_that_nobody_publishes_are_given_up(run: Path, tmp_path: Path) -> None:
    """The link is not known, and the bundles have fewer bytes than a donor would send."""
    url = f"file://{tmp_path}/public"
    publish_once(publisher(run, Place(url)))
    rank = Entering(url, history_of(run).pieces, rate=None)
    looks: list[float] = []

    def look() -> None:
        looks.append(rank.now)
        assert len(looks) < 1000

    assert rank.state(99, look).pieces() == {}
    assert published_state.LONGEST <= rank.now <= published_state.LONGEST + 2
    assert "without a known link the longest wait is 180.0 s" in rank.said[0]
    assert len(rank.said) == 1


def test_a_storage_without_a_rate_is_waited_for_as_long_as_a_donor_would_take(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A donor at the rate of the bundles; time without a fetch does not make the rate smaller."""
    url = f"file://{tmp_path}/public"
    publish_once(publisher(run, Place(url)))
    count = history_of(run).pieces
    rank = Entering(url, count, rate=None, values=100_000)
    rank.waits_for_parts(60.0, monkeypatch)
    assert rank.state(99).pieces() == {}
    size = sum(path.stat().st_size for path in (tmp_path / "public" / "bundles").iterdir())
    parts = len(list((tmp_path / "public" / "bundles").iterdir()))
    donor = count * 8 * 100_000 * parts * 60 / size
    assert donor > 1.2 * published_state.LONGEST
    assert donor <= rank.now <= donor + 2


def test_a_bundle_that_comes_slowly_is_given_up_before_it_is_whole(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2_000)
    url = f"file://{tmp_path}/public"
    publish_once(publisher(run, Place(url)))
    count = history_of(run).pieces
    rank = Entering(url, count, rate=8_000_000 * count // 30)
    rank.waits_for_parts(4.0, monkeypatch)
    assert rank.state(1).pieces() == {}
    assert 30 <= rank.now <= 30 + 6 * 4.0, "up to four parts are on their way"
    assert "and a donor about 30.0 s" in rank.said[0]


@pytest.mark.parametrize("damage", ["dead", "index", "bundle", "other"])
def test_bundles_that_cannot_be_used_are_one_line(run: Path, tmp_path: Path, damage: str) -> None:
    public = tmp_path / "public"
    publish_once(publisher(run, Place(str(public))))
    count = history_of(run).pieces
    if damage == "dead":
        shutil.rmtree(public)
    elif damage == "index":
        (public / INDEX).write_text("{}\n")
    elif damage == "bundle":
        path = sorted((public / "bundles").iterdir())[1]
        path.write_bytes(path.read_bytes()[:-1])
    else:
        count += 1
    rank = Entering(f"file://{public}", count, rate=100)
    state = rank.state(1)
    assert state.pieces() == {} == state.pieces()
    (line,) = rank.said
    assert line.startswith("warning: late: the state comes from a donor, not from published")
    assert "\n" not in line
