"""A witness that looks at logs where they lie."""

from __future__ import annotations

import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.witnessed import LOG, entries, witness_folder, write_log

from dilocox.cli.main import main
from dilocox.errors import RecordError
from dilocox.record.bundles.publication import INDEX
from dilocox.record.log import cosigned
from dilocox.record.log.signed_note import LogCheckpoint, cosigned_at, open_note
from dilocox.record.log.transparency_log import check_grown, read_log
from dilocox.tools.witness.folder import WitnessFolder
from dilocox.tools.witness.watching import look
from dilocox.tools.witness.witness import Witness


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(witness_folder(tmp_path / "w"), lambda: 77.0)


@pytest.mark.parametrize("url", [False, True])
def test_a_log_that_grows(tmp_path: Path, witness: Witness, url: bool) -> None:
    run = tmp_path / "run"
    place = f"file://{run}" if url else str(run)
    for size, fresh in ((2, True), (2, False), (7, True), (8, True)):
        write_log(run, entries(size))
        seen = look(witness, place, beside=not url)
        assert (seen.size, seen.fresh) == (size, fresh)
        note = seen.file.read_text()
        assert cosigned_at(note, witness.folder.key) == 77
        assert LogCheckpoint.parse(open_note(note, LOG)).size == size
        beside = cosigned.path_of(run / "record", witness.folder.key)
        assert beside.exists() != url
        assert url or beside.read_text() == note


def test_a_fork_leaves_evidence_that_verify_understands(tmp_path: Path, witness: Witness) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    write_log(run, entries(6))
    write_log(other, entries(9, fork=4))
    look(witness, str(run), beside=False)
    with pytest.raises(RecordError, match="signed two logs; both checkpoints are in"):
        look(witness, str(other), beside=False)
    (kept,) = (tmp_path / "w" / "evidence").iterdir()
    with pytest.raises(RecordError, match="the same key has signed two different logs"):
        check_grown(read_log(other / "record"), LOG, (kept / "seen").read_text())
    assert LogCheckpoint.parse(open_note((kept / "other").read_text(), LOG)).size == 9
    newest = witness.folder.newest(LOG)
    assert newest is not None
    assert newest[0].size == 6


def test_what_is_not_cosigned(tmp_path: Path, witness: Witness) -> None:
    run = tmp_path / "run"
    write_log(run, entries(6))
    look(witness, str(run), beside=False)
    older = tmp_path / "older"
    write_log(older, entries(3))
    with pytest.raises(RecordError, match="has 3 statements, and 6 were cosigned"):
        look(witness, str(older), beside=False)
    # A statement that was changed, with the checkpoint of the true log.
    write_log(run, entries(8))
    lines = (run / "record" / "statements.jsonl").read_text().replace("7", "x")
    (run / "record" / "statements.jsonl").write_text(lines)
    with pytest.raises(RecordError, match="root is not the signed one"):
        look(witness, str(run), beside=False)
    (tmp_path / "w" / "logs").unlink()
    with pytest.raises(RecordError, match="dilocox witness trust"):
        look(witness, str(run), beside=False)
    with pytest.raises(RecordError, match="missing"):
        look(witness, str(tmp_path / "nowhere"), beside=False)
    with pytest.raises(RecordError, match="cannot be read"):
        look(witness, f"file://{tmp_path}/nowhere", beside=False)


@pytest.mark.parametrize("status", [200, 503])
def test_a_web_server_that_fails_does_not_end_the_watch(
    tmp_path: Path, witness: Witness, status: int
) -> None:
    """It is overloaded, or dies in the middle of an answer."""

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"part")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/run"
        with pytest.raises(RecordError, match="/run: cannot be read"):
            look(witness, url, beside=False)
        server.shutdown()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["witness", *words])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    path, log = str(tmp_path / "w"), tmp_path / "run"
    write_log(log, entries(4))
    code, key, _ = run("create", path, "--name", "w.example/1")
    assert (code, key.startswith("w.example/1+")) == (0, True)
    assert run("watch", path, str(log), "--every", "0")[0] == 1
    assert run("trust", path, str(LOG))[1] == "log dilocox/test/log: added\n"
    assert run("trust", path, str(LOG))[1] == "log dilocox/test/log: was there already\n"
    code, said, _ = run("watch", path, str(log), "--every", "0", "--beside")
    assert (code, said.startswith("cosigned 4 statements of log dilocox/test/log")) == (0, True)
    assert run("watch", path, str(log), "--every", "0")[:2] == (0, "")
    shutil.rmtree(log)
    write_log(log, entries(5, fork=2))
    code, _, said = run("watch", path, str(log), "--every", "0")
    assert code == 1
    assert "signed two logs" in said
    assert run("watch", path, "s3://a/b", "--beside")[0] == 1
    key = str(WitnessFolder(tmp_path / "w").key)
    for words, reason in (
        (("watch", path, str(log), "--every", "-1"), "--every -1: give a number of seconds"),
        (("watch", path, str(log), "--every", "nan"), "--every nan: give a number of seconds"),
        (("ask", str(log), "--witness", key, "http://a", "--every", "-1"), "--every -1: give"),
        (("serve", path, "--port", "99999"), "--port 99999: give 1 to 65535"),
        (("trust", path, key), "is a key of a witness, not a log key"),
        (("ask", str(log), "--witness", str(LOG), "http://a"), "is a log key, not a key of a wit"),
    ):
        code, _, said = run(*words)
        assert (code, reason in said) == (1, True), said


def test_a_run_in_bundles_is_named(tmp_path: Path, witness: Witness) -> None:
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(RecordError, match="was published in bundles, which a witness does not"):
        look(witness, f"file://{tmp_path}", beside=False)
