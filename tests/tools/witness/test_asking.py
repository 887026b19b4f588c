"""A run's log asks witnesses: real processes, dead and hanging ones, and servers that lie."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.witnessed import (
    LOG,
    entries,
    proof,
    serving,
    signed,
    witness_folder,
    write_log,
)

from dilocox.cli import standard_input
from dilocox.cli.main import main
from dilocox.errors import RecordError
from dilocox.record.log import cosigned
from dilocox.record.log.signed_note import LogCheckpoint, WitnessKey, cosign, cosigned_at, open_note
from dilocox.record.verify.witness_claims import Witnesses, judge_witnesses
from dilocox.record.writer.checkpoint_publisher import CheckpointPublisher
from dilocox.tools.witness import server
from dilocox.tools.witness.asking import Answer, WitnessAddress, ask
from dilocox.tools.witness.folder import WitnessFolder
from dilocox.tools.witness.requests import parse_request, request_body
from dilocox.tools.witness.server import application, serve
from dilocox.tools.witness.witness import Witness

pytestmark = pytest.mark.waits


def size_of(run: Path, witness: WitnessKey) -> int:
    """Statements that the witness has cosigned, by the file beside the log."""
    note = cosigned.path_of(run / "record", witness).read_text()
    assert cosigned_at(note, witness) is not None
    return LogCheckpoint.parse(open_note(note, LOG)).size


def test_a_log_is_cosigned_while_it_grows_and_a_fork_is_not(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    witness_folder(tmp_path / "w")
    with serving(tmp_path / "w") as (_, witness):
        for size in (3, 3, 8):
            write_log(run, entries(size))
            assert ask(run, [witness]) == [Answer(witness, size)]
            assert size_of(run, witness.key) == size
        # A file that is lost or damaged is made again.
        cosigned.path_of(run / "record", witness.key).write_text("damaged")
        assert ask(run, [witness]) == [Answer(witness, 8)]
        # The log's owner shows another history. A witness of the true one does not cosign it.
        for texts, reason in (
            (entries(9, fork=6), "it refuses (422: the proof does not show"),
            (entries(8, fork=6), "another log of 8 statements, signed by the same key"),
            (entries(5), "has cosigned 8 statements, and this log has 5: was the log cut back?"),
        ):
            write_log(other, texts)
            (answer,) = ask(other, [witness])
            assert reason in answer.trouble
            assert not cosigned.path_of(other / "record", witness.key).exists()
            for path in sorted((other / "record").iterdir()):
                path.unlink()
    asked = Witnesses.parse([str(witness.key)], None, [])
    assert asked is not None
    judge_witnesses(asked, run / "record", LOG, entries(8))
    with pytest.raises(RecordError, match="has signed two different logs"):
        judge_witnesses(asked, run / "record", LOG, entries(8, fork=6))


def test_a_witness_that_is_killed_keeps_to_one_history(tmp_path: Path) -> None:
    """Killed in the middle of answers, it still knows all that has left it."""
    run = tmp_path / "run"
    witness_folder(tmp_path / "w")
    left: list[int] = []
    with serving(tmp_path / "w") as (process, witness):
        killer = threading.Thread(target=lambda: (until(lambda: len(left) > 3), process.kill()))
        killer.start()
        size = 0
        while True:
            size += 1
            write_log(run, entries(size))
            (answer,) = ask(run, [witness], 5.0)
            if answer.trouble:
                break
            left.append(size)
        killer.join()
    with WitnessFolder.opened(tmp_path / "w") as folder:
        newest = folder.newest(LOG)
    assert newest is not None
    assert newest[0].size in (left[-1], left[-1] + 1)
    with serving(tmp_path / "w") as (_, again):
        assert again.key == witness.key
        assert ask(run, [again]) == [Answer(again, size)]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextlib.contextmanager
def lying(answer: Callable[[bytes], tuple[int, bytes]]) -> Iterator[str]:
    """URL of a server that answers what it likes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = answer(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 307:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


OWN = Ed25519PrivateKey.from_private_bytes(b"\x05" * 32)
KEY = WitnessKey("liar", OWN.public_key().public_bytes_raw())


def cosignature(body: bytes, key: Ed25519PrivateKey = OWN, text: str = "") -> bytes:
    note = parse_request(body)[2]
    return cosign(text or open_note(note, LOG), "liar", key, 5).encode()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda body: (200, cosignature(body, Ed25519PrivateKey.generate())), "is not cosigned by"),
        (lambda body: (200, cosignature(body, text="other\n")), "not one of witness liar"),
        (lambda body: (200, b"nonsense"), "no cosignature"),
        (lambda body: (200, b"\xe2\x80\x94 " * 10**6), "no cosignature"),
        (lambda body: (200, b""), "no cosignature"),
        (lambda body: (409, b"2\n"), "has cosigned 2 statements, and refuses"),
        (lambda body: (409, b"99\n"), "was the log cut back"),
        (lambda body: (409, b"9" * 10**6), "was the log cut back"),
        (lambda body: (409, b"\x1b[2J"), "it refuses"),
        (lambda body: (404, b""), "dilocox witness trust FOLDER dilocox/test/log"),
        (lambda body: (307, b""), "it refuses .307"),
        (lambda body: (500, b""), "it refuses .500"),
    ],
)  # fmt: skip
def test_a_witness_that_lies(
    tmp_path: Path, answer: Callable[[bytes], tuple[int, bytes]], reason: str
) -> None:
    write_log(tmp_path, entries(4))
    with lying(answer) as url:
        (found,) = ask(tmp_path, [WitnessAddress(KEY, url)])
    with pytest.raises(RecordError, match=reason):
        raise RecordError(found.trouble)
    assert found.trouble.isprintable()
    assert not cosigned.path_of(tmp_path / "record", KEY).exists()


