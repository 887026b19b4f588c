"""The benchmark of publishing beside training, around its measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import storage
from dilocox.config.run_config import RunConfig


class FakeLab:
    """A lab without hosts."""

    def __init__(self, sites: list[str], link: str) -> None:
        self.sites, self.link, self.quotas = sites, link, {sites[0]: 0.5}

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return


class FakeStorage:
    """A storage that notes what is published."""

    published: list[str] = []  # noqa: RUF012 - of all of them

    def __init__(self, lab: FakeLab) -> None:
        assert lab.link == storage.LINK

    def publish(self, folder: Path) -> Any:
        FakeStorage.published.append(folder.name)
        return SimpleNamespace(pid=7, poll=lambda: None, kill=lambda: None, wait=lambda: 0)

    def size(self, name: str) -> int:
        assert name == FakeStorage.published[-1]
        return 1000


def test_pairs_alternate_and_only_one_run_of_each_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []
    clock = [0.0]

    def run(lab: FakeLab, config: RunConfig, warm_up: int, on_record: Any) -> Any:
        assert list(config.sites) == lab.sites
        trained.append(config.run.name)
        on_record({"kind": "plan"})
        for number in range(10):
            clock[0] += 2.0
            on_record({"kind": "round", "round": number})
        return SimpleNamespace(tokens_per_second=95.0 if "beside" in trained[-1] else 100.0)

    for name, fake in {
        "Lab": FakeLab, "Storage": FakeStorage, "run": run, "PAIRS": 3,
        "unsupported_reason": lambda: None, "NEEDED": (),
    }.items():  # fmt: skip
        monkeypatch.setattr(storage, name, fake)
    monkeypatch.setattr("time.time", lambda: clock[0])
    # Until the measured rounds it takes a whole core, and then a hundredth of a core.
    taken = lambda pid: clock[0] if clock[0] <= 8.0 else 8.0 + (clock[0] - 8.0) / 100  # noqa: E731
    monkeypatch.setattr(storage.common, "cpu_seconds", taken)
    monkeypatch.setattr(storage.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(storage.common, "end_on_signals", lambda: None)
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["storage", "--json", str(file)])
    assert storage.main() == 0
    assert trained == ["alone0", "beside0", "beside1", "alone1", "alone2", "beside2"]
    assert FakeStorage.published == ["beside0", "beside1", "beside2"]
    rows = json.loads(file.read_text())["rows"]
    assert [row["ratio"] for row in rows] == [0.95] * 3
    assert rows[0]["publisher_cpu_share"] == 0.02
    assert "ratio 0.950 (0.950 to 0.950)" in capsys.readouterr().out


def test_what_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "NEEDED", ("nothing_of_this_name",))
    monkeypatch.setattr(sys, "argv", ["storage"])
    assert storage.main() == storage.common.CANNOT
    assert "not installed: nothing_of_this_name" in capsys.readouterr().err
