"""Four sites train by stake beside a chain in a process of its own, and are settled.

One stakes by the terms that the owner has published. One is lazy, one signs two roots of a round,
and in the end the owner forks its log.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from eth_account.signers.local import LocalAccount

from dilocox.cli.main import main
from dilocox.coordinator.record_keys import RecordKey
from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import read_log
from dilocox.tools.settlement import keystore
from dilocox.tools.settlement.amounts import amounts, read_prefix
from dilocox.tools.settlement.chain_heads import chain_heads
from dilocox.tools.settlement.ledger import Ledger
from dilocox.tools.settlement.run_on_chain import RunOnChain
from tests.support.chains import ETHER, Chain, anvil
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts
from tests.support.second_opinion import second_opinion

pytestmark = [pytest.mark.runs, pytest.mark.slow]
SITES = ("paris", "lyon", "oslo", "rome")
BY_TERMS = "paris"
"""The site that stakes and enrols by `dilocox join --terms --wallet`."""
AUDITORS = ("first", "second", "third")
PASSWORD = "horse battery 0815"
WINDOW, ROUNDS, PRICE, POOL = 1000, 4, 10**9, 40
LONG = 240.0
"""Seconds."""


class Town:
    """A chain, key files, and `dilocox chain` on one run."""

    def __init__(self, workshop: Workshop, chain: Chain, capsys: Any) -> None:
        self.chain, self.capsys, self.said = chain, capsys, ""
        self.root = workshop.root / "keys"
        self.root.mkdir()
        self.folder = workshop.folder("settled")
        (self.root / "password").write_text(PASSWORD)
        (self.root / "password").chmod(0o600)
        self.accounts = {}
        for name in ("owner", *SITES, *AUDITORS):
            self.accounts[name] = keystore.create_key(self.root / f"{name}.key", PASSWORD, rounds=2)
            chain.pay(to=self.accounts[name], value=100 * ETHER)
        self.auditor = RecordKey.kept(self.root / "auditor")
        self.contract = self.run("deploy", "owner", "--rpc", chain.url).split("\n")[0]

    def run(self, action: str, who: str, *words: object, code: int = 0) -> str:
        """`dilocox chain ACTION RUN` with a key; what it prints."""
        place = [] if action == "deploy" else [str(self.folder)]
        with pytest.raises(SystemExit) as ended:
            main(["chain", action, *place, *map(str, words), *self.keys(who)])
        found = "".join(self.capsys.readouterr())
        self.said += found
        assert ended.value.code == code, found
        return found

    def keys(self, who: str) -> list[str]:
        return ["--key", f"{self.root}/{who}.key", "--password-file", f"{self.root}/password"]

    def key(self, who: str) -> LocalAccount:
        return keystore.load_key(self.root / f"{who}.key", PASSWORD)

    @property
    def sets(self) -> tuple[str, ...]:
        """Overrides of the run file."""
        hook = [sys.executable, "-m", "dilocox", "chain", "anchor", str(self.folder)]
        sites = (f"settlement.accounts.{name}={json.dumps(self.accounts[name])}" for name in SITES)
        return (
            PATIENT, "site.stages=1", "outer.fragments=1", f"outer.rounds={ROUNDS}",
            "checkpoint.every_rounds=0", "record.states_every=1", "record.audit_rate=1.0",
            "network.port=0", f"record.anchor={json.dumps([*hook, *self.keys('owner')])}",
            f"settlement.price={PRICE}", f"settlement.auditors=[{json.dumps(self.auditor.public)}]",
            f"settlement.chain={self.chain.web3.eth.chain_id}",
            f"settlement.contract={json.dumps(self.contract)}", 'settlement.admission="stake"',
            f"settlement.owner={json.dumps(self.accounts['owner'])}", *sites,
        )  # fmt: skip

    def write_terms(self, words: list[str]) -> str:
        """Write the terms of the run with these arguments; return their digest."""
        offer = ("--gpu", "l40s", "--link", "100mbit", "--stake", "2", "--window", str(WINDOW))
        path = self.root / "terms.toml"
        with pytest.raises(SystemExit) as ended:
            main(["plan", *words, *offer, "--write-terms", str(path)])
        assert ended.value.code == 0
        return hashlib.sha256(path.read_bytes()).hexdigest()

    @property
    def on_chain(self) -> RunOnChain:
        return RunOnChain.read(self.folder)

    @property
    def ledger(self) -> Ledger:
        return self.on_chain.ledger()

    def stake_of(self, who: str) -> int:
        return int(self.ledger.call("stakes", self.on_chain.run, self.accounts[who])[0])

    def second_root(self, who: str, name: str, kind: str) -> Path:
        """A file with what a cheat signs with a program of its own: another root of one line."""
        path = self.folder / "settlement" / name
        line = json.loads(path.read_text().splitlines()[0])
        (field,) = {"round", "size"} & line.keys()
        said = {"run": self.on_chain.run, field: line[field], "root": b"\7" * 32}
        signature = self.ledger.domain.sign(self.key(who), kind, **said)
        other = self.root / f"other-{name}"
        text = {field: line[field], "root": "07" * 32, "signature": signature.hex()}
        other.write_text(json.dumps(text) + "\n")
        return other


@pytest.fixture
def town(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Town]:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with anvil() as chain:
        yield Town(workshop, chain, capsys)


def trained(town: Town, workshop: Workshop, forge: Forge) -> list[ForkedRun]:
    """The coordinator, the sites and an auditor run to their ends; oslo is lazy."""
    words = workshop.run_file("settled", *town.sets, sites=SITES)
    words += ["--set", f'settlement.terms="{town.write_terms(words)}"']
    coordinator = forge.command(workshop, "settled", "coordinator", *words)
    coordinator.until(lambda: coordinator.printed().count("dilocox join") == len(SITES), LONG)
    address = re.findall(r"dilocox join (\S+) ", coordinator.printed())[0]
    auditors = [word for name in AUDITORS for word in ("--auditor", town.accounts[name])]
    town.run(
        "register", "owner", "--rpc", town.chain.url, "--contract", town.contract, "--terms",
        town.root / "terms.toml", "--pool", POOL, "--quorum", 2, *auditors,
    )  # fmt: skip
    for name in ("owner", *SITES):
        if name != BY_TERMS:
            town.run("stake", name, "--amount", 2)
    joined = [coordinator]
    for name in SITES:
        terms = []
        if name == BY_TERMS:
            terms = ["--terms", str(town.root / "terms.toml"), *town.keys(name)]
            terms[2] = "--wallet"
        else:
            town.run("enrol", name, "--site", name)
        token = town.folder / "coordinator" / "tokens" / name
        joined.append(forge.command(
            workshop, "settled", "join", address, "--site", name, "--run-file", *words,
            "--token-file", str(token), *terms, hooks="skipping" if name == "oslo" else "none",
        ))  # fmt: skip
    checkpoint = town.folder / "record" / "checkpoint"
    # Its second line is the number of statements that it covers.
    coordinator.until(lambda: int(checkpoint.read_text().split("\n")[1]) > 0, LONG)
    joined.append(forge.command(
        workshop, "settled", "auditor", str(town.folder), "--hand-in", "--key",
        str(town.root / "auditor"),
    ))  # fmt: skip
    for each in joined:
        assert each.wait(LONG) in (0, 1), each.output()
    assert [each.wait() for each in joined[:-1]] == [0] * 5, coordinator.output()
    return joined


def test_four_sites_are_settled_and_who_cheats_loses_the_stake(
    town: Town, workshop: Workshop, forge: Forge
) -> None:
    processes = trained(town, workshop, forge)
    town.run("anchor", "owner")  # what the hook has not anchored, if anything
    folder, run = town.folder, town.on_chain
    heads = chain_heads(folder).heads
    assert len(heads) > 2, "the hook has anchored while the run trained"
    entries = read_log(folder / "record").entries
    assert heads[-1].size == len(entries)

    by_terms = processes[1 + SITES.index(BY_TERMS)].output()
    assert "staked, 2 coins" in by_terms
    assert "vouches for the key of paris" in by_terms

    # Every enrolment is by stake, and the lazy site alone is found lazy.
    said = [s.opened(each)[0] for each in entries]
    assert sum("stake" in each.predicate for each in said if each.kind == s.ENROLMENT) == 4
    course = read_prefix(folder).course
    bad = {(each.site, each.verdict) for each in course.verdicts if each.verdict != "EXACT"}
    assert bad == {("oslo", "MISMATCH")}
    places = {"chain": chain_heads(folder)}
    assert verdicts(folder, **places) == {"audits": "FAIL", "beacon": "NOT_RUN"}

    # Settled and claimed, to the wei of a second implementation.
    town.run("settle", "owner")
    town.chain.advance(WINDOW + 1)
    owed = second_opinion(folder, heads[-1].size)
    assert set(owed) == {town.accounts[name].lower() for name in SITES if name != "oslo"}
    (lazy,) = (each for each in amounts(course) if each.site == "oslo")
    assert (lazy.wei, len(lazy.withheld) >= ROUNDS) == (0, True)
    for name in SITES:
        before = town.chain.web3.eth.get_balance(town.accounts[name])
        town.run("claim", name)
        gained = town.chain.web3.eth.get_balance(town.accounts[name]) - before
        paid = owed.get(town.accounts[name].lower(), 0)
        assert 0 <= paid - gained < ETHER // 100, "all but the gas"
        assert town.ledger.call("claimed", run.run, town.accounts[name]) == paid
    assert town.ledger.state(run.run)["pool"] == POOL * ETHER - sum(owed.values())

    # A quorum of auditors takes the stake of the lazy site; one alone does not.
    votes = town.root / "votes.json"
    lazily = ("--site", "oslo", "--round", 1, "--votes", votes)
    assert "1 of 2 votes" in town.run("dispute", "first", *lazily)
    assert town.stake_of("oslo") == 2 * ETHER
    assert "slashed" in town.run("dispute", "second", *lazily)
    assert town.stake_of("oslo") == 0
    assert town.ledger.call("balanceOf", town.accounts["first"]) == 2 * ETHER // 10
    honest = ("--site", "paris", "--round", 1, "--votes", town.root / "more.json")
    assert "nothing is a reason to slash" in town.run("dispute", "first", *honest, code=1)

    # Two roots of one round: anybody takes the stake of rome, without anyone's word.
    for name in ("paris", "rome"):
        assert "rounds" in town.run("commit", name, "--site", name)
    own = folder / "settlement" / "commits-rome.jsonl"
    signed = ("--signed", own, town.second_root("rome", own.name, "Commit"))
    assert "slashed" in town.run("dispute", "lyon", *signed)
    assert (town.stake_of("rome"), town.stake_of("paris")) == (0, 2 * ETHER)

    # Two heads of one size: so does the owner, and the run ends.
    own = folder / "settlement" / "heads.jsonl"
    signed = ("--signed", own, town.second_root("owner", own.name, "Head"))
    assert "slashed" in town.run("dispute", "lyon", *signed)
    assert (town.stake_of("owner"), town.ledger.state(run.run)["forked"]) == (0, True)
    found = verdicts(folder, chain=chain_heads(folder))
    assert found == {"anchors": "FAIL", "audits": "FAIL", "beacon": "NOT_RUN"}
    keys_are_nowhere(town, processes)


def keys_are_nowhere(town: Town, processes: list[ForkedRun]) -> None:
    """No key or password stands in what was printed or written, but in its own file."""
    secrets = [PASSWORD, town.auditor.private]
    secrets += [town.key(name).key.hex().removeprefix("0x") for name in town.accounts]
    sites = [town.folder / "private" / f"{name}.key" for name in SITES]
    secrets += [path.read_text().strip() for path in sites]
    own = {*sites, town.root / "auditor", town.root / "password"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in own)
    texts = {"printed": town.said.encode()}
    texts.update({str(n): each.output().encode() for n, each in enumerate(processes)})
    for path in [*town.folder.rglob("*"), *town.root.rglob("*")]:
        if path.is_file() and path not in own:
            texts[str(path)] = path.read_bytes()
    assert len(texts) > 30
    for secret in secrets:
        assert [name for name, text in texts.items() if secret.encode() in text] == []
