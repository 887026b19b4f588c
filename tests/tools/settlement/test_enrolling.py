"""A site joins by stake: `dilocox chain enrol`, the coordinator's look, and the claim `stakes`."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from tests.support.chains import Chain
from tests.support.coordinator_driver import VERSIONS
from tests.support.record_scene import KEYS, Scene

from dilocox.coordinator.client.stake_file import read_stake_proof, stake_file
from dilocox.coordinator.protocol.messages import EnrolRequest, StakeProof
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.stake_gate import StakeGate, look_command
from dilocox.errors import DilocoxError, JoinError
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.record.verify.chain_stakes import judge_stakes
from dilocox.record.verify.claims import NotRunError
from dilocox.tools.settlement.amounts import read_prefix
from dilocox.tools.settlement.chain_heads import chain_heads
from dilocox.tools.settlement.ledger import run_id
from dilocox.tools.settlement.messages import Domain

from .test_amounts import PRICE, scene_with
from .test_binding import claim
from .test_chain_command import Town, town  # noqa: F401 - a fixture

FAR = 2**40
"""Unix time, seconds."""


class Harbour:
    """A town whose run admits by stake. a and b have staked; c has not."""

    def __init__(self, town: Town, **changes: Any) -> None:  # noqa: F811
        """`changes`: by site, the message that its account signs in place of the right one."""
        self.town = town
        town.deploy()
        self.domain = Domain(town.chain.web3.eth.chain_id, town.contract)
        self.changes = changes
        sites = {name: town.accounts[name] for name in "abc"}
        terms = {"chain": self.domain.chain, "contract": town.contract,
                 "owner": town.accounts["owner"], "admission": "stake"}  # fmt: skip
        town.scene = scene_with(
            town.root / "harbour", self.vouch, accounts=sites, price=PRICE, **terms
        )
        town.scene.notary.close()
        town.folder = town.scene.config.folder
        (town.folder / "run.toml").write_text(town.scene.config.to_toml())
        town.register()
        for name in ("owner", "a", "b"):
            town.run("stake", "--amount", 1, key=name)
        town.run("anchor")

    def vouch(self, scene: Scene, site: str) -> StakeProof | None:
        said = {
            "who": site, "run": run_id(self.town.accounts["owner"], scene.notary.run),
            "ed25519Key": bytes.fromhex(KEYS[site].public), "expiry": FAR,
            **self.changes.get(site, {}),
        }  # fmt: skip
        if said["who"] is None:
            return None
        signer = self.town.key(said.pop("who"))
        signature = self.domain.sign(signer, "Enrol", **said).hex()
        return StakeProof(expiry=FAR, signature=signature)

    @property
    def heads(self) -> ChainHeads:
        return chain_heads(self.town.folder)


def staked(town: Town, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:  # noqa: F811
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(said)))
    found = json.loads(town.run("staked"))
    return found["staked"], found["reason"]


def test_a_site_signs_its_key_and_the_coordinator_looks_at_its_stake(
    town: Town,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Harbour(town)
    keys = {}
    for name in ("a", "c"):
        said = town.run("enrol", "--site", name, key=name)
        assert f"{town.accounts[name]} vouches for the key of {name} for 90 days" in said
        assert ("has no stake yet" in said) == (name == "c")
        key = town.folder / "private" / f"{name}.key"
        keys[name] = json.loads(stake_file(key).read_text())
        assert key.stat().st_mode & 0o077 == 0
        town.secrets.append(key.read_text().strip())
    a, c = keys["a"], keys["c"]
    assert staked(town, a, monkeypatch) == (True, f"{town.accounts['a']} has staked")
    for said, why in (
        (c, "has no stake in this run"),
        ({**a, "site": "b"}, "and not by its account"),
        ({**a, "site": "z"}, "which names none"),
        ({**a, "key": c["key"]}, "and not by its account"),
        ({**a, "expiry": a["expiry"] + 1}, "and not by its account"),
        ({**a, "signature": "00" * 65}, "not a signature of an account"),
        ({**a, "key": "zz"}, "not a signature of an account"),
    ):
        found, reason = staked(town, said, monkeypatch)
        assert not found
        assert why in reason
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: a["expiry"] + 1.0)
        assert "has expired" in staked(town, a, monkeypatch)[1]
    town.run("leave", key="a")
    assert "is leaving it" in staked(town, a, monkeypatch)[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("[]"))
    assert "not a file of dilocox chain enrol" in town.run("staked", code=1)
    assert "give 1 to 3650" in town.run("enrol", "--site", "a", "--days", 0, key="a", code=1)
    # Keys of accounts and of sites stand in their own files alone.
    files = [path for path in town.root.rglob("*") if path.is_file()
             and path.suffix != ".key" and path.name != "password"]  # fmt: skip
    assert any(path.suffix == ".enrol" for path in files)
    for secret in town.secrets:
        assert secret not in town.said
        assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.waits
@pytest.mark.slow  # anvil comes from the registry of npm
@pytest.mark.parametrize("chain", ["anvil"], indirect=True)
def test_the_coordinator_looks_at_a_chain_in_a_process_of_its_own(
    town: Town,  # noqa: F811
    chain: Chain,
) -> None:
    harbour, told = Harbour(town), list[str]()
    path = town.folder / "settlement" / "chain.json"
    said = json.loads(path.read_text())
    gate = StakeGate(look_command(town.folder), told.append)

    def admitted(site: str) -> str:
        """Ask until the chain has answered; the reason of a refusal."""
        request = EnrolRequest(
            site=site, token="t", run_digest="0" * 64, versions=VERSIONS, stages=1, shards=1,
            csr="", record_key=KEYS[site].public, stake=harbour.vouch(town.scene, site),
        )  # fmt: skip
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                gate.check(request, "")
            except Refused as why:
                if "being looked up" not in str(why):
                    return str(why)
                time.sleep(0.02)
            else:
                return ""
        return "no answer"

    path.write_text(json.dumps({**said, "rpc": chain.url}))
    assert admitted("a") == ""
    assert "has no stake in this run" in admitted("c")
    path.write_text(json.dumps({**said, "rpc": "http://user:geheim@127.0.0.1:9/v3/0123secret"}))
    assert "its stake cannot be looked up now" in admitted("b")
    (line,) = told
    assert "the chain's server failed" in line
    assert "geheim" not in line
    assert "0123secret" not in line


def test_a_site_reads_the_file_that_vouches_for_its_own_key_alone(tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    said = {"site": "a", "key": KEYS["a"].public, "expiry": 7, "signature": "ab" * 65}
    with pytest.raises(JoinError, match="missing, and this run admits by stake"):
        read_stake_proof(key, KEYS["a"].public)
    stake_file(key).write_text(json.dumps(said))
    found = read_stake_proof(key, KEYS["a"].public)
    assert found == StakeProof(expiry=7, signature="ab" * 65)
    with pytest.raises(JoinError, match="signed for another key"):
        read_stake_proof(key, KEYS["b"].public)
    for text in ("{", "[]", json.dumps({**said, "signature": "ab"}), json.dumps({"key": 1})):
        stake_file(key).write_text(text)
        with pytest.raises(JoinError, match="not a file of dilocox chain enrol"):
            read_stake_proof(key, KEYS["a"].public)


def test_verify_judges_the_stakes_of_the_enrolments(
    town: Town,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    harbour = Harbour(town)
    verdict, reason = claim("stakes", town.folder, town.folder, capsys)
    assert verdict == "FAIL"
    assert f"of c: its account {town.accounts['c'].lower()} never had a stake" in reason
    town.run("stake", "--amount", 1, key="c")
    assert claim("stakes", town.folder, town.folder, capsys) == (
        "PASS", "3 enrolments of 3 sites, signed by 3 accounts that have staked",
    )  # fmt: skip
    # Who has left since has staked all the same: the claim is about the log, not about today.
    town.run("leave", key="c")
    assert claim("stakes", town.folder, town.folder, capsys)[0] == "PASS"
    course, heads = read_prefix(town.folder).course, harbour.heads
    with pytest.raises(NotRunError, match="the server is gone"):
        judge_stakes(replace(heads, fault="the server is gone"), course)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"who": None}, "no account vouches for its key"),
        ({"who": "a"}, "and not by the site's account"),
        ({"run": b"\1" * 32}, "and not by the site's account"),
        ({"ed25519Key": b"\1" * 32}, "and not by the site's account"),
        ({"expiry": 5}, "and not by the site's account"),
    ],
)
def test_an_enrolment_of_another_account_key_or_run_is_named(
    town: Town,  # noqa: F811
    change: dict[str, Any],
    said: str,
) -> None:
    harbour = Harbour(town, b=change)
    with pytest.raises(DilocoxError, match=f"enrolment 2, of b: .*{said}"):
        judge_stakes(harbour.heads, read_prefix(town.folder).course)
