"""Bundles in S3, at a real server process that dies, hangs and lies."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.bundled_run import CutPlace, publisher, reasons, verdicts, verified
from tests.support.fault_proxy import FaultProxy
from tests.support.nonsense_server import nonsense
from tests.support.skips import need

from dilocox.errors import RecordError
from dilocox.record.bundles import place
from dilocox.record.bundles.place import Place, WrongPlaceError
from dilocox.record.bundles.publication import INDEX, Publication
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.statements import Signer
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.storage.follow import publish_once, publish_to_the_end

need("s3fs", "moto", "flask", "flask_cors")

pytestmark = pytest.mark.waits
BUCKET = "runs"


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = FaultProxy(port)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the S3 server ended"
            time.sleep(0.1)
        yield found
    finally:
        found.close()
        server.terminate()
        server.wait()


@pytest.fixture
def storage(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system of s3fs with an empty bucket, as the user's own settings make it."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key-of-somebody",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(place, "SLOWEST", 10**9)
    s3fs.S3FileSystem.clear_instance_cache()
    proxy.become("pass")
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    proxy.become("pass")
    files.rm(BUCKET, recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def run(original: Path) -> Path:
    """The run itself, which no test here changes."""
    return original


URL = f"s3://{BUCKET}/public/old"


def published(files: Any) -> dict[str, Any]:
    """Last change of each object of the bucket."""
    return {path: files.info(path)["LastModified"] for path in files.find(BUCKET)}


def test_a_run_is_verified_from_s3_alone(run: Path, storage: Any) -> None:
    publish_once(publisher(run, Place(URL)))
    report, own = verified(URL), verify(Places(run), lambda what, share: None)
    found = verdicts(report)
    assert found.pop("bundles") == "PASS"
    assert found == verdicts(own)
    before = published(storage)
    assert len(before) == 4
    publish_once(publisher(run, Place(URL)))
    assert published(storage) == before
    everything = b"".join(storage.cat(list(before)).values())
    assert b"a-secret-key-of-somebody" not in everything
    assert (run / "coordinator" / "record-key").read_bytes().strip() not in everything


def test_a_bucket_that_is_not_there_is_one_line(run: Path, storage: Any) -> None:
    with pytest.raises(RecordError, match="cannot be written") as refused:
        publish_once(publisher(run, Place("s3://nobody-s-bucket/old")))
    assert "\n" not in str(refused.value)


def test_publishing_goes_on_when_the_server_is_back(
    run: Path, storage: Any, proxy: FaultProxy
) -> None:
    """The server is dead, then silent, then back."""
    proxy.become("dead")
    said: list[str] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        proxy.become({2: "silent", 4: "pass"}.get(len(pauses), proxy._mode))

    publish_to_the_end(publisher(run, Place(URL, seconds=1.0)), said.append, sleep)
    assert len(pauses) == 4
    assert len(said) == 2
    assert said[0].startswith(f"dilocox: not published: {URL}/{INDEX}: cannot be read (")
    assert said[1] == "dilocox: publishing goes on"
    assert verdicts(verified(URL))["replay"] == "PASS"


@pytest.mark.parametrize("writes", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_publishing_goes_on_after_a_server_of_nonsense(
    run: Path, storage: Any, proxy: FaultProxy, writes: int
) -> None:
    """From the start, or after some files, the server says success and something else."""
    said: list[str] = []
    pauses: list[float] = []
    server = proxy.server
    with nonsense() as port:

        class Lying(CutPlace):
            def put(self, path: str, data: bytes) -> None:
                super().put(path, data)
                if len(self.written) == writes:
                    proxy.lead_to(port)

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                proxy.lead_to(server)

        if not writes:
            proxy.lead_to(port)
        try:
            publish_to_the_end(publisher(run, Lying(URL, seconds=1.0)), said.append, sleep)
        finally:
            proxy.lead_to(server)
    assert len(pauses) == 3
    assert [line.split(":")[1] for line in said] == [" not published", " publishing goes on"]
    assert verdicts(verified(URL))["replay"] == "PASS"


def test_an_index_of_another_run_ends_a_follower(run: Path, storage: Any) -> None:
    """A server may say nonsense for a time; this is no nonsense."""
    publish_once(publisher(run, Place(URL)))
    own = Publication.parse(storage.cat_file(f"{URL}/{INDEX}").decode())
    signer = Signer.from_hex("5a" * 32)
    other = Publication(NoteKey("other", bytes.fromhex(signer.public)), "b" * 64)
    other.add(own.bundles[0], signer)
    storage.pipe_file(f"{URL}/{INDEX}", other.text.encode())

    def sleep(seconds: float) -> None:
        raise AssertionError("a permanent failure is repeated")

    with pytest.raises(WrongPlaceError, match="it is of log other"):
        publish_to_the_end(publisher(run, Place(URL)), print, sleep)
    assert storage.cat_file(f"{URL}/{INDEX}").decode() == other.text


@pytest.mark.parametrize("mode", ["dead", "silent"])
def test_a_server_that_fails_says_nothing_about_the_run(
    run: Path, storage: Any, proxy: FaultProxy, mode: Any
) -> None:
    publish_once(publisher(run, Place(URL)))
    proxy.become(mode)
    with pytest.raises(RecordError, match=f"{URL}/{INDEX}: cannot be read") as failed:
        verified(URL, seconds=1.0)
    assert "\n" not in str(failed.value)


def test_bytes_that_change_on_the_way_are_found(run: Path, storage: Any, proxy: FaultProxy) -> None:
    """By S3's own checksum: nothing is said about the run."""
    publish_once(publisher(run, Place(URL)))
    proxy.become("wrong")
    with pytest.raises(RecordError, match=r"bundles/000000-\w+\.tar: cannot be read"):
        verified(URL)


def test_a_storage_with_other_bytes_is_found(run: Path, storage: Any) -> None:
    publish_once(publisher(run, Place(URL)))
    paths = sorted(path for path in storage.find(BUCKET) if path.endswith(".tar"))
    data = storage.cat_file(paths[1])
    wrong = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
    for bad in (wrong, data[:-512], data + bytes(512), None):
        if bad is None:
            storage.rm_file(paths[1])
        else:
            storage.pipe_file(paths[1], bad)
        report = verified(URL)
        assert report.findings[0].verdict == "FAIL"
        assert paths[1].rpartition("/")[2] in reasons(report)["bundles"]
        assert report.exit_code == 1
    storage.pipe_file(paths[1], data)
    assert verdicts(verified(URL))["bundles"] == "PASS"
