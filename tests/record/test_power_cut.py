"""The machine of the coordinator loses power: of the log only what was synced is left.

The event log may have kept more than it was asked to: here it always keeps everything, so that it
knows all decisions that the record might have lost.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES
from dilocox.record.verify.completeness import broken_commitments, gaps
from dilocox.record.verify.metric_reports import signed_report
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.record.writer.rank_recorder import SigningIdentity
from tests.support.record_scene import KEY, OF_ALL, ONE, SIGNERS, Scene

OTHER = ExchangeKey.outer(0, 0, 1)


class Disk:
    """What of the statements has been synced."""

    def __init__(self, root: Path) -> None:
        self.path, self.size, self.count = root / "run/record" / ENTRIES, 0, 0

    def synced(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        if self.path.exists() and about.st_ino == self.path.stat().st_ino:
            self.size, self.count = about.st_size, self.count + 1

    @property
    def kinds(self) -> list[str]:
        entries = self.path.read_bytes()[: self.size].decode().splitlines()
        return [s.opened(entry)[0].kind for entry in entries]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Before the scene: its log is synced where it begins."""
    disk, fsync = Disk(tmp_path), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        disk.synced(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return disk


@pytest.fixture
def scene(disk: Disk, tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.notary.log._beside.submit(lambda: None).result()
    return scene


def cut_power(scene: Scene, disk: Disk) -> None:
    """The machine is started again, and the coordinator on what is there."""
    scene.notary.log._beside.shutdown()
    scene.notary.writer.release()
    with disk.path.open("r+b") as file:
        file.truncate(disk.size)
    scene.notary = TransparencyLogSink.open(scene.config, scene.folder, scene.messages.append)
    scene.driver.options["notary"] = scene.notary
    scene.driver.reopen()


def sound(scene: Scene) -> tuple[str, ...]:
    """The set of the exchange, of whose record nothing is missing."""
    course = scene.course()
    assert broken_commitments(course) == []
    assert [each for each in gaps(course) if each.startswith(KEY.text)] == []
    return course.steps[KEY.text].set


def test_a_decision_has_what_it_depends_on(scene: Scene, disk: Disk) -> None:
    scene.exchange()
    assert scene.driver.core.state.exchanges[KEY.text].decision == ["a", "b", "c"]
    cut_power(scene, disk)
    assert scene.driver.core.state.exchanges[KEY.text].decision == ["a", "b", "c"]
    course = scene.course()
    assert course.steps[KEY.text].payloads == OF_ALL
    assert sound(scene) == ("a", "b", "c")


@pytest.mark.parametrize("how", ["gather", "reduce"])
def test_it_is_on_the_disk_before_the_decision_is(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And the decision in the record before anybody is told: the event log may lose it."""
    scene = Scene(tmp_path, outer={"exchange": how})
    scene.enrol()
    scene.driver.plan(0, "a")
    append, before = EventLog.append, list[int]()

    def looked(log: EventLog, event: e.Event) -> None:
        if isinstance(event, e.Decided):
            before.append(disk.kinds.count(s.CONTRIBUTION))
        append(log, event)

    monkeypatch.setattr(EventLog, "append", looked)
    named = {"payload": None} if how == "reduce" else {}
    for site in "abc":
        scene.commit(site, **named)
    for site in "abc":
        scene.vote(site)
    if how == "reduce":
        for site in "abc":
            scene.vote(site, phase="done", digests={}, statement=None)
    assert before == [3] * (2 if how == "reduce" else 1)
    assert disk.kinds[-1] == s.STEP


def test_not_every_statement_is_waited_for(scene: Scene, disk: Disk) -> None:
    """Once for what a decision depends on, and once for the decision."""
    before = disk.count
    scene.exchange()
    assert disk.count - before == 2


def test_a_report_is_on_the_disk_before_its_signature_is(
    scene: Scene, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a signed report would have no line in the metrics, as if somebody had removed it."""
    folder, order, fsync = scene.config.folder, list[str](), os.fsync
    metrics = RunMetrics(scene.config, folder, lambda record: None)
    scene.notary.writer.before_sync = metrics.sync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        number = os.fstat(descriptor).st_ino
        order.extend(
            path.name
            for path in (folder / "metrics.jsonl", disk.path)
            if path.stat().st_ino == number
        )

    monkeypatch.setattr(os, "fsync", noted)
    said = {"val_loss": 5.0, "after_round": -1}
    assert metrics.report("a", 0, "first_evaluation", said)
    rank = m.RankId(site="a", stage=0, shard=0)
    text = signed_report(
        SigningIdentity(scene.notary.run, rank, SIGNERS["a"]), "first_evaluation", 0, said
    )
    assert text is not None
    scene.driver.core.witness.state(m.StateRequest(rank=rank, statement=text))
    assert order == [], "reports alone are not waited for"
    scene.exchange()
    assert order == ["metrics.jsonl", ENTRIES, ENTRIES], "once for the reports since the last wait"


def test_votes_that_the_record_has_lost_are_asked_for_again(scene: Scene, disk: Disk) -> None:
    """Commitments were synced with another exchange's decision, votes were not."""
    scene.begin()
    scene.exchange(OTHER)
    for site in "ab":
        scene.vote(site)
    cut_power(scene, disk)
    assert scene.driver.core.state.exchanges[KEY.text].votes == {}
    assert scene.kinds().count(s.CONTRIBUTION) == 3
    scene.vote("c")
    assert scene.driver.core.state.exchanges[KEY.text].decision is None
    for site in "ab":
        scene.vote(site)
    assert scene.course().steps[KEY.text].payloads == OF_ALL
    assert sound(scene) == ("a", "b", "c")


def test_commitments_that_are_lost_leave_contributions_out(scene: Scene, disk: Disk) -> None:
    """Payloads were sent, and nobody can tell any more that they were committed to before. They
    stay in the sites' residuals."""
    scene.begin()
    scene.vote("a")
    cut_power(scene, disk)
    for site in "abc":
        scene.vote(site)
    verdicts = s.opened(scene.entries()[-1])[0].predicate["verdicts"]
    assert {said["code"] for said in verdicts.values()} == {"uncommitted"}
    assert sound(scene) == ()


def test_a_site_is_known_by_its_key(disk: Disk, tmp_path: Path) -> None:
    """It was let in, and its event is on the disk: so is the key that it signs with."""
    scene = Scene(tmp_path)
    scene.enrol()
    cut_power(scene, disk)
    scene.driver.plan(0, "a")
    scene.exchange()
    assert sound(scene) == ("a", "b", "c")


def test_a_run_keeps_its_id(disk: Disk, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    run = scene.notary.run
    cut_power(scene, disk)
    assert scene.notary.run == run


def test_states_and_resumes_are_kept(scene: Scene, disk: Disk) -> None:
    """A site says once what it holds: when it has its answer nobody asks it again."""
    said = {"run": scene.notary.run, "site": "a", "stage": 0, "round": 0, "kind": "initial",
            "files": {}}  # fmt: skip
    text = SIGNERS["a"].sign(s.Statement(s.CHECKPOINT, {"state": ONE, "tensors": ONE}, said))
    rank = m.RankId(site="a", stage=0, shard=0)
    scene.driver.core.witness.state(m.StateRequest(rank=rank, statement=text))
    assert disk.kinds[-1] == s.CHECKPOINT
    scene.notary.resumed(0, 0)
    assert disk.kinds[-1] == s.RESUME


def test_blocks_that_were_never_written(scene: Scene, disk: Disk, tmp_path: Path) -> None:
    """Some file systems know a file's new length before they have its bytes: those read as 0."""
    scene.exchange()
    whole = disk.path.read_bytes()
    scene.notary.log._beside.shutdown()
    scene.notary.writer.release()
    disk.path.write_bytes(whole + b"\0" * 100 + b'\n{"half"}\n' + b"\0" * 20)
    scene.notary = TransparencyLogSink.open(scene.config, scene.folder, scene.messages.append)
    scene.driver.options["notary"] = scene.notary
    scene.driver.reopen()
    assert disk.path.read_bytes() == whole
    assert (tmp_path / "run/record" / CHECKPOINT).exists()
    assert sound(scene) == ("a", "b", "c")
