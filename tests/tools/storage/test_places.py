"""What a place refuses, what is mended in it, and what a publisher says of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.bundled_run import CutPlace, publisher, verdicts, verified
from tests.support.older_record import resign

from dilocox.errors import DilocoxError
from dilocox.record.bundles.place import DeniedError, Place, WrongPlaceError
from dilocox.record.bundles.publication import INDEX, Publication
from dilocox.record.log.transparency_log import read_log
from dilocox.record.writer.one_writer import held
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.follow import ALONE, publish_once, publish_to_the_end

pytestmark = pytest.mark.waits


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return tmp_path / "public"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def cut(run: Path, end: int) -> None:
    """Cut the log, as that of a run in progress."""
    resign(run, lambda entries: entries.__delitem__(slice(end, None)))


def no_sleep(seconds: float) -> None:
    raise AssertionError("a permanent failure is repeated")


def test_a_follower_ends_if_the_place_is_wrong(run: Path, public: Path) -> None:
    publish_once(publisher(run, Place(str(public))))
    index = (public / INDEX).read_text()
    cut(run, 10)
    with pytest.raises(WrongPlaceError, match="not a prefix of this log"):
        publish_to_the_end(publisher(run, Place(str(public))), print, no_sleep)
    for text in (index[:-9], "something else\n", index.replace("a", "b")):
        (public / INDEX).write_text(text)
        with pytest.raises(WrongPlaceError, match="choose another place, or empty this one"):
            publish_to_the_end(publisher(run, Place(str(public))), print, no_sleep)


def test_a_follower_ends_if_it_is_never_let_in(run: Path, public: Path) -> None:
    """Later, access that is denied may come back: a key that has expired is renewed."""

    class Guarded(CutPlace):
        denied = 0

        def put(self, path: str, data: bytes) -> None:
            if len(self.written) >= self.denied:
                self.denied = 999
                raise DeniedError(f"{path}: cannot be written (no)")
            super().put(path, data)

    with pytest.raises(DeniedError):
        publish_to_the_end(publisher(run, Guarded(str(public))), print, no_sleep)
    later = Guarded(str(public))
    later.denied = 2
    publish_to_the_end(publisher(run, later), print, lambda seconds: None)
    assert verdicts(verified(str(public)))["bundles"] == "PASS"


def test_a_link_in_the_record_ends_a_follower(run: Path, public: Path) -> None:
    (run / "record" / "audits").mkdir()
    (run / "record" / "audits" / "link").symlink_to("/etc/hostname")
    with pytest.raises(DilocoxError, match="only plain files are published"):
        publish_to_the_end(publisher(run, Place(str(public))), print, no_sleep)


def test_wrong_bytes_are_mended(run: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the index, each part that is there is compared."""
    monkeypatch.setattr(bundle_file, "PART_SIZE", 20_000)
    publish_once(publisher(run, Place(str(public))))
    whole = contents(public)
    bad = sorted((public / "bundles").iterdir())[1::4]
    for path in bad:
        path.write_bytes(bytes(path.stat().st_size))
    assert verdicts(verified(str(public)))["bundles"] == "FAIL"
    (public / INDEX).unlink()
    place = CutPlace(str(public))
    publish_once(publisher(run, place))
    assert contents(public) == whole
    assert sorted({*place.written} - {INDEX}) == [f"bundles/{path.name}" for path in bad]
    assert verdicts(verified(str(public)))["bundles"] == "PASS"


def test_a_run_without_a_coordinator_is_named_once(run: Path, public: Path) -> None:
    whole = list(read_log(run / "record").entries)
    cut(run, 16)
    said: list[str] = []
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert len(said) == (looks >= ALONE)
        if looks == 3 * ALONE:
            resign(run, lambda entries: entries.__setitem__(slice(None), whole))

    publish_to_the_end(publisher(run, Place(str(public))), said.append, sleep)
    assert said == [
        f"dilocox: no coordinator runs on {run}, and the run has not ended; waiting until it is "
        "resumed (Ctrl-C ends this command)"
    ]


def test_nothing_is_said_while_a_coordinator_runs(run: Path, public: Path) -> None:
    cut(run, 16)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3 * ALONE:
            raise EOFError

    found = publisher(run, Place(str(public)))
    with held(run / "coordinator") as own, pytest.raises(EOFError):
        publish_to_the_end(found, lambda line: 1 / 0, sleep)
    assert own
    assert looks == 3 * ALONE


def test_absolute_paths_are_named_before_they_are_uploaded(run: Path, public: Path) -> None:
    text = (run / "run.toml").read_text()
    assert 'source = "text"' in text
    (run / "run.toml").write_text(
        text.replace('source = "text"', 'source = "/home/anna/secret/text.txt"')
    )
    config = run / "model" / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "/home/anna/base",', 1))
    said: list[str] = []
    place = CutPlace(str(public))
    found = publisher(run, place)

    def tell(line: str) -> None:
        said.append(line)
        files = {name for each in bundles() for name in each}
        assert line.split(": ")[1] not in files

    def bundles() -> list[set[str]]:
        if not (public / INDEX).exists():
            return []
        return [{*each.files} for each in Publication.parse((public / INDEX).read_text()).bundles]

    found.tell = tell
    publish_once(found)
    told = "has absolute paths of a machine, which everybody can read"
    assert said == [
        f"dilocox: run.toml: {told}: data.source",
        f"dilocox: model/config.json: {told}: _name_or_path",
    ]
    assert {"run.toml", "model/config.json"} <= set.union(*bundles())
