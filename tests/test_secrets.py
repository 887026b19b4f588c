"""No secret that dilocox knows stands in a log, a record, a page, an export or a message.

One small run has every secret where dilocox keeps it. All commands that read a run work on it, and
fail on purpose. Every file that they have written, and every word that they have printed, is
searched. `e2e/test_published.py` searches a published folder and a model card, and
`e2e/test_settled.py` what processes print while they train.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from web3.exceptions import Web3RPCError

from dilocox.cli.main import main
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import write_private
from dilocox.coordinator.metrics import sinks
from dilocox.coordinator.record_keys import RecordKey
from dilocox.errors import ConfigError, SettlementError
from dilocox.tools.attestation.collecting import CHIP
from dilocox.tools.attestation.simulated_machine import SimulatedMachine
from dilocox.tools.settlement import keystore, ledger
from dilocox.tools.settlement.run_on_chain import RunOnChain, read_rpc
from dilocox.utils.secret_text import hide_secrets, secret_problem
from tests.support.coordinator_driver import run_config
from tests.support.older_record import unpacked
from tests.support.secret_search import coordinator_secrets, forms, leaks, private_part
from tests.support.witnessed import LOG

LIVE = Path(__file__).parent / "support" / "fixtures" / "older_run.tar.xz"
"""A run that was stopped, with all that its coordinator keeps."""
PASSWORD, BUCKET = "horse battery 0815", "bucket-secret-4711-of-somebody"
ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "aws-secret-0123456789abcdef", "WANDB_API_KEY": "f1" * 20,
    "HF_TOKEN": "hf_secretOfSomebody0815", "DILOCOX_TOKEN": f"dilocox1-{'a7' * 32}-{'5c' * 16}",
}  # fmt: skip
ADDRESS = "0x" + "22" * 20


class Place:
    """A run with every secret, and what commands make of it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.printed: dict[str, bytes] = {}
        self.secrets = {"bucket": BUCKET, "password": PASSWORD, **ENVIRONMENT}
        self.own: set[Path] = set()
        self.run = unpacked(root)
        shutil.move(root / "data", self.run / "data")
        with tarfile.open(LIVE) as archive:
            archive.extractall(root / "live", filter="data")
        self.live = root / "live/runs/before"
        log_key = (self.run / "coordinator/record-key").read_text()
        shutil.rmtree(self.run / "coordinator")
        shutil.copytree(self.live / "coordinator", self.run / "coordinator")
        write_private(self.run / "coordinator/record-key", log_key.encode())
        for name in ("metrics.jsonl", "summary.json", "ledger.json"):
            shutil.copy(self.live / name, self.run / name)
        self._of_coordinator()
        self._of_others()

    def keep(self, name: str, path: Path, secret: str) -> None:
        """Note a secret and its own file."""
        assert len(secret) >= 16
        self.secrets[name] = secret
        self.own.add(path)

    def _of_coordinator(self) -> None:
        for number, run in enumerate((self.run, self.live)):
            for path, secret in coordinator_secrets(run).items():
                self.keep(f"{path.name} {number}", path, secret)
            self.own.add(run / "coordinator/endpoint.json")  # for other tools here: all tokens

    def _of_others(self) -> None:
        root = self.root
        for site in ("paris", "lyon"):
            path = self.run / "private" / f"{site}.key"
            self.keep(f"key of {site}", path, RecordKey.kept(path).private)
        self.keep("auditor", root / "auditor", RecordKey.kept(root / "auditor").private)
        write_private(root / "password", PASSWORD.encode())
        self.own.add(root / "password")
        keystore.create_key(root / "wallet", PASSWORD, rounds=2)
        key = keystore.load_key(root / "wallet", PASSWORD).key.hex().removeprefix("0x")
        self.keep("wallet", root / "wallet", key)
        SimulatedMachine.kept(root / "machine", CHIP)
        (path,) = (each for each in (root / "machine").iterdir() if b"PRIVATE" in each.read_bytes())
        self.keep("machine", path, private_part(path.read_text()))
        with closed_port() as port:
            self.rpc = f"http://127.0.0.1:{port}/v2/rpc-key-of-somebody-0815"
        write_private(root / "rpc", self.rpc.encode())
        RunOnChain(self.rpc, 7, ADDRESS, ADDRESS, "33" * 32, 0, (ADDRESS,)).write(self.run)
        for path in (root / "rpc", self.run / "settlement/rpc.url"):
            self.keep("rpc", path, "rpc-key-of-somebody-0815")

    def main(self, *words: object, code: int | None = 0) -> str:
        """Run a command; what it prints. `code`: its exit code; None: any."""
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in words])
        out, err = self._capsys.readouterr()
        self.printed[" ".join(map(str, words[:2])) + f" {len(self.printed)}"] = (out + err).encode()
        assert code is None or ended.value.code == code, out + err
        return out + err

    def texts(self) -> dict[str, bytes]:
        """All that was printed, and all files but those of secrets."""
        files = {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and path not in self.own
        }
        return {**self.printed, **files}


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield int(found.getsockname()[1])


