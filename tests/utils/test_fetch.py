"""Small files from paths and web addresses: what cannot be read costs one line."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.utils.fetch import fetch
from dilocox.utils.storage import run_in_thread


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_request(self, *_: object) -> None:
        """Say nothing of a request."""


@pytest.fixture
def host() -> Iterator[str]:
    """HOST:PORT of a server that answers with the path it is asked for."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def refusal(place: str) -> str:
    """The error of `place`, which comes at once: nothing else ends a read of a pipe."""
    return str(run_in_thread(lambda: fetch(place, 10)).exception(timeout=60.0))


@pytest.mark.parametrize("scheme", ["http", "HTTP", "Http"])
def test_a_scheme_may_be_in_capitals(host: str, scheme: str) -> None:
    assert fetch(f"{scheme}://{host}/Abc", 10) == b"/Abc"
    assert refusal(f"{scheme}://user:pw@{host}/a") == (
        "the URL holds a user or a password; leave it out"
    )


def test_a_path_is_no_url_for_what_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("https", "http:", "https.toml", "a@b"):
        Path(name).write_bytes(b"12345")
        assert fetch(name, 5) == b"12345"
        with pytest.raises(ConfigError, match="larger than 4 bytes"):
            fetch(name, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "not a regular file"),
        ("link", "not a regular file"),
        ("folder", "Is a directory"),
        ("nothing", "No such file or directory"),
        ("null\0byte", "embedded null byte"),
        ("no\ud800text", "surrogates not allowed"),
    ],
)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    text = refusal(f"{tmp_path}/{name}")
    assert text.startswith(f"{tmp_path}/{name}: cannot be read (")
    assert text.endswith(f"{reason})")


def test_a_device_is_refused() -> None:
    assert refusal("/dev/null") == "/dev/null: cannot be read (not a regular file)"
