"""The command that takes log checkpoints elsewhere: called with each, never in the way."""

from __future__ import annotations

import sys
from pathlib import Path

from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, open_note
from dilocox.record.log.transparency_log import CHECKPOINT, check_log, read_log
from dilocox.record.writer.checkpoint_publisher import CheckpointPublisher
from tests.support.record_scene import Scene

COPY = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '--\\n')"


def copying(to: Path) -> list[str]:
    return [sys.executable, "-S", "-c", COPY, str(to)]


def kept(at: Path) -> list[str]:
    return at.read_text(encoding="utf-8").split("--\n")[:-1]


def test_the_last_checkpoint_is_anchored_before_it_closes(tmp_path: Path) -> None:
    anchor = CheckpointPublisher(copying(tmp_path / "kept"), 60.0)
    for number in range(5):
        anchor.take(f"checkpoint {number}\n")
    anchor.close()
    found = kept(tmp_path / "kept")
    # Those that came while it worked were overtaken by newer ones, in order.
    assert found[-1] == "checkpoint 4\n"
    assert found == sorted(found)
    assert anchor.trouble() is None


def test_a_checkpoint_is_anchored_once(tmp_path: Path) -> None:
    anchor = CheckpointPublisher(copying(tmp_path / "kept"), 60.0)
    for _ in range(3):
        anchor.take("the same\n")
    anchor.close()
    anchor.take("the same\n")
    assert kept(tmp_path / "kept") == ["the same\n"]


def test_trouble_is_told_once(tmp_path: Path) -> None:
    for command, why in (
        ([str(tmp_path / "missing")], "cannot be started (No such file or directory)"),
        (["/bin/sh", "-c", "echo no money >&2; exit 3"], "ended with 3 (no money)"),
    ):
        anchor = CheckpointPublisher(command, 60.0)
        anchor.take("one")
        anchor.close()
        assert anchor.trouble() == f"record.anchor: {command[0]} {why}"
        assert anchor.trouble() is None


def test_a_command_that_hangs_is_ended() -> None:
    anchor = CheckpointPublisher(["/bin/sleep", "600"], 0.2)
    anchor.take("one")
    anchor.close()
    assert anchor.trouble() == "record.anchor: /bin/sleep took longer than 0.2 s"


def test_a_log_is_anchored_as_it_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, record={"anchor": copying(tmp_path / "kept")})
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.exchange()
    folder = scene.config.folder / "record"
    scene.course()
    content = read_log(folder)
    key = NoteKey.parse(content.public)
    anchored = kept(tmp_path / "kept")
    assert anchored[-1] == (folder / CHECKPOINT).read_text(encoding="utf-8")
    sizes = [LogCheckpoint.parse(open_note(note, key)).size for note in anchored]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == check_log(content, key).size
    assert scene.messages == []


def test_a_run_goes_on_though_nothing_can_be_anchored(tmp_path: Path) -> None:
    scene = Scene(tmp_path, record={"anchor": [str(tmp_path / "missing")]})
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.exchange()
    scene.course()
    assert len(scene.messages) == 1
    assert scene.messages[0].startswith("record.anchor: ")
    assert scene.messages[0].endswith("; training goes on")
