"""What `dilocox coordinator` prints, and that it can be typed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.transport import host_and_port
from dilocox.errors import TrainingError
from dilocox.record.log.run_end import has_summary
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.record.writer.one_writer import held
from dilocox.training.launch import coordinator_process, preflight
from dilocox.training.launch.run_folder import write_run_file

pytestmark = pytest.mark.waits


def coordinate(
    folder: Path, monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint, verbose: bool = False
) -> RunConfig:
    """The command's own lines, with nothing served."""

    def serve(*_: object, on_ready: Any, **__: object) -> dict[str, Any]:
        (folder / "coordinator").mkdir()
        on_ready(endpoint)
        return {"phase": "stopped", "reason": "", "summary": {}}

    monkeypatch.setattr(coordinator_process, "serve_run", serve)
    monkeypatch.setattr(preflight, "payload_sizes", lambda *_: None)
    monkeypatch.setattr(coordinator_process.Display, "summary", lambda *_: None)
    config = resolve_run(
        {"run": {"folder": str(folder)}, "model": {"architecture": {"model_type": "qwen3"}},
         "sites": {"paris": {}, "lyon": {}}}
    )  # fmt: skip
    coordinator_process.coordinate(
        config, run_file=Path("run.toml"), overrides=[], wait_for=None, resume=False,
        verbose=verbose,
    )  # fmt: skip
    return config


def run_in(folder: Path) -> RunConfig:
    """A run of one site."""
    return resolve_run(
        {"run": {"folder": str(folder)}, "model": {"architecture": {"model_type": "qwen3"}},
         "sites": {"paris": {}}}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://[::1]:29461", ("::1", 29461)),
        ("https://203.0.113.7:29400", ("203.0.113.7", 29400)),
    ],
)
@pytest.mark.parametrize("verbose", [False, True])
def test_the_printed_join_line_can_be_typed(
    url: str, place: tuple[str, int], verbose: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tokens = {"paris": "secret", "lyon": "other"}
    config = coordinate(tmp_path, monkeypatch, Endpoint(url, tokens, "operator"), verbose)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("; at each site run")
    for line, site in zip(lines[1:3], config.sites, strict=True):
        words = shlex.split(line)
        assert words[:2] == ["dilocox", "join"]
        assert host_and_port(f"https://{words[2]}") == place
        assert words[4] == site
        assert words[-2:] == ["--token-file", str(tmp_path / "coordinator" / "tokens" / site)]
    assert any("time-out" in line or "heartbeat" in line for line in lines[4:]) == verbose


def test_a_banned_site_has_no_join_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinate(tmp_path, monkeypatch, Endpoint("https://a:1", {"lyon": "other"}, "operator"))
    lines = capsys.readouterr().out.splitlines()
    assert "join" not in lines[1].split("(")[0]
    assert "site paris is banned; dilocox leave " in lines[1]
    assert "--site paris --unban" in lines[1]
    assert "dilocox join a:1 --site lyon" in lines[2]


def test_one_process_writes_a_folder_s_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second coordinator, or one that begins while a verdict is handed in, touches nothing."""
    monkeypatch.setattr(coordinator_process, "LOG_PATIENCE", 0.0)
    config = run_in(tmp_path)

    def begin() -> None:
        coordinator_process.serve_run(
            config, tmp_path, None, resume=False, wait_for=None, emit=print, on_ready=print
        )

    with held(tmp_path / "coordinator") as own:
        assert own
        with pytest.raises(TrainingError, match="another coordinator is running on this folder"):
            begin()
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator"]
    assert [path.name for path in (tmp_path / "coordinator").iterdir()] == ["record.lock"]
    reached: list[object] = []
    monkeypatch.setattr(
        coordinator_process, "serve", lambda *_, **options: reached.append(options) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        begin()
    assert reached
    with held(tmp_path / "coordinator") as own:
        assert own, "who ends lets go"


def test_a_run_file_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes its place as a whole: a power cut leaves no part of a run file."""
    path = tmp_path / "run.toml"
    config = coordinate(tmp_path, monkeypatch, Endpoint("https://a:1", {}, "operator"))
    before, text = path.stat(), path.read_text()
    write_run_file(config)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_text(text[:20])
    with path.open() as reader:
        write_run_file(config)
        assert reader.read() == text[:20], "the earlier file is replaced, and not overwritten"
    assert path.read_text() == text
    assert list(tmp_path.glob(".*")) == []


def test_reports_are_on_the_disk_before_the_record_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_in(tmp_path)
    synced: list[Path] = []

    def serve(*given: Any, notary: TransparencyLogSink, **_: object) -> None:
        given[3].on_report("paris", 0, "evaluation", {"val_loss": 3.0, "after_round": 0})
        fsync = os.fsync

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", noted)
            notary.sync()
        raise ZeroDivisionError

    monkeypatch.setattr(coordinator_process, "serve", serve)
    with pytest.raises(ZeroDivisionError):
        coordinator_process.serve_run(
            config, tmp_path, None, resume=False, wait_for=None, emit=print, on_ready=print
        )
    assert synced[0] == tmp_path.resolve() / "metrics.jsonl"


def test_a_start_takes_the_end_of_an_earlier_process_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_in(tmp_path)
    ended: list[bool] = []
    monkeypatch.setattr(
        coordinator_process, "serve", lambda *_, **__: ended.append(has_summary(tmp_path)) or 1 / 0
    )
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            coordinator_process.serve_run(
                config, tmp_path, None, resume=False, wait_for=None, emit=print, on_ready=print
            )
        (tmp_path / "summary.json").write_text("{}")
        os.utime(tmp_path / "record" / "log.pub", (1.0, 1.0))
        assert has_summary(tmp_path)
    assert ended == [False, False]
