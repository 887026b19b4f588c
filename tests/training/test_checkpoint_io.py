"""Checkpoints: exact, checked, never half, and never in the way of the training."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from dilocox.config.network import NetworkSection
from dilocox.coordinator.client import heartbeat as control_module
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import BeatReply
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import CheckpointError
from dilocox.training import checkpoint_io, checkpointing
from dilocox.training.checkpoint_io import RankCheckpointer, exists, load, rank_folder
from dilocox.utils.processes import CONTEXT
from tests.support.dying import die

# Without a process group, as here, torch says each time that there is none.
pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
RANK = ("paris", 0, 1)


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "live/w": torch.randn(5, 7, generator=generator) * value,
        "live/half": torch.randn(4, generator=generator).bfloat16(),
        "inner/step": torch.tensor(12.0),
        "inner/empty": torch.empty(0, 3),
        "outer/0/anchor": torch.tensor([float("nan"), float("inf"), -0.0, value]),
        "random/cpu": torch.arange(9, dtype=torch.uint8),
        "pending/0": torch.randn(0),
    }


class Saver:
    """A checkpointer of one rank, and what it reported."""

    def __init__(self, root: str, keep: int = 2) -> None:
        self.digests: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.root = root
        self.writer = RankCheckpointer(root, *RANK, keep)

    def save(self, tick: int, values: dict[str, torch.Tensor] | None = None) -> str | None:
        self.writer.save(
            tick,
            tensors() if values is None else values,
            {"round": tick // 10, "pending": [{"key": "0/1"}]},
            self.digests.__setitem__,
            self.failures.__setitem__,
        )
        self.writer.wait()
        return self.digests.get(tick)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes() if (
        left.dtype != torch.bfloat16
    ) else torch.equal(left.view(torch.int16), right.view(torch.int16))  # fmt: skip


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_what_is_read_is_what_was_written_to_the_bit(tmp_path: Path, place: str) -> None:
    root = str(tmp_path / "c") if place == "folder" else f"memory://{tmp_path.name}/c"
    digest = Saver(root).save(40)
    assert digest is not None
    assert exists(root, 40, *RANK)
    loaded = load(root, 40, *RANK, digest)
    assert set(loaded.tensors) == set(tensors())
    for name, tensor in tensors().items():
        assert same_bits(loaded.tensors[name], tensor), name
    assert loaded.state == {
        "format": checkpoint_io.FORMAT_VERSION,
        "tick": 40,
        "round": 4,
        "pending": [{"key": "0/1"}],
    }


def test_a_rank_without_tensors(tmp_path: Path) -> None:
    digest = Saver(str(tmp_path)).save(1, {})
    assert digest is not None
    assert load(str(tmp_path), 1, *RANK, digest).tensors == {}


def test_the_snapshot_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    live = torch.ones(1000)
    saver = Saver(str(tmp_path))
    saver.writer.save(1, {"w": live}, {}, saver.digests.__setitem__, saver.failures.__setitem__)
    live.zero_()
    saver.writer.wait()
    assert torch.equal(
        load(str(tmp_path), 1, *RANK, saver.digests[1]).tensors["w"], torch.ones(1000)
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "files.json"])
@pytest.mark.parametrize("damage", ["changed", "shortened", "missing"])
def test_a_damaged_file_is_named_and_nothing_is_read(
    tmp_path: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = Saver(str(tmp_path)).save(7)
    assert digest is not None
    file = Path(rank_folder(str(tmp_path), 7, *RANK)) / "write-1" / name
    content = file.read_bytes()
    if damage == "changed":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "shortened":
        file.write_bytes(content[:-1])
    else:
        file.unlink()

    def read(*_: object) -> NoReturn:
        raise AssertionError("an index was read before it was checked")

    monkeypatch.setattr(checkpoint_io.checkpoint_index, "from_json", read)
    with pytest.raises(CheckpointError) as caught:
        load(str(tmp_path), 7, *RANK, digest)
    gone = name == "files.json" and damage == "missing"
    assert ("no checkpoint is here" if gone else name) in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_io, "FORMAT_VERSION", 2)
    digest = Saver(str(tmp_path)).save(7)
    monkeypatch.undo()
    assert digest is not None
    with pytest.raises(CheckpointError, match="format 2, this version reads 1"):
        load(str(tmp_path), 7, *RANK, digest)


def _killed_at(point: str, root: str, tick: int) -> None:
    """Write a checkpoint in this process and die on the way."""
    from fsspec.implementations.local import LocalFileSystem

    if point == "tensors":
        FsspecWriter.finish = die  # type: ignore[method-assign]
    elif point == "digests":
        checkpoint_io._sha256 = die
    else:
        LocalFileSystem.mv = die
    Saver(root).save(tick, tensors(2.0))


@pytest.mark.parametrize("point", ["tensors", "digests", "name"])
@pytest.mark.parametrize("tick", [10, 20])
def test_a_kill_while_writing_leaves_the_last_checkpoint_whole(
    tmp_path: Path, point: str, tick: int
) -> None:
    """Also at the tick of the last checkpoint: a run that is resumed and stopped at once writes
    the same tick again."""
    root = str(tmp_path)
    torch.set_num_threads(1)
    saver = Saver(root)
    digest = saver.save(10)
    assert digest is not None
    process = CONTEXT.Process(target=_killed_at, args=(point, root, tick))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = list(Path(rank_folder(root, tick, *RANK)).rglob("*.distcp"))
    assert len(left) == (2 if tick == 10 else 1), "the kill came before anything was written"
    assert not exists(root, 20, *RANK)
    assert torch.equal(load(root, 10, *RANK, digest).tensors["live/w"], tensors()["live/w"])
    # The next start writes the same tick whole, and what was half is gone.
    again = saver.save(tick, tensors(3.0))
    assert again is not None
    assert torch.equal(load(root, tick, *RANK, again).tensors["live/w"], tensors(3.0)["live/w"])
    assert len(list(Path(rank_folder(root, tick, *RANK)).iterdir())) == 1


def test_a_tick_written_again_replaces_the_first_only_when_it_is_recorded(tmp_path: Path) -> None:
    root = str(tmp_path)
    saver = Saver(root)
    first = saver.save(10)
    assert first is not None

    def refuse(tick: int, digest: str) -> None:
        # Both are there until the coordinator knows of the new one.
        assert load(root, 10, *RANK, digest).state["tick"] == 10
        raise CheckpointError("coordinator: no answer")

    saver.writer.save(10, tensors(2.0), {}, refuse, saver.failures.__setitem__)
    saver.writer.wait()
    assert "coordinator: no answer" in saver.failures[10]
    assert torch.equal(load(root, 10, *RANK, first).tensors["live/w"], tensors()["live/w"])


def ticks(root: Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("tick-")) for entry in root.iterdir())


def test_the_newest_are_kept_over_restarts_too(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), keep=2)
    for tick in (10, 20, 30):
        assert saver.save(tick)
    assert ticks(tmp_path) == [20, 30]
    resumed = Saver(str(tmp_path), keep=2)
    assert resumed.save(40)
    assert ticks(tmp_path) == [30, 40]


def test_other_ranks_files_are_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "tick-00000010" / "lyon" / "stage0-shard0" / "write-1" / "x"
    other.parent.mkdir(parents=True)
    other.write_text("x", encoding="utf-8")
    saver = Saver(str(tmp_path), keep=2)
    for tick in (10, 20, 30):
        assert saver.save(tick)
    assert other.exists()
    assert not Path(rank_folder(str(tmp_path), 10, *RANK)).exists()
    assert ticks(tmp_path) == [10, 20, 30]


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """Errors that end a thread."""
    found: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda said: found.append(said.exc_value))
    return found


def test_a_checkpoint_that_is_moved_away_at_once_is_not_missed(
    tmp_path: Path, uncaught: list[BaseException | None]
) -> None:
    saver = Saver(str(tmp_path))
    rest = tmp_path / "tick-00000010" / "rest"
    rest.mkdir(parents=True)

    def take(tick: int, _: str) -> None:
        shutil.rmtree(rank_folder(str(tmp_path), tick, *RANK))

    saver.writer.save(20, tensors(), {}, take, saver.failures.__setitem__)
    saver.writer.wait()
    assert (uncaught, saver.failures) == ([], {})
    assert rest.is_dir()
    assert saver.save(30)


def test_older_checkpoints_may_stay_whatever_the_storage_raises(
    tmp_path: Path,
    uncaught: list[BaseException | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Storage over a network has errors of its own."""
    remove = MemoryFileSystem.rm

    def refuse(self: object, path: str, recursive: bool = False, **options: object) -> None:
        if recursive:
            raise RuntimeError("503 Slow Down")
        remove(self, path, recursive, **options)

    saver = Saver(f"memory://{tmp_path.name}/c", keep=2)
    monkeypatch.setattr(MemoryFileSystem, "rm", refuse)
    for tick in (10, 20, 30):
        assert saver.save(tick)
    assert (uncaught, saver.failures) == ([], {})
    assert caplog.text.count("older checkpoints were not deleted: RuntimeError: 503 Slow Down") == 1
    monkeypatch.undo()
    assert saver.save(40)
    assert [tick for tick in (10, 20, 30, 40) if exists(saver.root, tick, *RANK)] == [30, 40]