def test_an_answer_may_arrive_in_pieces(tmp_path: Path) -> None:
    """Web servers before a witness divide answers as they like."""
    write_log(tmp_path, entries(4))

    class Pieces(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            line = cosignature(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", str(len(line)))
            self.end_headers()
            for each in (line[:30], line[30:]):
                self.wfile.write(each)
                self.wfile.flush()
                time.sleep(0.1)  # else the kernel joins them

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pieces) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert ask(tmp_path, [WitnessAddress(KEY, url)]) == [Answer(WitnessAddress(KEY, url), 4)]
        server.shutdown()


def test_a_witness_cannot_forge_the_cosignature_of_another(tmp_path: Path) -> None:
    """Readers would take the forgery for one of the log's owner, and judge FAIL."""
    write_log(tmp_path, entries(4))
    honest = WitnessKey("honest", Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    forged = base64.b64encode(honest.hash + bytes(8 + 64)).decode()
    log = base64.b64encode(LOG.hash + bytes(64)).decode()

    def answer(body: bytes) -> tuple[int, bytes]:
        return 200, cosignature(body) + f"— honest {forged}\n— {LOG.name} {log}\n".encode()

    with lying(answer) as url:
        assert ask(tmp_path, [WitnessAddress(KEY, url)])[0].trouble == ""
    asked = Witnesses.parse([str(KEY), str(honest)], 1, [])
    assert asked is not None
    told = judge_witnesses(asked, tmp_path / "record", LOG, entries(4))
    assert told.startswith("1 of 2 witnesses")


def test_a_request_that_is_repeated_is_told_once(tmp_path: Path) -> None:
    """Anybody can repeat what is public, as often as they like."""
    witness, said = Witness(witness_folder(tmp_path / "w")), list[str]()
    fork = entries(7, fork=3)
    requests = [
        request_body(0, [], signed(entries(5))),
        *[request_body(5, [], signed(entries(5)))] * 3,
        *[request_body(5, proof(fork, 5), signed(fork))] * 3,
        *[request_body(5, [], signed(entries(5, fork=3)))] * 3,
        *[b"nonsense", request_body(0, [], signed(entries(1), "another/log"))] * 2,
    ]

    async def ask_all() -> list[int]:
        async with TestClient(TestServer(application(witness, said.append))) as client:
            found = [await client.post("/add-checkpoint", data=body) for body in requests]
            return [each.status for each in found]

    assert asyncio.run(ask_all()) == [*[200] * 4, *[422] * 3, *[409] * 3, *[400, 404] * 2]
    assert [line.split(": ")[0] for line in said] == [
        "cosigned 5 statements of log dilocox/test/log",
        *["not cosigned, log dilocox/test/log"] * 2,
    ]
    assert "both checkpoints are in" in said[-1]
    # A damaged folder is told once, too, whatever logs strangers make up.
    (tmp_path / "w" / "logs").write_text("damaged\n")
    requests[:] = [request_body(0, [], signed(entries(1), f"log/{n}")) for n in range(3)]
    assert asyncio.run(ask_all()) == [500] * 3
    assert len(said) == 4, said


def test_a_witness_that_has_forgotten_is_named(tmp_path: Path) -> None:
    """Its folder was put back from an old copy, so it could sign another history."""
    write_log(tmp_path, entries(3))
    with lying(lambda body: (200, cosignature(body))) as url:
        assert ask(tmp_path, [WitnessAddress(KEY, url)])[0].trouble == ""
    write_log(tmp_path, entries(5))
    with lying(lambda body: (409, b"2\n")) as url:
        (found,) = ask(tmp_path, [WitnessAddress(KEY, url)])
    assert found.trouble.startswith(
        "it has cosigned 3 statements, and says now that it knows 2: it has forgotten"
    )


def test_strangers_that_connect_and_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    write_log(tmp_path, entries(4))
    witness = Witness(witness_folder(tmp_path / "w"))
    said: list[str] = []

    async def crowded() -> Answer:
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(witness, "127.0.0.1", 0, said.append, ready.set_result))
        address = WitnessAddress(witness.folder.key, await ready)
        port = int(address.url.rpartition(":")[2])
        open_ = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        # The oldest are closed first, and then all that stay silent.
        assert await asyncio.wait_for(open_[0][0].read(), 20) == b""
        (found,) = await asyncio.to_thread(ask, tmp_path, [address])
        assert await asyncio.wait_for(open_[-1][0].read(), 20) == b""
        for _, writer in open_:
            writer.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return found

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MOST_OPEN", 4), ("OPEN_SECONDS", 0.5), ("LOOK_SECONDS", 0.05)):
            patch.setattr(server, name, value)
        assert asyncio.run(crowded()).trouble == ""
    assert said == ["cosigned 4 statements of log dilocox/test/log"]


def test_dead_and_hanging_witnesses_hold_nobody_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, entries(4))
    with (
        socket.socket() as hanging, socket.socket() as dead,
        lying(lambda body: (200, cosignature(body))) as good,
    ):  # fmt: skip
        for each in (hanging, dead):
            each.bind(("127.0.0.1", 0))
        hanging.listen(9)
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (hanging, dead)]
        began = time.monotonic()
        answers = ask(tmp_path, [WitnessAddress(KEY, url) for url in (*urls, good)], 0.5)
        assert time.monotonic() - began < 10
        assert [bool(each.trouble) for each in answers] == [True, True, False]
        assert answers[0].trouble == "no answer within 0.5 s"
        with pytest.raises(SystemExit) as end:
            main(["witness", "ask", str(tmp_path), "--witness", str(KEY), urls[1]])
        assert end.value.code == 1
        with pytest.raises(SystemExit) as end:
            main(["witness", "ask", str(tmp_path), "--witness", str(KEY), good])
        assert end.value.code == 0
    said = capsys.readouterr()
    assert said.err.startswith("dilocox: liar: not cosigned: ")
    assert said.err.count("\n") == 1
    assert said.out == "liar: has cosigned 4 statements\n"


