"""Changes of the log, of chain.json and of what the chain's server says, and which claim says so.

The log's key is in the hands of who changes it: every changed log is signed anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from tests.support.ledger_scene import deployed
from tests.support.older_record import log_key, resign

from dilocox.config.run_config import digest_of
from dilocox.record.log import statements as s
from dilocox.record.verify.claims import exit_code
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.settlement.chain_heads import chain_heads
from dilocox.tools.settlement.ledger import Ledger
from dilocox.tools.settlement.run_on_chain import RunOnChain

from .test_chain_command import Town, town  # noqa: F401 - a fixture
from .test_enrolling import Harbour

ON_CHAIN = ("log", "signatures", "anchors", "stakes")
Events = list[dict[str, Any]]


@dataclass
class Evidence:
    """A copy of a run's folder, and what the chain's server says of the run."""

    town: Town
    folder: Path
    lies: dict[str, Callable[[Events], Events]] = field(default_factory=dict)
    """By name of an event: what the server makes of them."""

    def chain_file(self, **said: Any) -> None:
        """Change chain.json."""
        path = self.folder / "settlement" / "chain.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **said}))

    def enrolment(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the enrolment of site b, and sign it and the log anew."""

        def within(entries: list[str]) -> None:
            for number, entry in enumerate(entries):
                found = s.opened(entry)[0]
                if found.kind == s.ENROLMENT and found.predicate["site"] == "b":
                    said = json.loads(json.dumps(dict(found.predicate)))
                    change(said)
                    signer = s.Signer(log_key(self.folder))
                    entries[number] = signer.sign(s.Statement(found.kind, found.subjects, said))

        resign(self.folder, within)

    def register_again(self, contract: str, who: str) -> None:
        """Register the log a second time, by the same run file."""
        digest = digest_of(self.town.scene.config.shared())
        log = bytes.fromhex(self.town.scene.notary.run)
        ledger = Ledger(self.town.chain.web3, contract, self.town.key(who))
        ledger.send("register", log, bytes.fromhex(digest), 5, 1, b"\1" * 32, 1)

    def verdicts(self, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], str]:
        """Claims of a chain that are not PASS, and their reasons."""
        real = Ledger.events

        def events(ledger: Ledger, name: str, *where: Any) -> Events:
            return self.lies.get(name, lambda found: found)(real(ledger, name, *where))

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "events", events)
            heads = chain_heads(self.folder)
        report = verify(Places(self.folder, chain=heads), lambda what, share: None)
        bad = [each for each in report.findings
               if each.claim.name in ON_CHAIN and each.verdict != "PASS"]  # fmt: skip
        # The reader has named a chain, so what it does not say is no success.
        worst = {each.verdict for each in bad}
        assert exit_code(bad) == (1 if FAIL in worst else 3 if worst else 0)
        return {f.claim.name: f.verdict for f in bad}, "\n".join(each.reason for each in bad)


def swapped(entries: list[str]) -> None:
    """Two commitments change their places: every signature stays good."""
    kinds = [s.opened(entry)[0].kind for entry in entries]
    first = kinds.index(s.COMMITMENT)
    entries[first], entries[first + 1] = entries[first + 1], entries[first]


def second_contract(evidence: Evidence) -> None:
    contract = deployed(evidence.town.chain)
    evidence.register_again(contract, "owner")
    evidence.chain_file(contract=contract)


def other_owner(evidence: Evidence) -> None:
    evidence.register_again(evidence.town.contract, "a")
    evidence.chain_file(owner=evidence.town.accounts["a"])


def forked(evidence: Evidence) -> None:
    """The owner signs another head of the anchored size. It cannot be undone: the last case."""
    own = evidence.town.folder / "settlement" / "heads.jsonl"
    line = json.loads(own.read_text())
    run = RunOnChain.read(evidence.folder).run
    domain = Ledger(evidence.town.chain.web3, evidence.town.contract).domain
    said = {"run": run, "size": line["size"], "root": b"\7" * 32}
    signature = domain.sign(evidence.town.key("owner"), "Head", **said).hex()
    other = evidence.folder / "other.jsonl"
    text = {"size": line["size"], "root": "07" * 32, "signature": signature}
    other.write_text(json.dumps(text) + "\n")
    assert "slashed" in evidence.town.run("dispute", "--signed", own, other, key="c")


