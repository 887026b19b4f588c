"""A web server that answers every request with success and something else."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator


class _Nonsense(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.send_header("Last-Modified", self.date_time_string())
        self.send_header("ETag", '"5"')
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            self.wfile.write(b"[5]\n")

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815 - names of the library

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def nonsense() -> Iterator[int]:
    """Port of such a server on 127.0.0.1."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Nonsense) as lying:
        threading.Thread(target=lying.serve_forever, daemon=True).start()
        yield int(lying.server_address[1])
        lying.shutdown()