def test_checkpoints_of_a_course_that_was_left_do_not_push_out_good_ones(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), keep=2)
    for tick in (10, 20, 90):
        assert saver.save(tick)
    # 20 and 90 are there; the run is resumed at 20.
    resumed = Saver(str(tmp_path), keep=2)
    assert resumed.save(30)
    assert {20, 30} <= set(ticks(tmp_path))


def test_a_failed_write_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(str(tmp_path))
    assert saver.save(10)
    whole: Callable[..., Any] = checkpoint_io.dcp.save

    def full(*arguments: Any, **options: Any) -> NoReturn:
        whole(*arguments, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_io.dcp, "save", full)
    assert saver.save(20) is None
    assert "No space left on device" in saver.failures[20]
    # What could not be finished does not fill the disk any longer.
    assert not list(Path(rank_folder(str(tmp_path), 20, *RANK)).rglob("*.distcp"))
    assert exists(str(tmp_path), 10, *RANK)
    monkeypatch.undo()
    assert saver.save(30)
    assert set(saver.failures) == {20}


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    saver = Saver(str(tmp_path / "file"))
    assert saver.save(10) is None
    assert saver.failures[10]


def test_the_last_one_that_all_ranks_have_stays(tmp_path: Path) -> None:
    """Where another rank cannot write any more, the run can still be resumed from it."""
    whole: int | None = None
    writer = checkpoint_io.RankCheckpointer(str(tmp_path), "a", 0, 0, 2, lambda: whole)
    failed: list[str] = []
    for tick, newest in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 4)):
        whole = newest
        writer.save(
            tick, {"x": torch.ones(3)}, {}, lambda *_: None, lambda _, why: failed.append(why)
        )
        writer.wait()
        there = {item.name for item in tmp_path.iterdir()}
        assert f"tick-{newest:08d}" in there
    assert not failed
    assert there == {"tick-00000004", "tick-00000005"}


