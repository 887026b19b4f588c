"""The disk of the log is full, or files cannot be opened, for a while: the run waits for it, and
then goes on with nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import TrainingError
from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import LogWriter
from dilocox.record.verify.completeness import broken_commitments, gaps
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.full_disk import FullDisk
from tests.support.record_scene import KEY, OF_ALL, SIGNERS, Scene

OTHER = ExchangeKey.outer(0, 0, 1)


def check_whole(scene: Scene, *keys: ExchangeKey) -> None:
    """Of the record of these exchanges nothing is missing, and nothing is there twice."""
    kinds = scene.kinds()
    course = scene.course()
    assert broken_commitments(course) == []
    for key in keys:
        assert course.steps[key.text].set == ("a", "b", "c")
        assert [each for each in gaps(course) if each.startswith(key.text)] == []
    for kind in (s.COMMITMENT, s.CONTRIBUTION):
        assert kinds.count(kind) == 3 * len(keys)
    assert kinds.count(s.STEP) == len(keys)


def refused(call: Callable[[], object]) -> None:
    """The caller is told to come again."""
    with pytest.raises(TrainingError, match="record: cannot be written"):
        call()


def test_whoever_commits_while_the_disk_is_full_comes_again(
    scene: Scene, full_disk: FullDisk
) -> None:
    scene.commit("a")
    scene.notary.log._beside.submit(lambda: None).result()
    full_disk.leave(100)
    refused(lambda: scene.commit("b"))
    refused(lambda: scene.commit("c"))
    full_disk.free()
    scene.exchange()
    check_whole(scene, KEY)
    told = [text for text in scene.messages if text.startswith("record: ")]
    assert told == [
        "record: cannot be written (No space left on device); the run waits until it can be: free "
        "the disk",
        "record: is written again, nothing is missing; the run goes on",
    ]


def test_a_vote_while_the_disk_is_full_does_not_count_yet(
    scene: Scene, full_disk: FullDisk
) -> None:
    scene.begin()
    scene.vote("a")
    full_disk.leave(0)
    refused(lambda: scene.vote("b"))
    assert len(scene.driver.core.state.exchanges[KEY.text].votes) == 1
    full_disk.free()
    for site in "bc":
        scene.vote(site)
    check_whole(scene, KEY)


@pytest.mark.parametrize("room", [0, 60])
def test_nobody_hears_of_a_decision_that_is_not_in_the_record(
    scene: Scene, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The disk is full when the decision is made: it stands in the event log, and the sites hear of
    it when it is in the record as well."""
    scene.begin()
    for site in "ab":
        scene.vote(site)
    notary, decided = scene.notary, TransparencyLogSink.decided

    def full(self: TransparencyLogSink, decision: object) -> None:
        full_disk.leave(room)
        decided(self, decision)  # type: ignore[arg-type]

    monkeypatch.setattr(TransparencyLogSink, "decided", full)
    refused(lambda: scene.vote("c"))
    monkeypatch.undo()
    assert scene.driver.core.state.exchanges[KEY.text].decision == ["a", "b", "c"]
    assert s.STEP not in scene.kinds()
    assert scene.notary is notary


def test_it_is_heard_of_once_the_disk_is_free(
    scene: Scene, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.begin()
    for site in "ab":
        scene.vote(site)
    append = LogWriter.append

    def full(writer: LogWriter, entry: str) -> None:
        if s.opened(entry)[0].kind == s.STEP:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, entry)

    with monkeypatch.context() as patched:
        patched.setattr(LogWriter, "append", full)
        refused(lambda: scene.vote("c"))
        refused(lambda: scene.vote("a"))
        refused(lambda: scene.commit("b"))
        scene.driver.core.expire()
        refused(lambda: scene.vote("a"))
    assert s.STEP not in scene.kinds()
    scene.driver.core.expire()
    assert scene.kinds()[-1] == s.STEP
    assert scene.vote("a").set == ["a", "b", "c"]
    scene.exchange(OTHER)
    check_whole(scene, KEY, OTHER)


