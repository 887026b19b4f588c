"""`dilocox chain`: a run is registered, anchored, settled and claimed, and each step repeated."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from eth_account.signers.local import LocalAccount
from requests.exceptions import ConnectionError as NoConnectionError
from tests.support.chains import ETHER, Chain
from tests.support.ledger_scene import WINDOW
from tests.support.record_scene import Scene
from tests.support.second_opinion import second_opinion

from dilocox.cli import standard_input
from dilocox.cli.main import main
from dilocox.config.run_config import digest_of
from dilocox.errors import SettlementError
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import open_log
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.record.verify.run_history import read_history
from dilocox.tools.settlement import closing, keystore, ledger, run_on_chain
from dilocox.tools.settlement.chain_heads import chain_heads
from dilocox.tools.settlement.run_on_chain import RunOnChain

from .test_amounts import PRICE, scene_with

PASSWORD = "correct horse 4711"


class Town:
    """A chain, key files of an owner and three sites, and a run whose record goes on."""

    def __init__(self, root: Path, chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
        self.chain, self.root, self._capsys = chain, root, capsys
        self.contract = ""
        self.said = ""
        """All that commands have printed."""
        password = root / "password"
        password.write_text(PASSWORD + "\n")
        password.chmod(0o600)
        self.secrets = [PASSWORD]
        self.accounts: dict[str, str] = {}
        for name in ("owner", "a", "b", "c"):
            address = keystore.create_key(root / f"{name}.key", PASSWORD, rounds=2)
            self.accounts[name] = address
            self.secrets.append(keystore.load_key(root / f"{name}.key", PASSWORD).key.hex()[2:])
            chain.pay(to=address, value=100 * ETHER)
        sites = {name: self.accounts[name] for name in "abc"}
        self.scene: Scene = scene_with(root, accounts=sites, price=PRICE)
        self.scene.notary.writer.cover()
        self.folder = self.scene.config.folder

    def run(self, action: str, *words: object, key: str = "owner", code: int = 0) -> str:
        """Run `dilocox chain ACTION RUN` with a key; return what it prints."""
        place = [] if action == "deploy" else [str(self.folder)]
        keys = ["--key", f"{self.root}/{key}.key", "--password-file", f"{self.root}/password"]
        named = [] if action in ("account", "status", "staked") else keys
        return self.command("chain", action, *place, *words, *named, code=code)

    def command(self, *words: object, code: int = 0) -> str:
        """Run `dilocox`; return what it prints."""
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        out, err = self._capsys.readouterr()
        self.said += out + err
        assert ended.value.code == code, out + err
        return out + err

    def register(self) -> str:
        self.deploy()
        return self.run("register", *self.terms)

    def deploy(self) -> None:
        self.contract = self.run("deploy", "--rpc", "test").split("\n")[0]

    @property
    def terms(self) -> tuple[object, ...]:
        """Arguments of `register`, after RUN."""
        auditors = [word for name in "abc" for word in ("--auditor", self.accounts[name])]
        return (
            "--rpc", "test", "--contract", self.contract, "--stake", "1", "--pool", "40",
            "--window", WINDOW, "--quorum", 2, *auditors,
        )  # fmt: skip

    def key(self, name: str) -> LocalAccount:
        return keystore.load_key(self.root / f"{name}.key", PASSWORD)

    def balance(self, name: str) -> int:
        return int(self.chain.web3.eth.get_balance(self.accounts[name]))

    @property
    def state(self) -> dict[str, Any]:
        run = RunOnChain.read(self.folder)
        return run.ledger().state(run.run)


@pytest.fixture
def town(
    tmp_path: Path,
    chain: Chain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Town:
    for module in (ledger, run_on_chain):
        monkeypatch.setattr(module, "connect", lambda url: chain.web3)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return Town(tmp_path, chain, capsys)


def test_a_run_is_settled_to_the_wei_and_each_step_can_be_repeated(town: Town) -> None:
    assert "registered run" in town.register()
    assert "registered already" in town.run("register", *town.terms)
    assert "staked, 1 coins" in town.run("stake", "--amount", 1)
    assert "staked already" in town.run("stake", "--amount", 1)
    assert re.search("anchored [0-9]+ statements", town.run("anchor"))
    assert "anchored already" in town.run("anchor")
    assert "to 3 accounts" in town.run("settle")
    assert "settled already" in town.run("settle")
    assert "no settlement is accepted" in town.run("claim", key="a")
    town.chain.advance(WINDOW + 1)
    owed = second_opinion(town.folder, town.state["size"])
    for name in "abc":
        before = town.balance(name)
        assert "withdrew" in town.run("claim", key=name)
        paid = town.balance(name) - before
        wei = owed[town.accounts[name].lower()]
        assert 0 <= wei - paid < ETHER // 100, "all but the gas"
        assert "claimed already" in town.run("claim", key=name)
    assert town.state["pool"] == 40 * ETHER - sum(owed.values())
    assert f"{town.accounts['owner']}: stake 1 coins" in town.run("status")
    # Nothing that was printed or written but the key files themselves has a secret.
    written = [path.read_bytes() for path in town.root.rglob("*") if path.is_file()
               and path.suffix != ".key" and path.name != "password"]  # fmt: skip
    for secret in town.secrets:
        assert secret not in town.said
        assert not [1 for data in written if secret.encode() in data]


def test_the_hook_anchors_the_checkpoint_that_it_is_given(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.register()
    town.run("stake", "--amount", 1)
    notes = [town.scene.notary.writer.cover()]
    town.scene.notary.resumed(1, 1)
    notes.append(town.scene.notary.writer.cover())
    for note, said in ((notes[0], "anchored"), (notes[1], "anchored"), (notes[0], "already")):
        monkeypatch.setattr("sys.stdin", io.StringIO(note))
        assert said in town.run("anchor")
    monkeypatch.setattr("sys.stdin", io.StringIO("no note\n"))
    assert "not a signed note" in town.run("anchor", code=1)
    heads = (town.folder / "settlement/heads.jsonl").read_text().splitlines()
    sizes = [json.loads(each)["size"] for each in heads]
    found = chain_heads(town.folder).heads
    assert sizes == [each.size for each in found]
    assert [note.split("\n")[1] for note in notes] == list(map(str, sizes))


def test_anchor_does_not_wait_for_an_input_on_which_nothing_comes(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over SSH, or from a script."""
    town.register()
    monkeypatch.setattr(standard_input, "INPUT_SECONDS", 0.1)
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w"):
        monkeypatch.setattr("sys.stdin", pipe)
        town.run("stake", "--amount", 1)
        assert "anchored" in town.run("anchor")


