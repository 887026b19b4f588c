"""The page served while a run goes on."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.report_runs import add, rounds, write_run

from dilocox.errors import ConfigError
from dilocox.tools.report.live import Server

pytestmark = pytest.mark.waits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "toy", rounds(0), phase="")


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def news(server: Server, since: str) -> dict[str, Any]:
    status, text = get(server, f"/news.json?since={since}")
    assert status == 200
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_what_is_new_is_told_once(server: Server, folder: Path) -> None:
    status, html = get(server, "/")
    assert status == 200
    assert 'data-live="news.json"' in html
    assert "connect-src &#39;self&#39;" in html
    first = news(server, "")
    assert "running" in first["sections"]["summary"]["html"]
    assert news(server, first["version"]) == {"version": first["version"]}
    add(folder, rounds(1))
    second = news(server, first["version"])
    changed = {
        id_ for id_, part in second["sections"].items()
        if part["stamp"] != first["sections"][id_]["stamp"]
    }  # fmt: skip
    assert {"summary", "learning", "sites"} <= changed
    assert "runfile" not in changed
    assert "step 40" in second["sections"]["learning"]["html"]


def test_other_names_and_places_are_refused(server: Server) -> None:
    assert get(server, "/", "evil.example:80")[0] == 403
    assert get(server, "/", "localhost:80")[0] == 200
    assert get(server, "/../run.toml")[0] == 404
    assert get(server, "/metrics.jsonl")[0] == 404


def test_a_folder_that_cannot_be_read_for_a_while_is_said(
    server: Server,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(server.source, "html", refuse)
        status, text = get(server, "/")
    assert status == 503
    assert text.startswith(f"{folder}: cannot be used (Permission denied)")
    assert get(server, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_said(server: Server, folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        Server(folder, "127.0.0.1", server.server_address[1])


def test_control_c_ends_it(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dilocox", "report", str(folder), "--live", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "ended\n"
    assert process.returncode == 0