def test_a_decision_waits_for_what_it_is_made_from(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have voted, and their votes cannot be synced: nothing is decided before they are."""
    scene.begin()
    for site in "ab":
        scene.vote(site)

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        refused(lambda: scene.vote("c"))
        refused(scene.driver.core.expire)
        assert scene.driver.core.state.exchanges[KEY.text].decision is None
    scene.driver.core.expire()
    assert scene.vote("c").set == ["a", "b", "c"]
    check_whole(scene, KEY)


def test_a_site_is_let_in_when_its_key_is_in_the_record(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    scene = Scene(tmp_path)
    full_disk.leave(0)
    refused(lambda: scene.driver.enrol("a", record_key=SIGNERS["a"].public))
    assert scene.driver.core.state.sites["a"].role == "absent"
    full_disk.free()
    scene.enrol()
    assert scene.kinds() == [s.MANIFEST, *[s.ENROLMENT, s.ACCEPTANCE] * 3]


def test_a_site_that_asks_again_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)

    def failing(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        refused(lambda: scene.driver.enrol("a", record_key=SIGNERS["a"].public))
    scene.enrol()
    assert scene.kinds() == [s.MANIFEST, *[s.ENROLMENT, s.ACCEPTANCE] * 3]


def test_a_plan_is_told_when_it_is_in_the_record(tmp_path: Path, full_disk: FullDisk) -> None:
    scene = Scene(tmp_path, record={"states_every": 2})
    scene.enrol()
    full_disk.leave(0)
    refused(lambda: scene.driver.plan(0, "a"))
    refused(lambda: scene.driver.plan(0, "a"))
    full_disk.free()
    assert scene.driver.plan(0, "a") is not None
    assert scene.kinds().count(s.PLAN) == 1


def test_a_resume_that_was_not_written_is_said_after_a_restart(
    scene: Scene, full_disk: FullDisk
) -> None:
    """The coordinator is ended while its disk is full, and its event log has the resume already."""
    scene.exchange()
    for site in "abc":
        scene.driver.write_checkpoint(site, 2, 0, 2)
    full_disk.leave(0)
    scene.driver.core.resume()
    assert s.RESUME not in scene.kinds()
    scene.notary.log._beside.shutdown()
    scene.notary.writer.release()
    full_disk.free()
    scene.notary = TransparencyLogSink.open(scene.config, scene.folder, scene.messages.append)
    scene.driver.options["notary"] = scene.notary
    scene.driver.reopen()
    assert scene.kinds().count(s.RESUME) == 1
    scene.reopen()
    assert scene.kinds().count(s.RESUME) == 1


def test_a_checkpoint_of_the_log_is_tried_again(scene: Scene, full_disk: FullDisk) -> None:
    """Its file cannot be made: the statements are there, and training goes on."""
    scene.notary.log._beside.submit(lambda: None).result()
    scene.exchange()
    full_disk.leave(10**9, errno.EMFILE)
    scene.notary.cover()
    scene.notary.log._beside.submit(lambda: None).result()
    scene.exchange(OTHER)
    scene.driver.core.expire()
    assert scene.messages[-1] == (
        "record: its signed checkpoint cannot be written (Too many open files); training goes on, "
        "and the checkpoint is tried again"
    )
    full_disk.free()
    scene.driver.core.expire()
    scene.notary.log._beside.submit(lambda: None).result()
    scene.driver.core.expire()
    assert scene.messages[-1] == "record: its signed checkpoint is written again"
    assert not list((scene.config.folder / "record").glob(".*.part"))
    check_whole(scene, KEY, OTHER)


def test_what_nobody_has_thought_of_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread that signs checkpoints raises, the next one is signed."""

    def broken(writer: LogWriter) -> str:
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(LogWriter, "cover", broken)
        scene.notary.cover()
        scene.notary.log._beside.submit(lambda: None).result()
        scene.notary.tend()
    assert "RuntimeError: no such thing" in scene.messages[-1]
    scene.exchange()
    assert scene.course().steps[KEY.text].payloads == OF_ALL


def test_a_stop_waits_for_the_disk_at_its_end(
    scene: Scene, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.exchange()
    scene.notary.log._beside.submit(lambda: None).result()
    monkeypatch.setattr("dilocox.utils.storage.ROOM_PAUSE", 0.0)
    full_disk.leave(0, failures=3)
    check_whole(scene, KEY)
    assert not [text for text in scene.messages if "was not written" in text]


def test_a_full_disk_refuses_no_member(scene: Scene, full_disk: FullDisk) -> None:
    """What a site said while the disk was full is no second opinion when it comes again."""
    full_disk.leave(50)
    refused(lambda: scene.commit("a"))
    full_disk.free()
    assert isinstance(scene.commit("a", values="2" * 64), m.BeginReply)
