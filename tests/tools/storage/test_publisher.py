"""A run that is published in bundles has the same claims, whatever happened on the way."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.bundled_run import CutPlace, publisher, reasons, verdicts, verified
from tests.support.fault_proxy import FaultProxy
from tests.support.older_record import resign

from dilocox.errors import DilocoxError, RecordError
from dilocox.record.bundles.fetch import fetched, is_bundled
from dilocox.record.bundles.place import AT_ONCE, Place
from dilocox.record.bundles.publication import INDEX, Publication
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Store, Stores
from dilocox.record.log.transparency_log import read_log
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.record.writer.one_writer import held
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.contents import Contents
from dilocox.tools.storage.follow import publish_once, publish_to_the_end
from dilocox.tools.storage.uplink import Uplink

pytestmark = pytest.mark.waits


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/public"


def at(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def index(url: str) -> Publication:
    return Publication.parse((at(url) / INDEX).read_text())


def contents(url: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(at(url))): path.read_bytes()
        for path in at(url).rglob("*")
        if path.is_file()
    }


def same_claims(run: Path, url: str) -> None:
    """The claims from bundles are those of the folder, and their lines too."""
    report, own = verified(url), verify(Places(run), lambda what, share: None)
    found = verdicts(report)
    assert found.pop("bundles") == "PASS"
    assert found == verdicts(own)
    assert found["replay"] == found["payloads"] == found["model"] == "PASS"
    lines, expected = reasons(report), reasons(own)
    for claim in ("log", "signatures", "complete", "commitments", "payloads", "replay"):
        assert lines[claim] == expected[claim]


def test_the_claims_of_the_bundles_are_those_of_the_folder(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    same_claims(run, url)
    bundles = index(url).bundles
    assert len(bundles) == 3  # two rounds and the flush
    assert [each.last for each in bundles] == [False, False, True]
    assert [each.missing for each in bundles] == [0, 0, 0]
    assert bundles[-1].head.size == len(read_log(run / "record").entries)


def test_the_number_of_rounds_changes_the_bundles_alone(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url), every=10))
    assert len(index(url).bundles) == 1
    same_claims(run, url)


def test_nothing_is_uploaded_twice(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    before = contents(url)
    again = CutPlace(url, writes=0)
    publish_once(publisher(run, again))
    assert contents(url) == before


def test_two_publications_of_a_run_are_the_same_bytes(
    run: Path, url: str, original: Path, tmp_path: Path
) -> None:
    publish_once(publisher(run, Place(url)))
    other = f"file://{tmp_path}/other"
    publish_once(publisher(original, Place(other)))
    assert contents(url) == contents(other)


def test_a_cut_upload_goes_on(run: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut before every write in turn: each part is uploaded once."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 20_000)
    written: list[str] = []
    while True:
        place = CutPlace(url, writes=1)
        with contextlib.suppress(RecordError):
            publish_once(publisher(run, place))
        written += place.written
        if not place.written:
            break
    assert len(written) > 12
    parts = [path for path in written if path != INDEX]
    assert len(set(parts)) == len(parts)
    assert written.count(INDEX) == 3
    same_claims(run, url)


def test_a_new_upload_asks_for_a_few_parts_alone(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each part costs is one call that writes it, and one that looks whether it is whole."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2_000)
    asked: list[str] = []

    class Counted(Place):
        def size(self, path: str) -> int | None:
            asked.append(path)
            return super().size(path)

    publish_once(publisher(run, Counted(url)))
    published = index(url).bundles
    parts = sum(len(bundle.parts) for bundle in published)
    assert parts > 4 * AT_ONCE * len(published)
    assert parts <= len(asked) <= parts + 2 * AT_ONCE
    same_claims(run, url)


def test_a_publisher_whose_storage_fails_sends_no_part_twice(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage refuses the middle of a bundle; the publisher goes on with what is missing."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2_000)
    place = CutPlace(url, writes=5 * AT_ONCE)
    found = publisher(run, place)
    with pytest.raises(RecordError):
        found.publish()
    before = len(place.written)
    assert before == 5 * AT_ONCE
    place.left = None
    found.publish()
    parts = [path for path in place.written if path != INDEX]
    assert len(parts) > 2 * before
    assert len(set(parts)) == len(parts)
    same_claims(run, url)


def test_the_uplink_s_budget_holds(run: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock: at no moment more was sent than the rate allows, and one part or index."""
    part, rate = 10_000, 200_000
    monkeypatch.setattr(bundle_file, "PART_SIZE", part)
    begun = time.monotonic()
    sent: list[tuple[float, int]] = []

    class Timed(Place):
        def put(self, path: str, data: bytes) -> None:
            sent.append((time.monotonic() - begun, len(data)))
            super().put(path, data)

    found = publisher(run, Timed(url), every=10)
    found.uplink = Uplink(rate)
    publish_once(found)
    total = 0
    sent.sort()  # several threads send
    for moment, size in sent:
        assert total <= rate * moment
        total += size
    whole = len((at(url) / INDEX).read_bytes())
    assert total - whole == found.size > 15 * part
    assert sent[-1][0] >= (total - whole) / rate
    same_claims(run, url)