def proof_of(site: str, evidence: Evidence) -> dict[str, Any]:
    entries = evidence.town.scene.entries()
    said = [s.opened(entry)[0] for entry in entries]
    (found,) = (each.predicate["stake"] for each in said
                if each.kind == s.ENROLMENT and each.predicate["site"] == site)  # fmt: skip
    return dict(found)


FAIL, NOT_RUN = "FAIL", "NOT_RUN"
BOTH = {"anchors": FAIL, "stakes": FAIL}
UNASKED = {"anchors": NOT_RUN, "stakes": NOT_RUN}
CASES: dict[str, tuple[Callable[[Evidence], object], dict[str, str], str]] = {
    "nothing": (lambda e: None, {}, ""),
    "statements change places": (
        lambda e: resign(e.folder, swapped), {"anchors": FAIL}, "is not a prefix of this log"),
    "the log is cut back": (
        lambda e: resign(e.folder, lambda entries: entries.pop()), {"anchors": FAIL},
        "it was cut back"),
    "an enrolment loses its signature": (
        lambda e: e.enrolment(lambda said: said.pop("stake")), BOTH, "no account vouches"),
    "an enrolment gets the signature of another site": (
        lambda e: e.enrolment(lambda said: said.update(stake=proof_of("a", e))), BOTH,
        "and not by the site's account"),
    "an enrolment gets another expiry": (
        lambda e: e.enrolment(lambda said: said["stake"].update(expiry=5)), BOTH,
        "and not by the site's account"),
    "an enrolment gets rubbish for a signature": (
        lambda e: e.enrolment(lambda said: said["stake"].update(signature="zz")), BOTH,
        "not a signature of an account"),
    "an enrolment names another key": (
        lambda e: e.enrolment(lambda said: said.update(key="77" * 32)),
        {"signatures": FAIL, "anchors": NOT_RUN}, "77"),
    "chain.json names a second contract": (second_contract, BOTH, "in a second place"),
    "chain.json names another owner": (other_owner, BOTH, "in a second place"),
    "chain.json names another chain": (
        lambda e: e.chain_file(chain=5), UNASKED, "the run of chain 5"),
    "chain.json names another log": (
        lambda e: e.chain_file(log="44" * 32), UNASKED, "is not registered"),
    "chain.json names a contract that there is not": (
        lambda e: e.chain_file(contract="0x" + "55" * 20), UNASKED, "the chain"),
    "the server says that another run file was registered": (
        lambda e: e.lies.update(
            Registered=lambda found: [{**found[0], "manifest": b"\6" * 32}]),
        BOTH, "was registered with the run file 0606"),
    "the server changes a head": (
        lambda e: e.lies.update(Anchored=lambda found: [{**found[0], "root": b"\6" * 32}]),
        {"anchors": FAIL}, "is not a prefix of this log"),
    "the server invents a head": (
        lambda e: e.lies.update(
            Anchored=lambda found: [*found, {"size": 999, "root": b"\6" * 32}]),
        {"anchors": FAIL}, "it was cut back"),
    "the server hides the heads": (
        lambda e: e.lies.update(Anchored=lambda found: []), UNASKED,
        "does not give all heads"),
    "the server hides a stake": (
        lambda e: e.lies.update(
            Staked=lambda found: [x for x in found if x["who"] != e.town.accounts["b"]]),
        {"stakes": FAIL}, "never had a stake"),
    "the owner signs two heads of one size": (
        forked, {"anchors": FAIL}, "the owner has signed two logs"),
}  # fmt: skip


def test_each_tampering_of_a_chains_evidence_is_named_by_its_claim(
    town: Town,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Harbour(town)
    town.run("stake", "--amount", 1, key="c")
    found = {}
    for number, (name, (change, _, reason)) in enumerate(CASES.items()):
        folder = town.root / f"case {number}"
        shutil.copytree(town.folder, folder)
        shutil.copytree(town.scene.folder, folder / "coordinator")
        evidence = Evidence(town, folder)
        change(evidence)
        found[name], said = evidence.verdicts(monkeypatch)
        assert reason in said, (name, said)
    assert found == {name: expected for name, (_, expected, _) in CASES.items()}
    assert len(CASES) == 19
