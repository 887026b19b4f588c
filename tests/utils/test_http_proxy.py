"""Requests to public addresses behind a proxy, which the environment names."""

from __future__ import annotations

import base64
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from dilocox.errors import ConfigError
from dilocox.record.bundles.zerog_rpc import JsonRpc
from dilocox.utils.fetch import fetch
from dilocox.utils.http_proxy import pool_for, proxy_of
from dilocox.utils.storage import opened

NAMES = ("http_proxy", "https_proxy", "no_proxy")


class Proxy(socketserver.ThreadingTCPServer):
    """Answers requests for any address itself, and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked = list[str]()
        self.users = list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.users.append(self.headers.get("Proxy-Authorization", ""))
        length = int(self.headers.get("Content-Length", 0))
        body = b'{"jsonrpc": "2.0", "id": 1, "result": 7}' if length else b"content"
        self.rfile.read(length)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_POST = do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The environment names it for http, and no other."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with Proxy() as made:
        monkeypatch.setenv("http_proxy", f"http://{made.url}")
        yield made
        made.shutdown()


def test_a_public_file_comes_through_the_proxy(proxy: Proxy) -> None:
    assert fetch("http://sponsor.invalid/terms.toml", 100) == b"content"
    assert proxy.asked == ["GET http://sponsor.invalid/terms.toml"]


def test_a_published_record_comes_through_the_proxy(proxy: Proxy) -> None:
    files, path = opened("http://runs.invalid/run", use_listings_cache=False)
    assert files.cat_file(f"{path}/index") == b"content"
    assert proxy.asked[-1] == "GET http://runs.invalid/run/index"


def test_a_server_of_a_chain_is_asked_through_the_proxy(proxy: Proxy) -> None:
    rpc = JsonRpc("node", "http://node.invalid:8545", 0.0, 5.0)
    assert rpc.call("eth_blockNumber", [], int, "read", "block") == 7
    assert proxy.asked == ["POST http://node.invalid:8545"]


def test_user_and_password_of_the_proxy_are_sent_to_it(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://ann:a%3Ab@{proxy.url}")
    fetch("http://sponsor.invalid/terms.toml", 100)
    assert proxy.users == ["Basic " + base64.b64encode(b"ann:a:b").decode()]


def test_hosts_of_no_proxy_are_asked_directly(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", ".firm.example")
    assert fetch(f"http://{proxy.url}/terms.toml", 100) == b"content"
    assert proxy.asked == ["GET /terms.toml"]  # this machine needs no proxy, whatever is named
    assert proxy_of("http://[::1]:80/a") is proxy_of("http://localhost/a") is None
    assert proxy_of("http://git.firm.example:8080/a") is None
    assert proxy_of("http://elsewhere.example/a") == f"http://{proxy.url}"
    assert proxy_of("https://elsewhere.example/a") is None


def test_a_proxy_of_another_kind_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://ann:secret@proxy.example:1080")
    with pytest.raises(ConfigError, match=r"the proxy socks5://proxy.example:1080 .* cannot be"):
        pool_for("https://sponsor.example/terms.toml")
