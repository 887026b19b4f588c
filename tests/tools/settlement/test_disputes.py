"""Disputes by `dilocox chain dispute`: signatures that contradict each other, and quorums."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("web3")

from tests.support.chains import ETHER
from tests.support.ledger_scene import WINDOW

from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import Selection, Signed, Verdict, write
from dilocox.record.writer.notary import commitment
from dilocox.tools.settlement import settling
from dilocox.tools.settlement.disputes import commitment_roots

from .test_amounts import AUDITOR, scene_with
from .test_chain_command import Town, town  # noqa: F401 - a fixture


def begun(town: Town) -> None:  # noqa: F811
    """The run is registered, the owner and site c have staked, and a head is anchored."""
    town.register()
    for key in ("owner", "c"):
        town.run("stake", key=key)
    town.run("anchor")


def stake_of(town: Town, name: str) -> int:  # noqa: F811
    run = settling.RunOnChain.read(town.folder)
    return int(run.ledger().call("stakes", run.run, town.accounts[name])[0])


def another_log(town: Town) -> Path:  # noqa: F811
    """Folder of another log that was made for the same run: c commits to something else."""
    other = town.root / "other"
    shutil.copytree(town.folder, other)
    shutil.rmtree(other / "record")
    scene = scene_with(town.root / "forked")
    scene.notary.close()
    shutil.copytree(scene.config.folder / "record", other / "record")
    for path in (other / "settlement").glob("*.jsonl"):
        path.unlink()
    return other


def on(town: Town, folder: Path) -> None:  # noqa: F811
    """Let commands work on another folder."""
    town.folder = folder


def test_a_site_that_signs_two_roots_of_a_round_is_slashed_without_anyone_s_word(
    town: Town,  # noqa: F811
) -> None:
    begun(town)
    own, other = town.folder, another_log(town)
    said = town.run("commit", "--site", "c", key="c")
    assert "1 rounds, 1 of them new" in said
    assert "0 of them new" in town.run("commit", "--site", "c", key="c")
    on(town, other)
    town.run("commit", "--site", "c", key="c")
    on(town, own)
    files = [own / "settlement/commits-c.jsonl", other / "settlement/commits-c.jsonl"]
    assert "nothing to slash" in town.run(
        "dispute", "--signed", files[0], files[0], key="a", code=1
    )
    pool = town.state["pool"]
    assert "slashed" in town.run("dispute", "--signed", *files, key="a")
    assert stake_of(town, "c") == 0
    assert town.state["pool"] - pool == ETHER * 9 // 10
    assert "punished already" in town.run("dispute", "--signed", *files, key="b")


def test_an_honest_site_does_not_sign_a_second_root_after_a_resume(
    town: Town,  # noqa: F811
) -> None:
    """A round that is trained again may give other commitments."""
    begun(town)
    town.run("commit", "--site", "c", key="c")
    shutil.copy(town.folder / "settlement/commits-c.jsonl", town.root / "kept")
    own, other = town.folder, another_log(town)
    shutil.copy(town.root / "kept", other / "settlement/commits-c.jsonl")
    on(town, other)
    assert "would cost the stake" in town.run("commit", "--site", "c", key="c", code=1)
    on(town, own)


def test_a_coordinator_that_forks_its_log_loses_its_stake(town: Town) -> None:  # noqa: F811
    begun(town)
    heads = town.folder / "settlement/heads.jsonl"
    line = json.loads(heads.read_text().splitlines()[0])
    run = settling.RunOnChain.read(town.folder)
    forged = {"run": run.run, "size": line["size"], "root": b"\7" * 32}
    key = town.key("owner")
    signature = run.ledger().domain.sign(key, "Head", **forged)
    other = town.root / "other-heads.jsonl"
    said = {"size": line["size"], "root": "07" * 32, "signature": signature.hex()}
    other.write_text(json.dumps(said) + "\n")
    assert "slashed" in town.run("dispute", "--signed", heads, other, key="a")
    assert stake_of(town, "owner") == 0
    assert "FORKED" in town.run("status")
    assert "RunEnded" in town.run("settle", code=1)


def test_auditors_veto_a_settlement_that_the_log_does_not_give(
    town: Town,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun(town)
    votes = town.root / "votes"
    assert "no settlement is pending" in town.run(
        "dispute", "--veto", "--votes", votes, key="a", code=1
    )
    with monkeypatch.context() as patch:  # an owner that pays itself
        stolen = {town.accounts["owner"].lower(): 30 * ETHER}
        patch.setattr(settling, "by_account", lambda found: stolen)
        assert "settled 30" in town.run("settle")
    assert "1 of 2 votes" in town.run("dispute", "--veto", "--votes", votes, key="a")
    assert "is not one of the run's auditors" in town.run(
        "dispute", "--veto", "--votes", votes, key="owner", code=1
    )
    assert "1 of 2 votes" in town.run("dispute", "--veto", "--votes", votes, key="a")
    assert "vetoed settlement 1" in town.run("dispute", "--veto", "--votes", votes, key="b")
    town.chain.advance(WINDOW + 1)
    assert "no settlement is accepted" in town.run("claim")
    # A right one is not vetoed.
    assert "to 3 accounts" in town.run("settle")
    assert "no veto" in town.run("dispute", "--veto", "--votes", votes, key="a", code=1)


@pytest.mark.parametrize("same_class", [True, False, None])
def test_a_lazy_site_is_slashed_by_a_quorum_within_its_class_alone(
    town: Town,  # noqa: F811
    same_class: bool | None,
) -> None:
    begun(town)
    verdict = Verdict("c", 0, "MISMATCH", "other payload", 3, same_class=same_class)
    run = town.scene.notary.run
    write(
        town.folder, Signed(verdict, Selection("request"), AUDITOR.public, run), AUDITOR, "5" * 64
    )
    words = ("dispute", "--site", "c", "--round", 0, "--votes", town.root / "votes")
    if not same_class:
        assert "determinism class" in town.run(*words, key="a", code=1)
        assert stake_of(town, "c") == ETHER
        return
    assert "1 of 2 votes" in town.run(*words, key="a")
    assert "slashed" in town.run(*words, key="b")
    assert stake_of(town, "c") == 0
    run_ = settling.RunOnChain.read(town.folder)
    assert run_.ledger().call("balanceOf", town.accounts["a"]) == ETHER // 10
    assert "punished already" in town.run(*words, key="b")


def test_the_order_of_the_log_does_not_change_a_root() -> None:
    signer = s.Signer.from_hex("11" * 32)

    def entry(round_: int, fragment: int) -> str:
        from dilocox.coordinator.protocol.exchange_key import ExchangeKey
        from dilocox.coordinator.protocol.messages import RankId

        key = ExchangeKey.outer(round_, 0, fragment)
        rank = RankId(site="c", stage=0, shard=0)
        return signer.sign(
            commitment(run="1" * 64, key=key, rank=rank, values="2" * 64, payload=None)
        )

    lines = [entry(0, 0), entry(0, 1), entry(1, 0)]
    found = commitment_roots(lines, "c")
    assert list(found) == [0]
    assert commitment_roots([lines[1], lines[0], lines[2]], "c") == found
    assert commitment_roots([*lines[:1], lines[2]], "c") != found
    assert commitment_roots(lines, "a") == {}
