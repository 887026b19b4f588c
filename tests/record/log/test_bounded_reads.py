"""A stranger's web server that sends without end, or more than the record allows."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.errors import RecordError
from dilocox.record.log import blob_store, bounded_reads
from dilocox.record.log.blob_store import MissingError, Store, Stores
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, PUBLIC, LogWriter
from dilocox.record.verify import remote
from dilocox.record.verify.remote import fetched

PIECE = b'<a href="x">' * 8192


class Server:
    """Serves a folder; `endless` paths are streamed until the reader hangs up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.endless, self.sent = folder, set[str](), 0
        self.ranges = False
        """An answer without end says that it is the range that was asked for."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[Server, str]]:
    server = Server(folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            if unquote(self.path) in server.endless:
                self.send_response(200)
                self.end_headers()
            else:
                super().do_HEAD()

        def do_GET(self) -> None:
            if unquote(self.path) not in server.endless:
                super().do_GET()
                return
            self.send_response(206 if server.ranges else 200)
            if server.ranges:
                self.send_header("Content-Range", "bytes 0-9/10")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(PIECE)
                    server.sent += len(PIECE)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield server, f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What lies behind a URL: a log of one entry that is no statement, and a model."""
    record = tmp_path / "run" / "record"
    writer = LogWriter(record, "test/log", Ed25519PrivateKey.generate())
    writer.append("an entry")
    writer.cover()
    writer.close()
    (record.parent / "model").mkdir()
    (record.parent / "model" / "config.json").write_text("{}")
    (record.parent / "run.toml").write_text("")
    return record.parent


def test_a_run_behind_a_url_is_copied(run: Path) -> None:
    with serving(run) as (_, url), fetched(url) as found:
        copied = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
        assert copied == {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
        assert (found / "record" / ENTRIES).read_bytes() == (run / "record" / ENTRIES).read_bytes()


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        *(f"/record/{name}" for name in (CHECKPOINT, PUBLIC, ENTRIES)),
        "/run.toml",
        "/metrics.jsonl",
        "/model/",
        "/model/config.json",
    ],
)
def test_no_file_of_a_run_is_read_without_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, path: str, ranges: bool
) -> None:
    for name in ("SMALL_BYTES", "BESIDE_WEIGHTS"):
        monkeypatch.setattr(remote, name, 1 << 20)
    monkeypatch.setattr(remote, "_weights", lambda folder, url: 0)
    monkeypatch.setattr(bounded_reads, "PAGE_BYTES", 1 << 20)
    with serving(run) as (server, url):
        server.endless, server.ranges = {path}, ranges
        with pytest.raises(RecordError, match=r"larger than the [0-9,]+ bytes"), fetched(url):
            pass
        assert server.sent < 64 << 20, "what lies in buffers on the way is all there is beyond"


@pytest.mark.parametrize("ranges", [False, True])
def test_no_object_of_a_store_is_read_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    data = bytes(1 << 20)
    digest = Store(str(tmp_path / "store")).put(data)
    monkeypatch.setattr(blob_store, "DOCUMENT_BYTES", 0)
    with serving(tmp_path) as (server, url):
        there = Stores([Store(f"{url}/store")], most=1000)
        with pytest.raises(RecordError, match="larger than the 1,000 bytes"):
            there.get(digest)
        there.allow(1 << 19)
        assert there.get(digest) == data
        server.ranges = ranges
        server.endless = {f"/store/sha256/{digest[:2]}/{digest[2:]}"}
        with pytest.raises(RecordError, match="larger than the 1,048,576 bytes"):
            there.get(digest)
        assert server.sent < 64 << 20


def test_no_more_of_a_signed_tensor_is_read_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Store(str(tmp_path / "store"))
    small, large = (own.put(bytes([n]) * size) for n, size in ((1, 4000), (2, 1 << 20)))
    monkeypatch.setattr(blob_store, "DOCUMENT_BYTES", 100)
    with serving(tmp_path) as (server, url):
        there = Stores([Store(f"{url}/store")], most=100)
        signed = [
            TensorDigest("a", "float32", (1000,), small),
            TensorDigest("b", "float32", (1 << 18,), large),
        ]
        there.expect(signed[:1])
        assert len(there.get(small)) == 4000
        with pytest.raises(RecordError, match="larger than the 8,100 bytes"):
            there.get(large)
        there.expect(signed)
        assert len(there.get(large)) == 1 << 20
        # What is signed of another tensor allows this one nothing.
        server.endless = {f"/store/sha256/{small[:2]}/{small[2:]}"}
        with pytest.raises(RecordError, match="larger than the 4,100 bytes"):
            there.get(small)


def test_objects_in_windows_are_found_by_links(tmp_path: Path) -> None:
    window = Store(str(tmp_path / "store")).window("lyon/0.0", 4)
    digest = window.put(b"abc")
    with serving(tmp_path) as (_, url):
        assert Store(f"{url}/store").get(digest) == b"abc"
        with pytest.raises(MissingError):
            Store(f"{url}/store").get(hashlib.sha256(b"other").hexdigest())


def test_folders_without_end_are_not_walked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("".join(f'<a href="{n}/">' for n in range(50)))
    for number in range(50):
        (tmp_path / str(number)).symlink_to(tmp_path)
    monkeypatch.setattr(bounded_reads, "NAMES", 120)
    with serving(tmp_path) as (_, url):
        files = fsspec.filesystem("http")
        with pytest.raises(RecordError, match="names more than 120 files and folders"):
            list(bounded_reads.find(files, url, 99))
        assert bounded_reads.names(files, url)[:2] == [("0", True), ("1", True)]
        assert list(bounded_reads.find(files, url, 1)) == []