class SmallParts(CutPlace):
    """A place for very many small files, which do not wait for the disk."""

    def _write(self, path: str, data: bytes) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@pytest.mark.slow
def test_indexes_take_no_more_of_the_uplink_than_bundles(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of 40 bytes an index is larger than its bundles, so it is never due."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 40)
    place = SmallParts(url)
    publish_once(publisher(run, place))
    bundles = index(url).bundles
    assert len(bundles) == 3
    assert len((at(url) / INDEX).read_bytes()) > sum(each.size for each in bundles)
    assert [number for number, path in enumerate(place.written) if path == INDEX] == [
        len(place.written) - 1
    ]
    same_claims(run, url)


@pytest.mark.slow
def test_an_index_that_waits_is_sent_when_nothing_is_new(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "PART_SIZE", 40)
    whole = list(read_log(run / "record").entries)
    steps = [n for n, line in enumerate(whole) if s.opened(line)[0].kind == s.STEP]
    resign(run, lambda entries: entries.__delitem__(slice(steps[-1] + 1, None)))
    seen: list[int] = []
    place = SmallParts(url)

    def sleep(seconds: float) -> None:
        seen.append(place.written.count(INDEX))
        if len(seen) == 3:
            resign(run, lambda entries: entries.__setitem__(slice(None), whole))

    publish_to_the_end(publisher(run, place), print, sleep)
    assert seen == [0, 1, 1]
    assert place.written.count(INDEX) == 2
    same_claims(run, url)


@pytest.mark.slow
def test_an_index_waits_while_a_coordinator_runs(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a round takes: looks without a new bundle do not send the index."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 40)
    whole = list(read_log(run / "record").entries)
    steps = [n for n, line in enumerate(whole) if s.opened(line)[0].kind == s.STEP]
    resign(run, lambda entries: entries.__delitem__(slice(steps[-1] + 1, None)))
    seen: list[int] = []
    place = SmallParts(url)
    with contextlib.ExitStack() as coordinator:
        assert coordinator.enter_context(held(run / "coordinator"))

        def sleep(seconds: float) -> None:
            seen.append(place.written.count(INDEX))
            if len(seen) == 4:
                coordinator.close()
                resign(run, lambda entries: entries.__setitem__(slice(None), whole))

        publish_to_the_end(publisher(run, place), print, sleep)
    assert seen == [0, 0, 0, 0]
    assert place.written.count(INDEX) == 1
    same_claims(run, url)


def test_a_part_that_was_cut_is_written_again(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    whole = contents(url)
    (at(url) / INDEX).unlink()
    part = next((at(url) / "bundles").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    publish_once(publisher(run, Place(url)))
    assert contents(url) == whole


def test_rounds_larger_than_a_bundle_take_several(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the publisher is killed between them, and continues with other rounds."""
    monkeypatch.setattr(bundle_file, "BUNDLE_SIZE", 15_000)
    for writes in range(1, 40):
        place = CutPlace(url, writes=writes)
        try:
            publish_once(publisher(run, place, every=1 + writes % 3))
        except RecordError:
            continue
        break
    found = index(url).bundles
    assert len(found) > 8
    assert {each.toward > 0 for each in found} == {True, False}
    largest = 60_000  # the largest file, and the statements of some rounds
    assert max(each.size for each in found[:-1]) < largest
    same_claims(run, url)
    # Every object and file is in exactly one bundle of the index.
    names: list[str] = []
    for each in found:
        with tarfile.open(at(url) / each.name) as archive:
            names += archive.getnames()
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"record/checkpoint", "record/log.pub"}


def test_a_run_in_progress_is_published_by_complete_rounds(run: Path, url: str) -> None:
    whole = list(read_log(run / "record").entries)
    steps = [n for n, line in enumerate(whole) if s.opened(line)[0].kind == s.STEP]
    sizes = []
    for end in (2, steps[0] + 1, steps[1] + 1, steps[2], len(whole) - 1):
        resign(run, lambda entries, end=end: entries.__setitem__(slice(None), whole[:end]))
        place = CutPlace(url)
        found = publisher(run, place)
        publish_once(found)
        assert not found.ended
        if place.written:
            sizes.append(index(url).bundles[-1].head.size)
            report = verified(url)
            assert verdicts(report)["log"] == verdicts(report)["signatures"] == "PASS"
            assert verdicts(report)["bundles"] == "PASS"
            assert "had not ended" in reasons(report)["bundles"]
            assert verdicts(report)["complete"] == "NOT_RUN"
    assert sizes == [steps[1], steps[2]]
    resign(run, lambda entries: entries.__setitem__(slice(None), whole))
    publish_once(publisher(run, Place(url)))
    same_claims(run, url)


def test_a_file_that_was_added_after_the_end_is_published(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    (run / "summary.json").write_text('{"reason": "finished"}')
    publish_once(publisher(run, Place(url)))
    assert index(url).bundles[-1].files.keys() == {"summary.json"}
    same_claims(run, url)


def test_another_run_in_the_same_place_is_refused(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    resign(run, lambda entries: entries.__delitem__(slice(10, None)))
    with pytest.raises(RecordError, match="not a prefix of this log; choose another place"):
        publish_once(publisher(run, Place(url)))
    (at(url) / INDEX).write_text("something else\n")
    with pytest.raises(RecordError, match="choose another place, or empty this one"):
        publish_once(publisher(run, Place(url)))


def test_missing_payloads_are_not_passed_over(run: Path, url: str) -> None:
    entries = read_log(run / "record").entries
    step = next(each for each in map(s.opened, entries) if each[0].kind == s.STEP)[0]
    digest = next(iter(step.subjects.values()))
    (run / "record" / "store" / "sha256" / digest[:2] / digest[2:]).unlink()
    with pytest.raises(RecordError, match=f"{digest[:12]}….*in no store; name the sites'"):
        publish_once(publisher(run, Place(url)))
    assert not at(url).exists()


def test_evidence_of_machines_may_be_missing(tmp_path: Path) -> None:
    """It lies in the store of its site, who can keep it back: publishing must not depend on it."""
    here = Store(str(tmp_path / "store"))
    digests = [here.put(b"evidence"), "9" * 64]
    said = {"site": "a", "format": "any/kind"}
    statements = [s.Statement(s.ATTESTATION, {"evidence": each}, said) for each in digests]
    found, missing = Contents().named(statements, Stores([here]))
    assert ([each.digest for each in found], missing) == (digests[:1], {})


def test_two_publishers_do_not_meet(run: Path, url: str) -> None:
    class Meeting(Place):
        def put(self, path: str, data: bytes) -> None:
            with pytest.raises(RecordError, match="another command is publishing"):
                publish_once(publisher(run, Place(url)))
            super().put(path, data)

    publish_once(publisher(run, Meeting(url)))
    same_claims(run, url)


def test_only_the_coordinator_s_folder_is_published(run: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(DilocoxError, match="not the folder of a run's coordinator"):
        publisher(tmp_path / "nothing", Place(url))
    (run / "coordinator" / "record-key").write_text("11" * 32)
    with pytest.raises(RecordError, match="is not the key of"):
        publisher(run, Place(url))
    (run / "coordinator" / "record-key").unlink()
    with pytest.raises(RecordError, match="publish where the coordinator ran"):
        publisher(run, Place(url))


def test_no_secret_is_published(run: Path, url: str) -> None:
    secrets = [(run / "coordinator" / "record-key").read_bytes().strip()]
    for name in ("coordinator/token-secret", "private/lyon.key", "coordinator/tokens/lyon"):
        path = run / name
        path.parent.mkdir(exist_ok=True)
        secrets.append(f"{name:->64}".encode())
        path.write_bytes(secrets[-1])
    publish_once(publisher(run, Place(url)))
    everything = b"".join(contents(url).values())
    assert not any(each in everything for each in secrets)
    assert b"PRIVATE" not in everything
    (run / "summary.json").write_bytes(b"{" + secrets[2] + b"}")
    with pytest.raises(DilocoxError, match=r"summary\.json: holds a key or a token"):
        publish_once(publisher(run, Place(url)))
    assert secrets[2] not in b"".join(contents(url).values())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "has other bytes than were published"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has other bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x" * 100_000), "has other bytes"),
        (lambda path: path.write_bytes(b""), "has other bytes"),
        (lambda path: path.unlink(), "was published, but is not there"),
    ],
)
def test_a_damaged_bundle_is_named(
    run: Path, url: str, damage: Callable[[Path], object], said: str
) -> None:
    publish_once(publisher(run, Place(url)))
    for bundle in index(url).bundles:
        path = at(url) / bundle.name
        data = path.read_bytes()
        damage(path)
        report = verified(url)
        first = report.findings[0]
        assert (first.claim.name, first.verdict) == ("bundles", "FAIL")
        assert bundle.name in first.reason
        assert said in first.reason
        assert {each.verdict for each in report.findings[1:]} == {"NOT_RUN"}
        assert report.exit_code == 1
        path.write_bytes(data)
    assert verdicts(verified(url))["bundles"] == "PASS"


def test_an_older_index_is_an_unfinished_run(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    whole = (at(url) / INDEX).read_text()
    (at(url) / INDEX).write_text("".join(whole.splitlines(keepends=True)[:-1]))
    report = verified(url)
    assert verdicts(report)["complete"] == "NOT_RUN"
    assert report.exit_code == 3


def test_a_key_from_elsewhere_is_compared_before_anything_is_read(run: Path, url: str) -> None:
    publish_once(publisher(run, Place(url)))
    key = read_log(run / "record").public
    assert verdicts(verified(url, key))["bundles"] == "PASS"
    other = "dilocox/old/x+ff8a1d5a+AQECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8g"
    report = verified(url, other)
    assert report.findings[0].verdict == "FAIL"
    assert INDEX in report.findings[0].reason


def test_a_follower_goes_through_failures_and_says_two_lines(run: Path, url: str) -> None:
    place = CutPlace(url, writes=1)
    said: list[str] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            place.left = None

    publish_to_the_end(publisher(run, place), said.append, sleep)
    assert len(said) == 2
    assert re.match(r"dilocox: not published: .*connection reset.*; trying again", said[0])
    assert said[1] == "dilocox: publishing goes on"
    assert len(pauses) == 4
    same_claims(run, url)


def test_a_web_server_that_dies_says_nothing_about_the_run(run: Path, url: str) -> None:
    """A bundle that is gone is a FAIL, a server that is gone is not."""
    publish_once(publisher(run, Place(url)))
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(at(url)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = FaultProxy(server.server_address[1])
        web = f"http://127.0.0.1:{proxy.port}"
        try:
            assert verdicts(verified(web))["bundles"] == "PASS"
            assert not is_bundled(f"{web}/nothing")
            place = Place(web)
            own = place.get

            def get(path: str, *rest: int) -> bytes:
                if path != INDEX:
                    proxy.become("dead")
                return own(path, *rest)

            place.get = get  # type: ignore[method-assign]
            with (
                pytest.raises(RecordError, match=r"\.tar: cannot be read"),
                fetched(place, None),
            ):
                pass
            with pytest.raises(RecordError, match="cannot be read"):
                is_bundled(web)
            proxy.become("pass")
            (at(url) / index(url).bundles[1].name).unlink()
            assert "is not there" in reasons(verified(web))["bundles"]
        finally:
            proxy.close()
            server.shutdown()


def test_a_follower_waits_for_room_on_its_disk(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [OSError(28, "No space left on device")] * 3
    own = tempfile.TemporaryFile

    def temporary(dir: Path) -> object:  # noqa: A002 - the name in tempfile
        if full:
            raise full.pop()
        return own(dir=dir)

    monkeypatch.setattr(bundle_file.tempfile, "TemporaryFile", temporary)
    said: list[str] = []
    publish_to_the_end(publisher(run, Place(url)), said.append, lambda seconds: None)
    assert len(said) == 2
    assert "No space left on device" in said[0]
    same_claims(run, url)


def test_a_run_file_that_is_being_written_is_read_later(run: Path, url: str) -> None:
    found = publisher(run, Place(url))
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text[:10])
    publish_once(found)
    (run / "run.toml").write_text(text)
    same_claims(run, url)


def test_a_follower_ends_with_the_run(run: Path, url: str) -> None:
    whole = list(read_log(run / "record").entries)
    ends = [10, 16, len(whole)]
    resign(run, lambda entries: entries.__setitem__(slice(None), whole[: ends.pop(0)]))

    def sleep(seconds: float) -> None:
        resign(run, lambda entries: entries.__setitem__(slice(None), whole[: ends.pop(0)]))

    publish_to_the_end(publisher(run, Place(url)), lambda line: 1 / 0, sleep)
    assert ends == []
    same_claims(run, url)