@pytest.fixture
def place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return Place(tmp_path, capsys)


def what_works(place: Place) -> None:
    """All commands that write something about a run."""
    run, root = place.run, place.root
    place.main("status", run, code=None)
    place.main("status", place.live, "--json", code=None)
    place.main("report", run, "--verify")
    place.main("report", run, "--compliance")
    place.main("report", place.live, code=None)
    place.main("verify", run, "--json", code=3)  # of a dilocox without acceptances
    place.main("publish", run, "--to", f"file://{root}/bundles")
    place.main("publish", run, "--to", root / "public", code=1)  # nor may it be published whole
    place.main("export", run, "--to", root / "exported")
    release = root / "coordinator-key.pem"
    place.main(
        "export", run, "--release", root / "released", "--licence", "mit", "--signing-key", release,
        code=None,
    )  # fmt: skip
    place.keep("release", release, private_part(release.read_text()))
    place.main("auditor", "--show-key", "--key", root / "auditor")
    place.main("witness", "create", root / "w", "--name", "w.example/1")
    (key,) = (each for each in (root / "w").iterdir() if b"PRIVATE" in each.read_bytes())
    place.keep("witness", key, key.read_text().strip().split("+", 4)[4])
    place.main("witness", "trust", root / "w", str(LOG))


def what_fails(place: Place) -> None:
    """Servers that are dead, and secrets in wrong places."""
    run, root = place.run, place.root
    keys = ("--key", root / "wallet", "--password-file", root / "password")
    with closed_port() as port:
        dead = f"127.0.0.1:{port}"
        place.main("chain", "deploy", "--rpc", root / "rpc", *keys, "--debug", code=1)
        place.main("chain", "anchor", run, *keys, "--debug", code=1)
        place.main("verify", run, "--chain", run / "settlement/chain.json", code=None)
        chain = ("--chain", run / "settlement/chain.json", "--rpc", root / "rpc")
        place.main("verify", run, *chain, "--json", "--debug", code=None)
        for url in (
            f"http://somebody:{BUCKET}@{dead}/run", f"http://{BUCKET}@{dead}/run",
            f"http://{dead}/run?sig={BUCKET}", f"s3://somebody:{BUCKET}@bucket/run",
        ):  # fmt: skip
            place.main("verify", url, "--debug", code=1)
            place.main("availability", url, "--debug", code=1)
            place.main("publish", run, "--to", url, "--debug", code=1)
            place.main("witness", "watch", root / "w", url, "--every", 0, "--debug", code=1)
        place.main("plan", "--terms", f"http://somebody:{BUCKET}@{dead}/t", "--gpu", "l40s",
                   "--link", "1gbit", "--debug", code=1)  # fmt: skip
        witness = ("--witness", place.main("witness", "create", root / "w2", "--name", "x/2")
                   .split()[-1])  # fmt: skip
        shutil.rmtree(root / "w2")
        place.main("witness", "ask", run, *witness, f"http://a:{BUCKET}@{dead}", code=1)
        store = f"record.store=s3://somebody:{BUCKET}@bucket/run"
        place.main("train", run / "run.toml", "--set", store, "--debug", code=1)
    token = place.secrets["paris 0"]
    place.main("join", dead, "--site", "paris", "--run-file", run / "run.toml", "--token-file",
               token, "--debug", code=1)  # fmt: skip
    place.main("auditor", run, "--key", run / "coordinator/server.pem", "--debug", code=1)
    place.main("export", run, "--release", root / "more", "--licence", "mit", "--signing-key",
               root / "auditor", "--debug", code=1)  # fmt: skip