def test_what_the_log_gets_after_the_runs_end_is_cosigned_too(tmp_path: Path) -> None:
    """Such as evidence that a machine files when the run has just ended."""
    write_log(tmp_path, entries(4))
    os.utime(tmp_path / "record" / "log.pub", (1.0, 1.0))  # the run began long ago
    (tmp_path / "summary.json").write_text("{}")
    seen: list[bytes] = []

    def answer(body: bytes) -> tuple[int, bytes]:
        seen.append(body)
        found = cosignature(body)
        if len(seen) == 1:
            write_log(tmp_path, entries(6))
        return 200, found

    with lying(answer) as url, pytest.raises(SystemExit) as end:
        main(["witness", "ask", str(tmp_path), "--witness", str(KEY), url, "--every", "0.01"])
    assert end.value.code == 0
    assert size_of(tmp_path, KEY) == 6


def checkpoint_of(run: Path) -> str:
    return (run / "record" / "checkpoint").read_text()


def test_the_hook_asks_about_the_checkpoint_that_it_is_given(tmp_path: Path) -> None:
    """A newer one waits for a standby that does not have its statements yet."""
    write_log(tmp_path, entries(4))
    given = checkpoint_of(tmp_path)
    write_log(tmp_path, entries(7))
    asked: list[int] = []

    def answer(body: bytes) -> tuple[int, bytes]:
        asked.append(LogCheckpoint.parse(open_note(parse_request(body)[2], LOG)).size)
        return 200, cosignature(body)

    with lying(answer) as url:
        command = [sys.executable, "-m", "dilocox", "witness", "ask", str(tmp_path)]
        hook = CheckpointPublisher([*command, "--witness", str(KEY), url], 60.0)
        hook.take(given)
        hook.close()
        assert hook.trouble() is None
        assert (asked, size_of(tmp_path, KEY)) == ([4], 4)
        # A witness that has cosigned a later one already is not asked, and has not refused.
        assert ask(tmp_path, [WitnessAddress(KEY, url)]) == [Answer(WitnessAddress(KEY, url), 7)]
        known = ask(tmp_path, [WitnessAddress(KEY, url)], note=given)
        assert known == [Answer(WitnessAddress(KEY, url), 7)]
        assert (asked, size_of(tmp_path, KEY)) == ([4, 7], 7)
    cosigned.path_of(tmp_path / "record", KEY).unlink()
    with lying(lambda body: (409, b"7\n")) as url:
        (found,) = ask(tmp_path, [WitnessAddress(KEY, url)], note=given)
        assert found.trouble == (
            "it says that it has cosigned 7 statements already, more than this checkpoint has: 4"
        )
    for note in ("nonsense", signed(entries(4, fork=2)), signed(entries(9))):
        with pytest.raises(RecordError, match="the given checkpoint is not one of this log: "):
            ask(tmp_path, [WitnessAddress(KEY, url)], note=note)


