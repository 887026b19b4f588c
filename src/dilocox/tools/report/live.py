"""Serves a run's page while the run goes on; the page polls for changed sections.

The server is read-only, and listens on this machine only unless another host is given. It refuses
requests whose `Host` header does not name it, so that no other web site can read the page through
a browser (DNS rebinding).
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dilocox.errors import ConfigError
from dilocox.tools.report.folder import read_run, stamp
from dilocox.tools.report.page import Page, build
from dilocox.tools.report.render import render, sections, stamps
from dilocox.utils.file_errors import file_problem
from dilocox.utils.host_header import names_server

NEWS = "news.json"


class Source:
    """The current page of a run. It is built again when the folder has changed. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read the run in `folder`. Raises `ConfigError` if no run is there."""
        self._folder = folder
        self._lock = threading.Lock()
        self._version = ""
        self._page: Page
        self._parts: dict[str, str] = {}
        self._renew()

    def _renew(self) -> None:
        version = stamp(self._folder)
        if version != self._version:
            self._page = build(read_run(self._folder), time.time(), live=True)
            self._parts = sections(self._page)
            self._version = version

    def html(self) -> str:
        """Return the HTML of the whole page."""
        with self._lock:
            self._renew()
            return render(self._page, NEWS)

    def news(self, since: str) -> dict[str, Any]:
        """Return the current version, and all sections unless `since` is the current version."""
        with self._lock:
            self._renew()
            if since == self._version:
                return {"version": self._version}
            marks = stamps(self._parts)
            return {
                "version": self._version,
                "made": self._page.made,
                "sections": {
                    id_: {"stamp": marks[id_], "html": html} for id_, html in self._parts.items()
                },
            }


class Server(ThreadingHTTPServer):
    """HTTP server of one run's page."""

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        """Listen at `host`:`port`.

        Raises `ConfigError` if `folder` has no run, or the server cannot listen there.
        """
        self.source = Source(folder)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{host}:{port}: cannot listen there ({reason}); give another port with --port, "
                "or --port 0 for any free port"
            ) from None
        self.host = host

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self.host}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, the changed sections, or 404."""
        place = urlsplit(self.path)
        if not names_server(self.headers.get("Host", ""), self.server.host):
            self._answer(403, "text/plain", "the Host header does not name this server\n")
        elif place.path == "/":
            self._made("text/html", self.server.source.html)
        elif place.path == f"/{NEWS}":
            since = parse_qs(place.query).get("since", [""])[0]
            self._made(
                "application/json", lambda: json.dumps(self.server.source.news(since))
            )  # fmt: skip
        else:
            self._answer(404, "text/plain", "no such page\n")

    def _made(self, kind: str, make: Any) -> None:
        try:
            text = make()
        except (ConfigError, OSError) as error:
            self._answer(503, "text/plain", f"{file_problem(error) or error}\n")
            return
        self._answer(200, kind, text)

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


def serve(folder: Path, host: str, port: int) -> None:
    """Serve the page of the run in `folder` until Ctrl-C. Raises `ConfigError` as `Server`."""
    with Server(folder, host, port) as server:
        try:
            print(f"{server.url} shows {folder}; Ctrl-C ends it", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended", flush=True)