ACTIONS: dict[str, Callable[[Town], str]] = {
    "register": lambda town: town.run("register", *town.terms),
    "stake": lambda town: town.run("stake", "--amount", 1),
    "anchor": lambda town: town.run("anchor"),
    "settle": lambda town: town.run("settle"),
    "claim": lambda town: town.run("claim", key="a"),
}


@pytest.mark.parametrize(
    "crash",
    [
        "send_raw_transaction",
        pytest.param("wait_for_transaction_receipt", marks=pytest.mark.slow),
    ],
)
def test_after_a_crash_every_command_is_repeated_and_counts_once(
    town: Town, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """The connection ends before the transaction is sent, or before its block is seen."""
    web3 = town.chain.web3
    real = getattr(web3.eth, crash)
    town.deploy()

    def fail(*_: object, **__: object) -> None:
        raise NoConnectionError("the line is cut")

    for name, action in ACTIONS.items():
        if name == "claim":
            town.chain.advance(WINDOW + 1)
        who = "a" if name == "claim" else "owner"
        before = web3.eth.get_transaction_count(town.accounts[who])
        with monkeypatch.context() as patch:
            patch.setattr(web3.eth, crash, fail)
            words = {"register": town.terms, "stake": ("--amount", 1)}.get(name, ())
            said = town.run(name, *words, key=who, code=1)
            assert "the chain's server failed: the line is cut" in said
        action(town)
        action(town)
        sent = web3.eth.get_transaction_count(town.accounts[who]) - before
        assert sent == (2 if name == "claim" else 1), name  # claim and withdraw
    assert getattr(web3.eth, crash) == real
    # Also if `register` was finished by the command after it: events are looked up from there on.
    run = RunOnChain.read(town.folder)
    assert 0 < run.block <= run.ledger().registered(run.run) <= run.block + 1
    assert town.state["settlements"] == 1
    owed = second_opinion(town.folder, town.state["size"])
    assert town.state["pool"] == 40 * ETHER - owed[town.accounts["a"].lower()]


def test_a_dead_server_is_one_line(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    town.register()
    monkeypatch.undo()
    path = town.folder / "settlement/chain.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "rpc": "http://127.0.0.1:9"}))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    text = town.run("anchor", code=1)
    assert text.count("\n") == 1
    assert "the chain's server failed" in text
    assert "the chain's server failed" in chain_heads(town.folder).fault


def test_another_log_than_the_anchored_one_is_neither_anchored_nor_settled(town: Town) -> None:
    town.register()
    town.run("stake", "--amount", 1)
    town.run("anchor")
    other = scene_with(town.root / "other", price=PRICE)
    other.notary.close()
    shutil.rmtree(town.folder / "record")
    shutil.copytree(other.config.folder / "record", town.folder / "record")
    for action in ("anchor", "settle"):
        assert "is not a prefix of this log" in town.run(action, code=1)


def test_verify_judges_the_heads_of_the_chain(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    def anchors() -> tuple[str, str]:
        with pytest.raises(SystemExit):
            main(["verify", str(town.folder), "--json", "--chain", str(town.folder)])
        claims = json.loads(capsys.readouterr().out)["claims"]
        (found,) = (each for each in claims if each["name"] == "anchors")
        return found["verdict"], found["reason"]

    town.register()
    town.run("stake", "--amount", 1)
    (town.folder / "run.toml").write_text(town.scene.config.to_toml())
    assert anchors()[0] == "NOT_RUN"
    town.run("anchor")
    town.scene.notary.resumed(1, 1)
    town.scene.notary.close()
    town.run("anchor")
    verdict, reason = anchors()
    assert (verdict, reason.startswith("2 heads of run 0x")) == ("PASS", True), reason


def judged(found: ChainHeads, town: Town) -> str:
    from dilocox.errors import RecordError
    from dilocox.record.verify.chain_anchors import judge_anchors

    content = open_log(town.folder / "record")
    course = read_history(content.entries, NoteKey.parse(content.public))
    try:
        return judge_anchors(found, course, content.entries)
    except RecordError as error:
        return f"FAIL {error}"


def test_a_log_that_was_cut_or_changed_is_not_the_anchored_one(town: Town) -> None:
    town.scene.notary.close()
    size = len(town.scene.entries())
    run = town.scene.notary.run
    other = Prefix(size - 1, "00" * 32)
    agreed = digest_of(town.scene.config.shared())
    found = ChainHeads("c", manifest=agreed, log=run, heads=(other,))
    for changed, said in (
        (replace(found, log="11" * 32), "FAIL c is of log"),
        (replace(found, manifest="22" * 32), "FAIL c was registered with the run file 2222"),
        (found, "FAIL the chain's head of"),
        (replace(found, heads=(Prefix(size + 1, "00" * 32),)), "it was cut back"),
        (replace(found, forked=True), "signed two logs"),
    ):
        assert said in judged(changed, town)


def test_a_run_is_registered_before_its_first_checkpoint(town: Town) -> None:
    """Sites that join by stake wait for the registration, and the first checkpoint for them."""
    scene = Scene(town.root / "new", settlement={"price": PRICE})
    town.folder = scene.config.folder
    assert (town.folder / "record/checkpoint").read_text().split("\n")[1] == "0"
    assert "registered run" in town.register()
    assert RunOnChain.read(town.folder).log == scene.notary.run
    statements = town.folder / "record/statements.jsonl"
    first = statements.read_text()
    for text, said in ((first[:-1], "no statement yet"), ("{}\n", "not a signed statement")):
        statements.write_text(text)
        assert said in town.run("register", *town.terms, code=1)


def test_a_funding_that_a_crash_cut_short_is_finished_and_not_repeated(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.register()

    def fail(*_: object, **__: object) -> None:
        raise NoConnectionError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(town.chain.web3.eth, "send_raw_transaction", fail)
        town.run("fund", "--amount", 1, code=1)
    assert "finished the funding that was cut short" in town.run("fund", "--amount", 1)
    assert town.state["pool"] == 41 * ETHER
    assert "pool 42 coins" in town.run("fund", "--amount", 1)


@pytest.mark.parametrize("between", ["anchor", "settle"])
def test_a_funding_that_another_command_has_finished_is_not_repeated(
    town: Town, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """Such as the hook `record.anchor`, which has the same account and the same journal."""
    town.register()
    town.run("stake", "--amount", 1)
    if between == "settle":
        town.run("anchor")

    def fail(*_: object, **__: object) -> None:
        raise NoConnectionError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(town.chain.web3.eth, "send_raw_transaction", fail)
        town.run("fund", "--amount", 1, code=1)
    town.run(between)
    assert town.state["pool"] == 41 * ETHER
    assert "finished the funding that was cut short" in town.run("fund", "--amount", 1)
    assert town.state["pool"] == 41 * ETHER
    assert "pool 42 coins" in town.run("fund", "--amount", 1)


def test_a_server_that_dies_after_a_funding_does_not_hide_it(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.register()

    def dead(*_: object) -> None:
        raise SettlementError("the chain's server failed")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "state", dead)
        assert "the funding is in a block" in town.run("fund", "--amount", 1)
    assert town.state["pool"] == 41 * ETHER


def test_a_deployment_is_not_repeated_without_being_asked(town: Town) -> None:
    town.deploy()
    first = town.contract
    assert f"{first}\ndeployed already" in town.run("deploy", "--rpc", "test")
    town.run("deploy", "--rpc", "test", "--again")
    assert first in town.run("deploy", "--rpc", "test")


def test_a_run_is_not_registered_with_other_terms(town: Town) -> None:
    town.register()
    first = (town.folder / "settlement/chain.json").read_bytes()
    less = [word for word in town.terms if word not in ("--auditor", town.accounts["c"])]
    for words, said in (
        ([*town.terms, "--quorum", 3, "--window", 5], "another --window, --quorum"),
        ([*less[:-2], *(w for n in "ab" for w in ("--auditor", town.accounts[n]))],
         "another list of --auditor"),
    ):  # fmt: skip
        assert said in town.run("register", *words, code=1)
    assert (town.folder / "settlement/chain.json").read_bytes() == first


def test_status_shows_the_terms_and_a_wrong_list_of_auditors(town: Town) -> None:
    town.register()
    said = town.run("status")
    manifest = town.state["manifest"].hex()
    for part in (f"window {WINDOW} seconds, least stake 1 coins", manifest, "2 must agree of 0x"):
        assert part in said
    assert "NOT those" not in said
    path = town.folder / "settlement/chain.json"
    file = json.loads(path.read_text())
    path.write_text(json.dumps({**file, "auditors": file["auditors"][:2]}))
    assert "NOT those that the contract has" in town.run("status")


def test_the_owner_closes_a_run_and_gets_the_rest_of_the_pool(town: Town) -> None:
    town.register()
    assert "is not closed" in town.run("reclaim", code=1)
    for _ in range(2):
        assert "gives the rest of the pool back" in town.run("close")
    assert "sites can claim for" in town.run("reclaim")
    town.chain.advance(4 * WINDOW + 1)
    before = town.balance("owner")
    said = town.run("reclaim")
    assert "reclaimed 40 coins" in said
    assert "withdrew 40 coins" in said
    assert 0 <= before + 40 * ETHER - town.balance("owner") < ETHER // 10, "all but the gas"
    assert "the pool is empty" in town.run("reclaim")


def test_a_run_is_not_closed_before_it_is_settled(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window after `close` the contract takes no settlement any more."""
    town.register()
    town.run("stake", "--amount", 1)
    town.run("anchor")
    assert "owes is not settled: dilocox chain settle first" in town.run("close", code=1)
    with monkeypatch.context() as patch:
        patch.setattr(closing, "owed_at", unreadable)
        assert "gone; --unsettled closes all the same" in town.run("close", code=1)
    town.run("settle")
    assert "settlement 1 can be vetoed for" in town.run("close", code=1)
    assert not town.state["closedAt"]
    town.chain.advance(WINDOW + 1)
    assert "the last settle is possible at 2" in town.run("close")
    town.chain.advance(WINDOW + 1)
    assert "the last settle was possible at 2" in town.run("close")


def unreadable(*_: object) -> None:
    raise SettlementError("gone")


def test_a_run_is_closed_unsettled_if_its_owner_says_so(town: Town) -> None:
    town.register()
    town.run("stake", "--amount", 1)
    town.run("anchor")
    assert "the last settle is possible at 2" in town.run("close", "--unsettled")
    assert town.state["closedAt"]


BAD_PLACES: list[dict[str, Any]] = [
    {"block": "x"}, {"block": None}, {"block": -1}, {"auditors": []}, {"auditors": "0x"},
    {"auditors": ["0x12"]}, {"auditors": [7]}, {"owner": "0x12"}, {"owner": 7}, {"log": "12"},
    {"contract": "0x" + "g" * 40}, {"chain": "1"}, {"rpc": 1},
]  # fmt: skip


def test_a_strange_chain_json_is_one_line(town: Town) -> None:
    town.register()
    path = town.folder / "settlement/chain.json"
    first = json.loads(path.read_text())
    for change in BAD_PLACES:
        path.write_text(json.dumps({**first, **change}))
        said = town.run("status", code=1)
        assert said.endswith("chain.json: not a file of dilocox chain register\n"), change


def test_a_chain_json_that_cannot_be_read_is_not_called_strange(town: Town) -> None:
    path = town.folder / "settlement/chain.json"
    path.mkdir(parents=True)
    said = town.run("status", code=1)
    assert said.endswith(f"{path}: cannot be read (Is a directory)\n")


def test_the_rpc_servers_secret_stays_out_of_the_file_for_the_sites(town: Town) -> None:
    town.deploy()
    url = "https://node.example:8545/v3/0123secret"
    words = [url if word == "test" else word for word in town.terms]
    assert "0123secret" not in town.run("register", *words)
    path = town.folder / "settlement/chain.json"
    said = json.loads(path.read_text())
    assert (said["rpc"], said["chain"]) == (
        "https://node.example:8545",
        town.chain.web3.eth.chain_id,
    )
    assert RunOnChain.read(town.folder).rpc == url
    assert path.with_name("rpc.url").stat().st_mode & 0o077 == 0
    where = chain_heads(town.folder).where
    assert where.endswith(f"on chain {said['chain']}, by node.example:8545")
    assert chain_heads(town.folder, "http://other:1/key").where.endswith("by other:1")
    path.write_text(json.dumps({**said, "chain": said["chain"] + 1}))
    assert "is of chain" in chain_heads(town.folder).fault
    assert "is of chain" in town.run("stake", "--amount", 1, code=1)
