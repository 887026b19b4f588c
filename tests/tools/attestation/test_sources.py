"""Quotes from a folder that stands in for configfs, and from agents that are dead or lie."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.machines import (
    NOW,
    RIMS,
    SAID,
    SNP,
    TDX,
    gpu_rules,
    policy,
    tdx,
    with_gpus,
)

from dilocox.errors import AttestationError
from dilocox.tools.attestation import collecting
from dilocox.tools.attestation.collecting import Collector
from dilocox.tools.attestation.gpu_source import collect_gpus
from dilocox.tools.attestation.machine import judge_machine
from dilocox.tools.attestation.sources import RawQuote, dstack_quote, tsm_quote

DATA = bytes(range(64))


@contextlib.contextmanager
def configfs(
    folder: Path,
    answer: Callable[[bytes], bytes],
    provider: str = "sev_guest",
    steps: tuple[int, ...] = (1,),
) -> Iterator[Path]:
    """A folder like the kernel's: pipes block until the kernel has its part done.

    `steps`: by how much the generation grows with each report.
    """
    entry = folder / f"dilocox-{os.getpid()}"
    entry.mkdir(parents=True)
    (entry / "provider").write_text(f"{provider}\n")
    (entry / "auxblob").write_bytes(b"")
    (entry / "generation").write_text("7\n")
    for name in ("inblob", "outblob"):
        os.mkfifo(entry / name)

    def kernel() -> None:
        generation = 7
        for step in steps:
            data = (entry / "inblob").read_bytes()
            generation += step
            (entry / "generation").write_text(f"{generation}\n")
            (entry / "outblob").write_bytes(answer(data))

    thread = threading.Thread(target=kernel)
    thread.start()
    yield folder
    thread.join()


def test_the_kernels_quote_carries_the_data(tmp_path: Path) -> None:
    with configfs(tmp_path, lambda data: b"quote of " + data) as folder:
        found = tsm_quote(DATA, folder)
    assert (found.tee, found.quote) == ("snp", b"quote of " + DATA)


@pytest.mark.parametrize(("provider", "tee"), [("tdx_guest", "tdx"), ("sev_guest", "snp")])
def test_providers(tmp_path: Path, provider: str, tee: str) -> None:
    with configfs(tmp_path, lambda data: b"x", provider) as folder:
        assert tsm_quote(DATA, folder).tee == tee


def test_an_unknown_provider_is_refused(tmp_path: Path) -> None:
    with (
        configfs(tmp_path, lambda data: b"x", "other_guest") as folder,
        pytest.raises(AttestationError, match="quotes of 'other_guest'"),
    ):
        tsm_quote(DATA, folder)


def test_a_report_that_another_process_has_changed_is_made_again(tmp_path: Path) -> None:
    with configfs(tmp_path, lambda data: b"x", steps=(2, 1)) as folder:
        assert tsm_quote(DATA, folder).quote == b"x"


def test_a_report_that_others_always_change_is_refused(tmp_path: Path) -> None:
    with (
        configfs(tmp_path, lambda data: b"x", steps=(2, 3, 2, 2, 2)) as folder,
        pytest.raises(AttestationError, match="another process asks for reports"),
    ):
        tsm_quote(DATA, folder)


def test_a_machine_without_configfs_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttestationError, match=r"gives no quotes .*no confidential guest"):
        tsm_quote(DATA, tmp_path / "none")
    entry = tmp_path / f"dilocox-{os.getpid()}"
    entry.mkdir()
    with pytest.raises(AttestationError, match="no quote "):
        tsm_quote(DATA, tmp_path)
    assert not entry.exists()


def test_evidence_of_the_kernel_is_judged(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(SNP.certificates)
    with configfs(tmp_path / "tsm", SNP.report) as folder:
        collector = Collector(lambda data: tsm_quote(data, folder), certificates=chain)
        own = collector.collect(SAID.to_bytes())
    assert judge_machine(own, policy(), NOW).said == SAID


def test_a_host_without_certificates_needs_a_file(tmp_path: Path) -> None:
    with configfs(tmp_path, SNP.report) as folder:
        collector = Collector(lambda data: tsm_quote(data, folder))
        with pytest.raises(AttestationError, match="--certificates FILE"):
            collector.collect(SAID.to_bytes())


class Server(socketserver.UnixStreamServer):
    """HTTP over a Unix socket."""

    def get_request(self) -> Any:
        return self.socket.accept()[0], ("local", 0)


@contextlib.contextmanager
def agent(path: Path, status: int, answer: Callable[[bytes], bytes]) -> Iterator[Path]:
    """An agent of dstack that gives this answer to the asked data."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/GetQuote"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer(bytes.fromhex(said["report_data"])))

        def log_message(self, *args: Any) -> None:
            pass

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield path
        thread.join()


def honest(data: bytes) -> bytes:
    quote = TDX.quote(data)
    events: list[Any] = []
    return json.dumps({"quote": quote.hex(), "event_log": json.dumps(events)}).encode()


def collector(path: Path, folder: Path) -> Collector:
    collateral = folder / "collateral.json"
    collateral.write_text(json.dumps(TDX.collateral()))
    return Collector(lambda data: dstack_quote(data, path, 5.0), collateral=str(collateral))


def test_evidence_of_the_agent_is_judged(tmp_path: Path) -> None:
    with agent(tmp_path / "sock", 200, honest) as path:
        own = collector(path, tmp_path).collect(SAID.to_bytes())
    assert own.tee == "tdx"
    assert own.event_log is None
    assert judge_machine(own, policy(), NOW).said == SAID