def test_ask_does_not_wait_for_an_input_on_which_nothing_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over SSH, or from a script. `ask --every` does not look at its input at all."""
    monkeypatch.setattr(standard_input, "INPUT_SECONDS", 0.1)
    write_log(tmp_path, entries(4))
    given = checkpoint_of(tmp_path)
    write_log(tmp_path, entries(7))
    (tmp_path / "summary.json").write_text("{}")
    reading, writing = os.pipe()
    with lying(lambda body: (200, cosignature(body))) as url, os.fdopen(reading) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        command = ["witness", "ask", str(tmp_path), "--witness", str(KEY), url]
        for more in ([], ["--every", "0.01"]):
            with pytest.raises(SystemExit) as end:
                main([*command, *more])
            assert end.value.code == 0
            assert size_of(tmp_path, KEY) == 7
            cosigned.path_of(tmp_path / "record", KEY).unlink()
            os.write(writing, given.encode())
        os.close(writing)
        assert pipe.read() == given * 2


def test_ask_every_ends_with_the_run_and_tells_a_trouble_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, entries(4))
    seen: list[int] = []

    def answer(body: bytes) -> tuple[int, bytes]:
        seen.append(len(body))
        if len(seen) < 4:
            return 500, b"later"
        (tmp_path / "summary.json").write_text("{}")
        return 200, cosignature(body)

    with lying(answer) as url, pytest.raises(SystemExit) as end:
        main(["witness", "ask", str(tmp_path), "--witness", str(KEY), url, "--every", "0.01"])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert said.err.count("not cosigned: it refuses (500: later)") == 1
    assert said.out.splitlines()[:2] == ["liar: cosigns again", "liar: has cosigned 4 statements"]
    with pytest.raises(SystemExit) as end:
        main(["witness", "ask", str(tmp_path), "--witness", str(KEY), "ftp://a"])
    assert end.value.code == 1
    assert "begins with http://" in capsys.readouterr().err
    assert proof(entries(3), 3) == []
    assert signed(entries(1)) != signed(entries(2))