# --- storage that is slow, full or read-only ---


def test_a_write_under_way_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, whole = threading.Event(), checkpoint_io.dcp.save

    def slow(*arguments: Any, **options: Any) -> Any:
        assert held.wait(60)
        return whole(*arguments, **options)

    monkeypatch.setattr(checkpoint_io.dcp, "save", slow)
    writer = RankCheckpointer(str(tmp_path), *RANK, 2)
    written: list[int] = []
    assert writer.behind is None
    writer.save(7, tensors(), {}, lambda tick, _: written.append(tick), lambda *_: None)
    assert writer.behind is not None
    assert writer.behind[0] == 7
    assert writer.behind[1] >= 0.0
    assert written == []
    held.set()
    writer.wait()
    assert (writer.behind, written) == (None, [7])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("trouble", "said"), [("full", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(
    disk: Path, trouble: str, said: str
) -> None:
    saver = Saver(str(disk))
    digest = saver.save(10)
    assert digest
    if trouble == "full":
        assert saver.save(20, {"large": torch.randn(100_000)}) is None
        # Nothing of it is left: the next one has room again.
        assert not list(Path(rank_folder(str(disk), 20, *RANK)).rglob("*.distcp"))
        assert saver.save(30)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert saver.save(20) is None
    assert said in saver.failures[20]
    assert "\n" not in saver.failures[20]
    loaded = load(str(disk), 10, *RANK, digest)
    assert same_bits(loaded.tensors["live/w"], tensors()["live/w"])


class Beats:
    """A coordinator that counts beats."""

    def __init__(self) -> None:
        self.count = 0

    def beat(self, *_: object) -> BeatReply:
        self.count += 1
        return BeatReply.model_validate(
            {
                "phase": "stopping", "reason": "", "role": "active", "donor": None,
                "founder": "paris", "lease": 0, "stop_tick": 0,
                "epoch": {"id": 0, "members": []}, "entering": [],
            }
        )  # fmt: skip

    building = beat


@pytest.mark.parametrize("slow", ["checkpoint", "record", "export"])
def test_a_rank_lives_while_it_waits_for_a_disk_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """The disk takes longer than a rank that hangs is let live, and the site is not lost."""
    often = max(checkpoint_io.LOOK, checkpointing.MEETING)
    assert often < Timeouts.derive(NetworkSection(link_timeout=5.0, heartbeat=2.5)).stall
    stall, written, now, beats = 60.0, list[int](), [0.0], Beats()
    moved, attempt, hangs = threading.Condition(), checkpoint_io._attempt, list[object]()
    monkeypatch.setattr(control_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(control_module.log, "error", lambda *said: hangs.append(said))

    def touch() -> None:
        """A rank says just in time that it lives: time goes on with this alone."""
        with moved:
            now[0] += 0.9 * stall
            control.touch()
            moved.notify_all()

    def slowly(*given: Any) -> Any:
        end, beaten = now[0] + 3 * stall, beats.count
        with moved:  # the disk itself
            assert moved.wait_for(lambda: now[0] > end and beats.count > beaten + 3, 60.0)
        return attempt(*given) if given else None

    def stage(path: Path, *_: object) -> None:
        slowly()
        path.parent.mkdir()

    monkeypatch.setattr(checkpoint_io, "_attempt", slowly if slow == "checkpoint" else attempt)
    monkeypatch.setattr(checkpointing, "capture", lambda own: (tensors(), {}))
    monkeypatch.setattr(checkpointing, "MEETING", 0.1)
    monkeypatch.setattr(checkpointing, "whole_anchor", lambda rank: {})
    monkeypatch.setattr(checkpointing, "write_stage_file", stage)
    monkeypatch.setattr(checkpointing, "finish_model_folder", lambda *_: None)
    died = list[object]()
    control = RankControl(beats, 0.02, stall, 60.0, died.append)
    control.start()
    checkpointer = object.__new__(checkpointing.Checkpointer)
    checkpointer._writer, checkpointer._recorded = RankCheckpointer(str(tmp_path), *RANK, 2), None
    checkpointer._touch, checkpointer._shared = touch, False
    checkpointer._record = cast(
        Any, SimpleNamespace(wait=slowly if slow == "record" else lambda: None)
    )
    checkpointer._config = cast(
        Any, SimpleNamespace(checkpoint=SimpleNamespace(hugging_face=slow == "export"),
                             folder=tmp_path, model=SimpleNamespace(revision=None, own=False))
    )  # fmt: skip
    checkpointer._files = cast(Any, SimpleNamespace(tokenizer_folder=None, ends_of_turn=()))
    rank = SimpleNamespace(
        place=SimpleNamespace(site="paris", stage=0, shard=0, leads=True),
        mesh=SimpleNamespace(stages=1, gather_names=lambda names: [names]),
        blueprint=SimpleNamespace(hf_config=None, adapter=None),
        model=SimpleNamespace(saved_buffers=dict),
    )  # fmt: skip
    at = SimpleNamespace(tick=16, round=2, slot=0)
    own: Any = SimpleNamespace(at=at, rank=rank, site="paris")
    checkpointer._client = cast(
        Any, SimpleNamespace(checkpoint=lambda tick, *_: written.append(tick), report=print)
    )
    plan: Any = SimpleNamespace(kind="train", members={"paris": None})
    checkpointer.save(own, plan, last=True)
    checkpointer.wait()
    control.close()
    assert now[0] > 3 * stall
    assert written == [16]
    assert not hangs, "it never counted as hanging"
    assert not died


def test_ranks_meet_again_while_one_of_them_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No meeting waits for a disk; what failed at one is said at all."""
    monkeypatch.setattr(checkpointing, "MEETING", 0.01)
    said = [["", "busy"], ["", "busy"], ["disk full", ""]]
    checkpointer = object.__new__(checkpointing.Checkpointer)
    touched: list[int] = []
    checkpointer._touch = lambda: touched.append(1)
    rank: Any = SimpleNamespace(
        mesh=SimpleNamespace(gather_names=lambda names: [names, said.pop(0)])
    )
    assert checkpointer._written(rank, Path("model"), None) == "disk full"
    assert (said, len(touched)) == ([], 3)

    def fails() -> None:
        raise OSError("read-only")

    rank.mesh.gather_names = lambda names: [names]
    assert checkpointer._written(rank, Path("model"), fails) == "model: read-only"


def test_slow_storage_does_not_hold_training_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is due while the one before is still written is left out and reported."""
    monkeypatch.setattr(checkpointing, "capture", lambda own: ({}, {}))
    said: list[str] = []
    saved: list[int] = []
    waited: list[int] = []
    writer = SimpleNamespace(
        behind=(8, 42.3),
        wait=lambda touch: waited.append(1),
        save=lambda tick, *rest: saved.append(tick),
    )
    checkpointer = object.__new__(checkpointing.Checkpointer)
    checkpointer._writer, checkpointer._recorded = writer, None  # type: ignore[assignment]
    checkpointer._touch = lambda: None
    checkpointer._config = cast(
        Any, SimpleNamespace(checkpoint=SimpleNamespace(hugging_face=False))
    )
    own: Any = SimpleNamespace(at=SimpleNamespace(tick=16, round=2, slot=0))
    checkpointer._client = cast(
        Any, SimpleNamespace(report=lambda round_, what, kind: said.append(what["text"]))
    )
    checkpointer.save(own, None)
    assert (saved, waited) == ([], [])
    assert said == [
        "checkpoint after slot 16 was skipped: writing the checkpoint after slot 8 has taken 42 s "
        "so far; the storage is slow"
    ]
    checkpointer.save(own, None, last=True)
    assert (saved, waited) == ([16], [1]), "the last one is waited for"


@pytest.mark.parametrize("shared", [True, False])
def test_the_ranks_of_a_site_agree_whether_a_model_is_written_beside_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: bool
) -> None:
    """A rank whose disk is slow skips its checkpoint; a rank that asks early has no plan."""
    monkeypatch.setattr(checkpointing, "capture", lambda own: ({}, {}))
    met: list[str] = []
    exported: list[Path] = []

    def rank(
        behind: tuple[int, float] | None, other: str
    ) -> tuple[checkpointing.Checkpointer, Any]:
        made = object.__new__(checkpointing.Checkpointer)
        made._writer = cast(
            Any, SimpleNamespace(behind=behind, wait=lambda _: None, save=lambda *_: None)
        )
        made._recorded, made._touch, made._shared = None, lambda: None, shared
        config = SimpleNamespace(checkpoint=SimpleNamespace(hugging_face=True), folder=tmp_path)
        made._config = cast(Any, config)
        made._client = cast(Any, SimpleNamespace(report=lambda *_, **__: None))
        monkeypatch.setattr(made, "export", lambda _, folder: exported.append(folder) or "")

        def gather(names: list[str]) -> list[list[str]]:
            met.extend(names[:1])
            return [names, [other, ""][: len(names)]]

        place = SimpleNamespace(leads=False)  # the leading rank renames the folder
        mesh = SimpleNamespace(gather_names=gather)
        at = SimpleNamespace(tick=16, round=2, slot=0)
        return made, SimpleNamespace(
            at=at, site="paris", rank=SimpleNamespace(place=place, mesh=mesh)
        )

    plan: Any = SimpleNamespace(kind="train", members={"paris": None, "lyon": None})
    for behind, given, other in (((8, 9.0), plan, ""), (None, None, ""), (None, plan, "no")):
        checkpointer, own = rank(behind, other)
        checkpointer.save(own, given)
        assert exported == []
    assert met == ["no", "no", ""]
    checkpointer, own = rank(None, "")
    checkpointer.save(own, plan)
    assert exported == [tmp_path / "model-tick-00000016.part"]
