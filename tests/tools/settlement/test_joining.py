"""A site stakes and enrols by terms: once, whatever happens, and only for what the terms say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("web3")

from requests.exceptions import ConnectionError as NoConnectionError
from tests.config.test_terms import terms_of
from tests.support.chains import ETHER, Chain
from tests.support.coordinator_driver import run_config
from tests.support.ledger_scene import WINDOW
from tests.support.process_starts import config, prepared
from tests.support.record_scene import Scene

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.config.terms import Deposit, Terms
from dilocox.coordinator.client.stake_file import read_stake_proof, stake_file
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.coordinator.record_keys import RecordKey, key_file
from dilocox.errors import SettlementError
from dilocox.tools.settlement import run_on_chain
from dilocox.tools.settlement.joining import days_left, stake_and_enrol
from dilocox.tools.settlement.run_on_chain import RunOnChain

from .test_binding import bound
from .test_chain_command import Town, town  # noqa: F401 - a fixture

GWEI = 10**9


class Office:
    """A site of a registered run, whose owner has the sponsor's `chain.json` and terms."""

    def __init__(self, town: Town, site: str = "a") -> None:  # noqa: F811
        bound(town)
        town.register()
        self.town, self.site = town, site
        self.config: RunConfig = town.scene.config
        self.terms: Terms = terms_of(self.config).model_copy(
            update={"deposit": Deposit(stake=ETHER // GWEI, window=WINDOW)}
        )
        self.own = key_file(town.root / "office", site)
        self.place = town.root / "office" / "chain.json"
        self.place.parent.mkdir(exist_ok=True)
        self.place.write_text((town.folder / "settlement/chain.json").read_text())
        (self.place.parent / "rpc.url").write_text("test")

    def joins(self, who: str = "") -> str:
        account = self.town.key(who or self.site)
        lines = stake_and_enrol(account, self.place, self.config, self.terms, self.site, self.own)
        return "\n".join(lines)

    def refused(self, who: str = "") -> str:
        """Why the site does not join. No money has moved, but for gas of nothing."""
        account = who or self.site
        before = self.town.balance(account)
        with pytest.raises(SettlementError) as told:
            self.joins(who)
        assert self.town.balance(account) == before
        assert "\n" not in str(told.value)
        return str(told.value)

    @property
    def stake(self) -> int:
        run = RunOnChain.read(self.place)
        return int(run.ledger().call("stakes", run.run, self.town.accounts[self.site])[0])


@pytest.fixture
def office(town: Town) -> Office:  # noqa: F811
    return Office(town)


def test_a_site_stakes_once_and_enrols(office: Office) -> None:
    said = office.joins()
    assert "the pool holds 40 coins; the whole run is worth" in said
    assert "2 of 3 auditors can take a stake" in said
    assert "staked, 1 coins" in said
    assert "vouches for the key of a for 90 days" in said
    assert office.stake == ETHER
    first, before = stake_file(office.own).read_text(), office.town.balance("a")
    proof = read_stake_proof(office.own, RecordKey.kept(office.own).public)
    said = office.joins()
    assert "staked already, 1 coins" in said
    assert "a is enrolled for 90 more days" in said
    # With the same signature the coordinator lets the site in without a new look at the chain.
    assert stake_file(office.own).read_text() == first
    assert (office.town.balance("a"), office.stake) == (before, ETHER)
    question = {"site": "a", "key": RecordKey.kept(office.own).public,
                "expiry": proof.expiry, "signature": proof.signature}  # fmt: skip
    assert json.loads(first) == question


def test_an_enrolment_that_ends_soon_is_renewed(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.joins()
    first = json.loads(stake_file(office.own).read_text())
    monkeypatch.setattr("time.time", lambda: first["expiry"] - 3600.0)
    assert "vouches for the key" in office.joins()
    assert json.loads(stake_file(office.own).read_text())["expiry"] > first["expiry"]


def joins_and_dies(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is in the journal; the process has died before the server had it."""
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("dilocox.tools.settlement.ledger.push", die)
        with pytest.raises(KeyboardInterrupt):
            office.joins()


def test_after_a_crash_before_its_block_the_stake_is_finished_and_not_repeated(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins_and_dies(office, monkeypatch)
    assert office.stake == 0
    assert "staked already, 1 coins" in office.joins()
    assert office.stake == ETHER


def test_what_a_crash_has_left_is_not_sent_before_all_refusals(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins_and_dies(office, monkeypatch)
    office.town.run("close")
    assert "its owner has closed it; nothing was staked" in office.refused()


def test_a_stake_that_another_folder_may_have_sent_is_not_sent_again(
    office: Office, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chain stake` in another folder was killed; its transaction waits for a block.

    The chain in this process counts no waiting transactions, so the count is made up.
    """
    eth = type(chain.web3.eth)
    count = eth.get_transaction_count

    def counted(self: object, who: str, block: str) -> int:
        return int(count(self, who, block)) + (block == "pending")  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(eth, "get_transaction_count", counted)
        assert "1 transactions of another folder or program wait" in office.refused()
    assert "staked, 1 coins" in office.joins()


@pytest.mark.parametrize(
    ("deposit", "match"),
    [
        ({"stake": ETHER // GWEI - 1, "window": WINDOW}, "the stake 1 coins, the terms say 0.9"),
        ({"stake": ETHER // GWEI + 1, "window": WINDOW}, "the stake 1 coins, the terms say 1.0"),
        ({"stake": ETHER // GWEI, "window": 60}, f"has the window {WINDOW} s, the terms say 60 s"),
    ],
)
def test_other_terms_in_the_contract_are_refused_before_money_moves(
    office: Office, deposit: dict[str, int], match: str
) -> None:
    office.terms = office.terms.model_copy(update={"deposit": Deposit(**deposit)})
    assert match in office.refused()
    assert office.stake == 0


def test_another_account_or_run_file_is_refused_before_money_moves(office: Office) -> None:
    assert "names 0x" in office.refused("b")
    raw = office.config.model_dump(mode="json", exclude_none=True)
    raw["settlement"]["price"] += 1
    office.config = resolve_run(raw)
    assert "was registered with the run file" in office.refused()
    assert not stake_file(office.own).exists()


def test_a_stake_that_is_gone_or_leaving_is_not_replaced_by_itself(office: Office) -> None:
    """A service that starts the site again and again would lose one stake after another."""
    office.joins()
    office.town.run("leave", key="a")
    assert "has said that it leaves" in office.refused()
    office.town.chain.advance(2 * WINDOW + 1)
    office.town.run("leave", key="a")
    assert office.stake == 0
    assert "its stake was taken or given back" in office.refused()
    assert office.stake == 0


def test_the_auditors_are_those_of_the_contract(office: Office) -> None:
    said = json.loads(office.place.read_text())
    said["auditors"] = said["auditors"][:2]
    office.place.write_text(json.dumps(said))
    assert "chain.json names other auditors than contract" in office.refused()


def test_an_owner_registers_what_the_terms_say(office: Office) -> None:
    """The run file names the terms, so nobody could join by a run with another stake."""
    own = office.town
    path = own.root / "terms.toml"
    path.write_text(office.terms.to_toml())
    words = [word for word in own.terms if word not in ("--stake", "1", "--window", WINDOW)]
    assert "names no terms" in own.run("register", *words, "--terms", path, code=1)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    bound(own, terms=digest)
    assert "leave out --stake" in own.run("register", *own.terms, "--terms", path, code=1)
    assert "--stake: name the least stake" in own.run("register", *words, code=1)
    assert "registered run" in own.run("register", *words, "--terms", path)
    state = own.state
    assert (state["minStake"], state["window"]) == (ETHER, WINDOW)


def test_a_run_that_has_ended_takes_no_stake(office: Office) -> None:
    office.town.run("close")
    assert "its owner has closed it; nothing was staked" in office.refused()


def test_a_dead_server_stops_newcomers_and_nobody_who_has_enrolled(
    office: Office, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead:
        @property
        def chain_id(self) -> int:
            raise NoConnectionError("no route")

        def get_code(self, *_: object) -> bytes:
            raise NoConnectionError("no route")

        contract = chain.web3.eth.contract

    class Web:
        eth = Dead()

    with monkeypatch.context() as patch:
        patch.setattr(run_on_chain, "connect", lambda url: Web())
        assert "the chain's server failed" in office.refused()
    office.joins()
    monkeypatch.setattr(run_on_chain, "connect", lambda url: Web())
    assert "a has enrolled before, and joins without a look at the chain" in office.joins()
    run = RunOnChain.read(office.place)
    assert days_left(run, office.town.accounts["a"], office.own) > 89
    assert days_left(run, office.town.accounts["b"], office.own) == 0
    stake_file(office.own).write_text("{}")
    assert days_left(run, office.town.accounts["a"], office.own) == 0


class Trainable(Office):
    """A site of a registered run that this machine could train, with all files for the command."""

    def __init__(self, town: Town, site: str = "a") -> None:  # noqa: F811
        town.deploy()
        root = prepared(town.root / "trainable")
        small = config(root).model_dump(mode="json", exclude_none=True)
        sections = {name: small[name] for name in ("model", "data", "site")}
        said = {
            "price": 2, "accounts": {name: town.accounts[name] for name in "abc"},
            "chain": town.chain.web3.eth.chain_id, "contract": town.contract.lower(),
            "owner": town.accounts["owner"],
        }  # fmt: skip
        network = {"heartbeat": 0.2, "link_timeout": 5.0}
        deposit = {"deposit": Deposit(stake=ETHER // GWEI, window=WINDOW)}
        draft = run_config(network=network, settlement=said, **sections)
        terms = terms_of(draft).model_copy(update=deposit).to_toml()
        said["terms"] = hashlib.sha256(terms.encode()).hexdigest()
        town.scene = Scene(root, network=network, settlement=said, **sections)
        town.scene.notary.writer.cover()
        town.folder = town.scene.config.folder
        town.run("register", *town.terms)
        self.town, self.site, self.config = town, site, town.scene.config
        self.place = town.folder / "settlement" / "chain.json"
        self.own = town.root / "site.key"
        for name, text in {"run.toml": self.config.to_toml(), "terms.toml": terms}.items():
            (town.root / name).write_text(text)
        (town.root / "token").write_text(str(JoinToken("0" * 64, "0" * 32)))

    def refused_on_the_way(self, *words: str) -> str:
        """Why `dilocox join` does not join. Nothing was sent to the chain, and nothing signed."""
        root, before = self.town.root, self.town.balance(self.site)
        sent = self.town.chain.web3.eth.block_number
        said = self.town.command(
            "join", "127.0.0.1:1", "--site", self.site, "--run-file", root / "run.toml",
            "--token-file", root / "token", "--terms", root / "terms.toml", "--chain", self.place,
            "--wallet", root / f"{self.site}.key", "--password-file", root / "password",
            "--key-file", self.own, *words, code=1,
        )  # fmt: skip
        assert (self.town.balance(self.site), self.stake) == (before, 0)
        assert self.town.chain.web3.eth.block_number == sent
        assert not stake_file(self.own).exists()
        return said


def test_nothing_is_paid_before_this_machine_and_the_coordinator_are_ready(
    town: Town,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    office = Trainable(town)
    nowhere = town.root / "no text"
    nowhere.write_text("a file")
    said = office.refused_on_the_way("--set", f"data.folder={nowhere / 'tokens'}")
    assert "no text" in said
    assert "127.0.0.1:1" in office.refused_on_the_way()
    for refused in (["--key-file", str(nowhere)], ["--site", "b"]):
        office.refused_on_the_way(*refused)


def test_no_secret_is_printed_or_written(office: Office, tmp_path: Path) -> None:
    said = office.joins() + office.refused("b")
    files = [path.read_bytes() for path in (tmp_path / "office").rglob("*")
             if path.is_file() and path.suffix != ".key"]  # fmt: skip
    assert len(files) > 2
    for secret in office.town.secrets:
        assert secret not in said
        assert not [1 for data in files if secret.encode() in data]