def test_no_secret_stands_anywhere_but_in_its_own_file(place: Place) -> None:
    what_works(place)
    what_fails(place)
    assert len(place.secrets) >= 28
    texts = place.texts()
    named = "\n".join(texts)
    for each in ("report.html", "compliance.md", "metrics.jsonl", "statements.jsonl", ".tar",
                 "publication.jsonl", "exported/config.json", "released/README.md",
                 "run.toml", "chain.json", "coordinator.sqlite", "state.json"):  # fmt: skip
        assert each in named
    assert sorted(leaks(place.secrets, texts)) == []
    readable = {path for path in place.own if path.stat().st_mode & 0o077}
    assert readable == set()
    # The search finds each secret wherever it is put.
    for name, secret in place.secrets.items():
        for where in list(texts)[::7]:
            for form in forms(secret):
                assert (name, where) in leaks({name: secret}, {where: texts[where] + form + b"\n"})


def test_a_tracker_s_error_is_told_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = ENVIRONMENT["WANDB_API_KEY"]
    monkeypatch.setenv("WANDB_API_KEY", key)

    def refused(name: str, config: RunConfig, folder: Path) -> Any:
        raise RuntimeError(f"POST https://api:{BUCKET}@api.example: key {key} is not valid")

    monkeypatch.setattr(sinks, "_open", refused)
    metrics = sinks.Metrics(run_config(metrics={"sinks": ["wandb"]}), tmp_path)
    metrics.close()
    said = (tmp_path / "metrics.jsonl").read_text() + caplog.text
    assert said.count("metrics: wandb failed") == 2
    assert key not in said
    assert BUCKET not in said


@pytest.mark.parametrize("section", ["record", "checkpoint"])
def test_a_run_file_has_no_password(section: str) -> None:
    store = {"store": f"s3://somebody:{BUCKET}@bucket/run"}
    with pytest.raises(ConfigError, match=rf"{section}.store: the URL holds a password") as caught:
        run_config(**{section: store})
    assert BUCKET not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: "a plain message", "a plain message"),
        (lambda: f"x {ENVIRONMENT['DILOCOX_TOKEN']} y", "x *** y"),
        (lambda: f"s3://me:{BUCKET}@b/c", "s3://***@b/c"),
        (lambda: "https://host:8080/a@b", "https://host:8080/a@b"),
        (lambda: "-----BEGIN PRIVATE KEY-----\nMI\n-----E", "-----BEGIN PRIVATE KEY-----***"),
        (lambda: "N PRIVATE KEY-----\nMI", "N PRIVATE KEY-----\nMI"),
        (lambda: "API_KEY is short: abc", "API_KEY is short: abc"),
        (lambda: "value-of-a-secret stays /home/me/.ssh/key", "*** stays /home/me/.ssh/key"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_in_messages(make: Callable[[], str], shown: str) -> None:
    known = {"API_KEY": "abc", "MY_SECRET": "value-of-a-secret", "SSH_KEY": "/home/me/.ssh/key",
             "PATH": "a plain message"}  # fmt: skip
    assert hide_secrets(make(), known) == shown


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://bucket/run", None), ("runs/run", None), ("https://host/run", None),
        ("abfs://container@account.dfs.core.windows.net/run", None), ("http://[", None),
        ("zerog://host:5678", None), ("s3://a:b@bucket/run", "password"),
        ("https://token@host/run", "a user"), ("https://host/run?sig=1", "a query"),
    ],
)  # fmt: skip
def test_urls_with_secrets_are_known(url: str, problem: str | None) -> None:
    found = secret_problem(url)
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://user:p@ss@host:8545/key", "host:8545"),
        ("https://token@host/key", "host"),
        ("https://host:8545/key@x", "host:8545"),
        ("https://user:p/w@host/key", "no host"),
        ("https://user:p@s/w@host/key", "no host"),
        ("https://user:p#w@host/key", "no host"),
    ],
)
def test_of_an_rpc_server_the_host_alone_is_shown(url: str, host: str) -> None:
    """If a password leaves the host in doubt, nothing is shown."""
    assert ledger.host_of(url) == host
    assert ledger.public_part(url) == f"https://{host}"


def test_an_error_of_an_rpc_server_holds_no_password() -> None:
    for password in ("p@s/w", "p)w", "p'w", "p<w>"):
        with pytest.raises(SettlementError) as caught, ledger.one_line("eth_chainId"):
            raise Web3RPCError(f"429 for https://user:{password}@host/v3/key (slow down)")
        assert password not in str(caught.value)
        assert str(caught.value).endswith("429 for host (slow down)")


def test_an_rpc_server_may_be_named_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rpc"
    write_private(path, b"https://host/v2/key\n")
    assert read_rpc(str(path)) == "https://host/v2/key"
    assert read_rpc("https://host/v2/key") == "https://host/v2/key"
    path.chmod(0o644)
    with pytest.raises(Exception, match="other users can read this URL: chmod 600"):
        read_rpc(str(path))
