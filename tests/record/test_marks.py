"""A coordinator that is started again reads a mark of the log and what follows, and then knows what
it had known."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.merkle import Frontier, leaf_hash
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, LogWriter, Mark
from dilocox.record.writer import log_summary, notary
from dilocox.record.writer.log_summary import MARK_FILE, Memory
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.record_scene import KEY, OF_ALL, Scene

OTHER = ExchangeKey.outer(0, 0, 1)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark with every checkpoint of the log."""
    monkeypatch.setattr(notary, "MARK_EVERY", 1)


def covered(scene: Scene) -> None:
    scene.notary.cover()
    scene.notary.log._beside.submit(lambda: None).result()


def whole(scene: Scene) -> Memory:
    """What the whole log says."""
    found = Memory()
    for entry in scene.entries():
        found.take(entry)
    return found


def taken(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> int:
    """Statements that a restart reads; it ends with the same knowledge."""
    before, count, take = scene.notary.memory, 0, Memory.take

    def counted(self: Memory, entry: str) -> None:
        nonlocal count
        count += 1
        take(self, entry)

    scene.notary.log._beside.shutdown()
    scene.notary.writer.release()
    with monkeypatch.context() as patched:
        patched.setattr(Memory, "take", counted)
        scene.notary = TransparencyLogSink.open(scene.config, scene.folder, scene.messages.append)
    holds = scene.notary.memory.holds
    # Plans reach it from the event log.
    holds.first, holds.flush, holds.begun = before.holds.first, before.holds.flush, True
    before.holds.begun = True
    assert scene.notary.memory == before
    scene.driver.options["notary"] = scene.notary
    scene.driver.reopen()
    return count


def test_what_follows_a_mark_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.exchange()
    covered(scene)
    scene.exchange(OTHER)
    assert taken(scene, monkeypatch) == 7
    assert scene.notary.memory.keys == whole(scene).keys
    assert scene.course().steps[KEY.text].payloads == OF_ALL


def test_nothing_is_said_twice_after_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.begin()
    for site in "ab":
        scene.vote(site)
    covered(scene)
    before = scene.kinds()
    taken(scene, monkeypatch)
    for site in "abc":
        scene.commit(site)
    assert scene.kinds() == before
    for site in "abc":
        scene.vote(site)
    assert scene.driver.core.state.exchanges[KEY.text].decision == ["a", "b", "c"]
    assert scene.kinds().count(s.CONTRIBUTION) == 3


@pytest.mark.parametrize(
    "damage", ["cut", "changed", "other code", "other log", "log cut back", "ahead", "none"]
)
def test_a_mark_that_does_not_fit_is_passed_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The whole log is read; without the log nothing is."""
    scene.exchange()
    covered(scene)
    path, record = scene.folder / MARK_FILE, scene.config.folder / "record"
    early = (record / CHECKPOINT).read_bytes()
    scene.exchange(OTHER)
    covered(scene)
    count = len(scene.entries())
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[:-100])
    elif damage == "changed":
        path.write_text(text.replace(OF_ALL["a/0"], "0" * 64))
    elif damage == "other code":
        monkeypatch.setattr(log_summary, "code", lambda: "another")
    elif damage == "other log":
        tree = Frontier([leaf_hash(b"another")] * scene.notary.writer.size)
        mark = Mark(tree.size, scene.notary.writer.mark().offset, tree.roots)
        log_summary.marked(path, scene.notary.memory, mark)()
    elif damage == "ahead":
        (record / CHECKPOINT).write_bytes(early)
    elif damage == "none":
        path.unlink()
    if damage == "log cut back":
        scene.notary.log._beside.shutdown()
        scene.notary.writer.release()
        entries = scene.entries()
        (record / ENTRIES).write_text("\n".join(entries[:-3]) + "\n")
        with pytest.raises(RecordError, match="not what its checkpoint was signed for"):
            TransparencyLogSink.open(scene.config, scene.folder, print)
        return
    assert taken(scene, monkeypatch) == count


def test_knowledge_does_not_grow_with_the_rounds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for round_ in range(12):
        known = scene.notary.memory
        for site in "abc":
            for other in range(2):
                key = ExchangeKey.outer(round_, 0, other)
                text = scene.signed(site, key)
                known.take(text)
        said = {"run": known.run, "round": round_, "exchange_key": f"outer/{round_}/0/0"}
        known.remember(s.Statement(s.STEP, {}, said))
        sizes.append((len(known.filed), len(known.payloads), len(known.steps)))
    assert sizes[-1] == sizes[-2] == (33, 10, 5)


LOG = [f"statement {number} {'x' * number}" for number in range(40)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_a_log_is_the_same_from_any_mark(
    tmp_path_factory: pytest.TempPathFactory, marked: int, covered: int, end: int, torn: int
) -> None:
    """Killed anywhere: at a mark, a checkpoint or in the middle of a statement."""
    from tests.record.log.test_transparency_log import KEY as SECRET
    from tests.record.log.test_transparency_log import NAME

    folder = tmp_path_factory.mktemp("log")
    try:
        log, mark = LogWriter(folder, NAME, SECRET), Mark(0, 0, [])
        for number, entry in enumerate(LOG[:end]):
            log.append(entry)
            if number + 1 == covered:
                log.cover()
            if number + 1 == marked:
                mark = log.mark()
        log.release()
        with (folder / ENTRIES).open("a") as file:
            file.write("y" * torn)
        entries: list[str] = []
        try:
            log = LogWriter(folder, NAME, SECRET, entries.append, mark)
        except RecordError:
            assert mark.size > (covered if covered <= end else 0)
            return
        assert entries == LOG[mark.size : end]
        assert log.mark() == Mark(
            end, (folder / ENTRIES).stat().st_size, Frontier(map(leaf, LOG[:end])).roots
        )
        log.release()
    finally:
        shutil.rmtree(folder)


def leaf(entry: str) -> bytes:
    return leaf_hash(entry.encode())