def test_an_agent_that_lies_is_found(tmp_path: Path) -> None:
    with agent(tmp_path / "sock", 200, lambda data: honest(bytes(64))) as path:
        own = collector(path, tmp_path).collect(SAID.to_bytes())
    with pytest.raises(AttestationError, match="not bound to this runtime_data"):
        judge_machine(own, policy(), NOW)


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (500, b"", "status 500"),
        (200, b"", "answers with something else"),
        (200, b"[]", "answers with something else"),
        (200, b'{"quote":"zz","event_log":""}', "answers with something else"),
        (200, b'{"quote":"00","event_log":"5"}', "answers with something else"),
        (200, b" " * (5 << 20), "gives no quote"),
    ],
)
def test_an_agent_that_answers_nonsense(
    tmp_path: Path, status: int, answer: bytes, reason: str
) -> None:
    with (
        agent(tmp_path / "sock", status, lambda data: answer) as path,
        pytest.raises(AttestationError, match=reason),
    ):
        dstack_quote(DATA, path)


def test_an_agent_that_is_dead_or_hangs(tmp_path: Path) -> None:
    with pytest.raises(AttestationError, match="does not answer"):
        dstack_quote(DATA, tmp_path / "none")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "sock"))
        with pytest.raises(AttestationError, match="refused"):
            dstack_quote(DATA, tmp_path / "sock")
        silent.listen(1)
        with pytest.raises(AttestationError, match="timed out"):
            dstack_quote(DATA, tmp_path / "sock", seconds=0.1)


def test_an_agent_that_drips_its_answer_has_a_limit(tmp_path: Path) -> None:
    """Every byte arrives in time, and the answer never ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        server.listen(1)

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    connection.sendall(b" ")
                    time.sleep(0.02)

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(AttestationError, match="it answers too slowly"):
            dstack_quote(DATA, tmp_path / "sock", seconds=0.3)
        dripping.join()


def nvattest(folder: Path, body: str) -> str:
    """A command in place of NVIDIA's."""
    path = folder / "nvattest"
    path.write_text(f"#!{sys.executable}\nimport json, sys, base64\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def printed() -> tuple[str, Any]:
    own = with_gpus().gpus[0]
    said = {
        "evidences": [
            {
                "evidence": base64.b64encode(own.report).decode(),
                "certificate": base64.b64encode(own.certificates.encode()).decode(),
            }
        ],
        "result_code": 0,
    }
    return f"print({json.dumps(json.dumps(said))})\n", own


@pytest.mark.parametrize("formats", [True, False])
def test_gpu_reports_come_from_the_command(tmp_path: Path, formats: bool) -> None:
    text, own = printed()
    old = "" if formats else "if '--format' in sys.argv: sys.exit('unknown option')\n"
    check = f"assert sys.argv[5] == '{DATA[:32].hex()}', sys.argv\n"
    command = nvattest(tmp_path, old + check + text)
    assert collect_gpus(DATA[:32], command) == [own]


def test_all_evidence_is_bound_to_one_machine(tmp_path: Path) -> None:
    text, _ = printed()
    for number, each in enumerate(RIMS):
        (tmp_path / f"rim{number}.xml").write_text(each)
    (tmp_path / "chain.pem").write_text(SNP.certificates)
    with configfs(tmp_path / "tsm", SNP.report) as folder:
        own = Collector(
            lambda data: tsm_quote(data, folder),
            certificates=tmp_path / "chain.pem",
            gpus=lambda nonce: collect_gpus(nonce, nvattest(tmp_path, text)),
            manifests=[tmp_path / "rim0.xml", tmp_path / "rim1.xml"],
        ).collect(SAID.to_bytes())
    assert judge_machine(own, policy(gpu=gpu_rules()), NOW).simulated


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('no GPU here')", r"exit code 1: no GPU here"),
        ("print('evidence')", "prints something else"),
        ("print('{}')", "prints something else"),
        ('print(\'{"evidences":[{"evidence":"?","certificate":""}]}\')', "something else"),
    ],
)
def test_a_command_that_fails_is_named(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(AttestationError, match=reason):
        collect_gpus(DATA[:32], nvattest(tmp_path, body))


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttestationError, match="no GPU reports"):
        collect_gpus(DATA[:32], str(tmp_path / "none"))


def test_a_pretended_machine_is_kept(tmp_path: Path) -> None:
    first = Collector.simulated(tmp_path / "machine").collect(SAID.to_bytes())
    second = Collector.simulated(tmp_path / "machine").collect(SAID.to_bytes())
    assert first.certificates == second.certificates
    assert (tmp_path / "machine/simulated-machine.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "machine/simulated-machine.key").write_text("x")
    with pytest.raises(AttestationError, match="not a pretended machine"):
        Collector.simulated(tmp_path / "machine")
    with pytest.raises(AttestationError, match=r"key: cannot be used \(File exists\)$"):
        Collector.simulated(tmp_path / "machine/simulated-machine.key")


@pytest.mark.parametrize("fault", ["dead", "silent", "nonsense"])
def test_a_service_of_collateral_that_fails(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead, hanging or lying: one line, in time."""
    pytest.importorskip("dcap_qvl", reason="dcap-qvl is not installed (extra: tee)")
    monkeypatch.setattr(collecting, "COLLATERAL_SECONDS", 0.5 if fault == "silent" else 60.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if fault != "dead":
            server.listen(9)
        if fault == "nonsense":
            threading.Thread(target=_says_nonsense, args=(server,), daemon=True).start()
        own = tdx()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        found = Collector(lambda data: RawQuote("tdx", own.quote), url)
        begun = time.monotonic()
        with pytest.raises(AttestationError, match=f"{url}: no collateral") as caught:
            found.collect(SAID.to_bytes())
        assert time.monotonic() - begun < 30
        assert "\n" not in str(caught.value)


def _says_nonsense(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[5]")
