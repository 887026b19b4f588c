"""The benchmark of publishing beside training, around its measurements."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import storage
from dilocox.config.run_config import RunConfig

storage_size = storage.Storage.size


class FakeLab:
    """A lab without hosts."""

    def __init__(self, sites: list[str], link: str) -> None:
        self.sites, self.link, self.quotas = sites, link, {sites[0]: 0.5}

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Publisher:
    """A publisher that takes a hundredth of a core while it is let, as its signals say."""

    pid = 7

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.running, self.cpu, self.last = clock, True, 0.0, clock[0]
        self.code: int | None = None

    def taken(self) -> float:
        if self.running:
            self.cpu += (self.clock[0] - self.last) / 100
        self.last = self.clock[0]
        return self.cpu

    def send_signal(self, number: int) -> None:
        self.taken()
        assert self.running == (number == signal.SIGSTOP)
        self.running = not self.running

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def wait(self) -> int:
        assert self.code == -9
        return self.code


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A run in which a round takes 2 s, and 2.5 s beside the publisher."""
    clock = [0.0]
    made = Publisher(clock)

    def run(lab: FakeLab, config: RunConfig, warm_up: int, on_record: Any) -> None:
        assert (list(config.sites), warm_up) == (lab.sites, storage.WARM_UP)
        on_record({"kind": "plan"})
        for number in range(config.outer.rounds):
            clock[0] += 2.5 if made.running else 2.0
            on_record({"kind": "round", "round": number, "site": lab.sites[1], "time": -1.0})
            mine = {"time": clock[0], "wait_seconds": 0.25 if made.running else 0.0}
            on_record({"kind": "round", "round": number, "site": lab.sites[0], **mine})
            on_record({"kind": "round", "round": number})

    class FakeStorage:
        def __init__(self, lab: FakeLab, apart: bool) -> None:
            assert (lab.link, apart) == (storage.LINK, False)
            self.server = SimpleNamespace(pid=8)

        def publish(self, folder: Path) -> Any:
            return made

        def size(self, name: str) -> int:
            assert name == "beside"
            return 1_000_000

    for name, fake in {
        "Lab": FakeLab, "Storage": FakeStorage, "run": run, "PAIRS": 3,
        "unsupported_reason": lambda: None, "NEEDED": (),
    }.items():  # fmt: skip
        monkeypatch.setattr(storage, name, fake)
    monkeypatch.setattr("time.time", lambda: clock[0])
    monkeypatch.setattr(
        storage.common, "cpu_seconds", lambda pid: made.taken() if pid == 7 else clock[0] / 5
    )
    monkeypatch.setattr(storage.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(storage.common, "end_on_signals", lambda: None)
    return made


def test_each_pair_has_one_stretch_with_a_publisher(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    publisher: Publisher,
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["storage", "--json", str(file)])
    assert storage.main() == 0
    written = json.loads(file.read_text())
    assert [row["ratio"] for row in written["rows"]] == [0.8] * 3
    assert [row["publisher_cpu_share"] for row in written["rows"]] == [0.02] * 3  # of half a core
    found = written["settings"]["found"]
    assert (found["wait_alone"], found["wait_beside"]) == (0.0, 0.1)
    assert found["server_cores"] == 0.2
    assert (found["ratio"]["mean"], found["ratio"]["standard_error"]) == (0.8, 0.0)
    # It was let in the warm-up, and in three stretches of twelve rounds with a round before each.
    assert found["published_mbit"] == pytest.approx(8 / (2.5 * (storage.WARM_UP + 39)), abs=1e-3)
    assert "ratio: median 0.8000" in capsys.readouterr().out
    assert publisher.code == -9


def test_a_publisher_that_fails_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], publisher: Publisher
) -> None:
    publisher.code = 1
    monkeypatch.setattr(sys, "argv", ["storage"])
    assert storage.main() == 1
    assert "publishing has failed" in capsys.readouterr().err


def test_a_size_that_cannot_be_read_is_not_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    publisher: Publisher,
) -> None:
    """It was filed as 0 bytes and 0 Mbit/s. The pairs of an hour are kept."""
    ended = SimpleNamespace(communicate=lambda: ("", None))
    silent: Any = SimpleNamespace(_start=lambda *_: ended)
    assert storage_size(silent, "beside") is None
    file = tmp_path / "found.json"
    monkeypatch.setattr(storage.Storage, "size", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["storage", "--json", str(file)])
    assert storage.main() == 0
    found = json.loads(file.read_text())["settings"]["found"]
    assert (found["published_bytes"], found["published_mbit"]) == (None, None)
    assert "and sent an unknown number of bytes" in capsys.readouterr().out


@pytest.mark.parametrize(("told", "pairs"), [([], 3), (["--pairs", "2"], None)])
def test_fewer_pairs_do_not_replace_the_committed_ones(
    told: list[str],
    pairs: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    publisher: Publisher,
) -> None:
    committed = tmp_path / "storage-cpu.json"
    monkeypatch.setattr(storage, "RESULTS", committed)
    monkeypatch.setattr(sys, "argv", ["storage", *told])
    assert storage.main() == 0
    assert committed.exists() == (pairs is not None)
    if pairs is not None:
        assert len(json.loads(committed.read_text())["rows"]) == pairs


def test_both_kinds_of_stretch_come_first() -> None:
    assert storage.order(1) in ([True, False], [False, True])
    found = storage.order(40)
    assert found[::2] == [not second for second in found[1::2]]
    assert 10 < sum(found[::2]) < 30


def test_what_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "NEEDED", ("nothing_of_this_name",))
    monkeypatch.setattr(sys, "argv", ["storage"])
    assert storage.main() == storage.common.CANNOT
    assert "not installed: nothing_of_this_name" in capsys.readouterr().err
