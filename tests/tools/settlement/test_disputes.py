"""Disputes by `dilocox chain dispute`: signatures that contradict each other, and quorums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("web3")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.chains import ETHER
from tests.support.ledger_scene import WINDOW
from tests.support.record_scene import SIGNERS, own_digest

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import SettlementError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import (
    Prefix,
    Selection,
    Signed,
    Verdict,
    read,
    write,
)
from dilocox.record.log.transparency_log import LogWriter
from dilocox.record.log.verdict_statements import of_file
from dilocox.record.writer.exchange_statements import commitment
from dilocox.tools.settlement import disputes, ledger, settling
from dilocox.tools.settlement.amounts import read_prefix
from dilocox.tools.settlement.disputes import commitment_roots

from .test_amounts import AUDITOR, OTHER, PRICE, scene_with
from .test_chain_command import Town, town  # noqa: F401 - a fixture


def begun(town: Town) -> None:  # noqa: F811
    """The run is registered, the owner and site c have staked, and a head is anchored."""
    town.register()
    for key in ("owner", "c"):
        town.run("stake", "--amount", 1, key=key)
    town.run("anchor")


def stake_of(town: Town, name: str) -> int:  # noqa: F811
    run = settling.RunOnChain.read(town.folder)
    return int(run.ledger().call("stakes", run.run, town.accounts[name])[0])


def copy_of(town: Town, name: str) -> Path:  # noqa: F811
    """A copy of the record in another folder, with `chain.json`, and with nothing else."""
    town.scene.notary.writer.cover()
    other = town.root / name
    shutil.copytree(town.folder, other)
    for path in (other / "settlement").glob("*.jsonl"):
        path.unlink()
    return other


def fork(town: Town, folder: Path, size: int) -> None:  # noqa: F811
    """Let the log in a folder go on, by the run's own key, with other statements, up to `size`."""
    notary = town.scene.notary
    seed = (town.scene.folder / "record-key").read_text().strip()
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
    writer = LogWriter(folder / "record", notary.writer.public.name, key)
    for round_ in range(size - writer.size):
        said = {"run": notary.run, "round": round_ + 100, "tick": 10**6}
        writer.append(notary.signer.sign(s.Statement(s.RESUME, {}, said)))
    writer.close()


def train_again(town: Town) -> None:  # noqa: F811
    """A resume goes back to the beginning of round 1, and site c commits to something else."""
    scene = town.scene
    decided = scene.decisions()[2:]
    scene.notary.resumed(1, scene.driver.core.state.plans[1].first_tick)
    for said, subjects in decided:
        key = ExchangeKey.parse(said["exchange_key"])
        values = own_digest("other values of c")
        rank = RankId(site="c", stage=0, shard=0)
        other = commitment(scene.notary.run, rank, key, values, subjects["c/0"])
        scene.notary.writer.append(SIGNERS["c"].sign(other))
        scene.decide(said, subjects)


def on(town: Town, folder: Path) -> None:  # noqa: F811
    """Let commands work on another folder."""
    town.folder = folder


def test_a_site_that_signs_two_roots_of_a_round_is_slashed_without_anyone_s_word(
    town: Town,  # noqa: F811
) -> None:
    begun(town)
    said = town.run("commit", "--site", "c", key="c")
    assert "2 rounds, 2 of them new" in said
    assert "0 of them new" in town.run("commit", "--site", "c", key="c")
    run = settling.RunOnChain.read(town.folder)
    forged = {"run": run.run, "round": 0, "root": b"\7" * 32}
    signature = run.ledger().domain.sign(town.key("c"), "Commit", **forged).hex()
    other = town.root / "other.jsonl"
    other.write_text(json.dumps({"round": 0, "root": "07" * 32, "signature": signature}) + "\n")
    files = [town.folder / "settlement/commits-c.jsonl", other]
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
    """A round that is trained again has other commitments, also in a newer copy of the record."""
    begun(town)
    town.run("commit", "--site", "c", key="c")
    signed = (town.folder / "settlement/commits-c.jsonl").read_text().splitlines()
    train_again(town)
    own, other = town.folder, copy_of(town, "newer")
    for folder in (own, other):
        on(town, folder)
        said = town.run("commit", "--site", "c", key="c")
        assert "round 1: another root was signed before" in said
        assert "round 0" not in said
        assert "2 rounds, 0 of them new" in said
    assert (own / "settlement/commits-c.jsonl").read_text().splitlines() == signed
    # The round that has not changed is in the newer copy's file as it was.
    assert (other / "settlement/commits-c.jsonl").read_text().splitlines() == signed[:1]
    on(town, own)


def test_nothing_is_signed_for_statements_that_nobody_has_signed(
    town: Town,  # noqa: F811
) -> None:
    begun(town)
    other = copy_of(town, "cut")
    path = other / "record/statements.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    rank = RankId(site="c", stage=0, shard=0)
    key = ExchangeKey.outer(1, 0, 0)
    said = commitment(town.scene.notary.run, rank, key, own_digest("c"), own_digest("c"))
    town.scene.notary.writer.append(SIGNERS["a"].sign(said))
    town.scene.notary.writer.cover()
    own = town.folder
    for folder, reason in ((other, "it was cut"), (own, "the signature is not one of key")):
        on(town, folder)
        assert reason in town.run("commit", "--site", "c", key="c", code=1)
        assert not (folder / "settlement/commits-c.jsonl").exists()
    on(town, own)


def test_only_the_account_of_one_site_can_commit(town: Town) -> None:  # noqa: F811
    """A signed commitment names no site, so two sites with one account would equivocate."""
    begun(town)
    assert "but --key is of" in town.run("commit", "--site", "c", key="a", code=1)
    assert "names no account" in town.run("commit", "--site", "nobody", key="a", code=1)
    shared = {"a": "0x" + "aA" * 20, "c": "0x" + "aa" * 20}
    with pytest.raises(SettlementError, match="one account with c"):
        disputes._check_own("0x" + "aa" * 20, shared, "a")


def test_rubbish_and_lines_of_others_hide_no_contradiction(town: Town) -> None:  # noqa: F811
    """All lines may even be in one file."""
    begun(town)
    run = settling.RunOnChain.read(town.folder)
    lines = ["", "{", "[]", '{"size": 1}']
    for name, number, who, root in (
        ("size", 1, "a", 1), ("size", 1, "b", 2), ("size", 1, "owner", 3),
        ("round", 0, "a", 1), ("round", 0, "a", 2),  # a has no stake
        ("round", 7, "c", 1), ("round", 7, "c", 2),
        ("size", 1, "owner", 4),
    ):  # fmt: skip
        kind = disputes.KINDS[name][0]
        said = {"run": run.run, name: number, "root": bytes([root]) * 32}
        signature = run.ledger().domain.sign(town.key(who), kind, **said).hex()
        lines.append(json.dumps({name: number, "root": f"{root:02x}" * 32, "signature": signature}))
    lines.insert(5, json.dumps({"size": 1, "root": "09" * 32, "signature": "00" * 65}))
    file = town.root / "mixed.jsonl"
    file.write_text("\n".join(lines) + '\n{"size": 1, "ro')
    assert "size 1: slashed" in town.run("dispute", "--signed", file, file, key="b")
    assert stake_of(town, "owner") == 0
    said = town.run("dispute", "--signed", file, file, key="b")
    assert "size 1: punished already" in said
    assert "round 7: slashed" in said
    assert stake_of(town, "c") == 0


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
    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "events", lambda *_: [])
        said = town.run("dispute", "--veto", "--votes", votes, key="b", code=1)
        assert "does not give the events" in said
        assert said.count("\n") == 1
    assert "vetoed settlement 1" in town.run("dispute", "--veto", "--votes", votes, key="b")
    assert "vetoed already" in town.run("dispute", "--veto", "--votes", votes, key="b")
    town.chain.advance(WINDOW + 1)
    assert "no settlement is accepted" in town.run("claim")
    # A right one is not vetoed.
    assert "to 3 accounts" in town.run("settle")
    assert "no veto" in town.run("dispute", "--veto", "--votes", votes, key="a", code=1)


@pytest.fixture
def stolen(town: Town, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:  # noqa: F811
    """Lets the owner anchor the newest head, and settle all to itself, whatever the log says."""

    def settle() -> None:
        town.scene.notary.writer.cover()
        assert "anchored" in town.run("anchor")
        with monkeypatch.context() as patch:
            amounts = {town.accounts["owner"].lower(): 30 * ETHER}
            patch.setattr(settling, "owed_at", lambda *_: amounts)
            assert "settled 30" in town.run("settle")

    return settle


def robbed(town: Town, stolen: Callable[[], None]) -> tuple[Path, Path]:  # noqa: F811
    """The owner has settled on a log that goes on behind an auditor's copy; both folders."""
    begun(town)
    other = copy_of(town, "auditor")
    town.scene.notary.resumed(2, 10**6)
    stolen()
    return town.folder, other


def veto_of(town: Town) -> tuple[str | Path, ...]:  # noqa: F811
    """The words of an auditor's veto."""
    return ("dispute", "--veto", "--votes", town.root / "votes")


def test_an_owner_that_anchors_a_forked_log_is_vetoed(
    town: Town,  # noqa: F811
    stolen: Callable[[], None],
) -> None:
    own, other = robbed(town, stolen)
    fork(town, other, town.state["size"])
    veto = veto_of(town)
    on(town, other)
    said = town.run(*veto, key="a")
    assert "is not a prefix of this log" in said
    assert "1 of 2 votes" in said
    assert "vetoed settlement 1" in town.run(*veto, key="b")
    on(town, own)


def test_an_owner_that_withholds_the_log_is_vetoed_if_an_auditor_says_so(
    town: Town,  # noqa: F811
    stolen: Callable[[], None],
) -> None:
    own, other = robbed(town, stolen)
    veto = veto_of(town)
    assert "give --veto, too" in town.run("dispute", "--site", "c", "--withheld", key="a", code=1)
    on(town, other)
    assert "get the newer log from the owner" in town.run(*veto, key="a", code=1)
    assert "the owner withholds the log" in town.run(*veto, "--withheld", key="a")
    # Also if there is no copy at all.
    shutil.rmtree(other / "record")
    assert "missing" in town.run(*veto, key="b", code=1)
    assert "vetoed settlement 1" in town.run(*veto, "--withheld", key="b")
    on(town, own)


def test_an_owner_that_anchors_what_nobody_can_read_is_vetoed(
    town: Town,  # noqa: F811
    stolen: Callable[[], None],
) -> None:
    begun(town)
    said = {"run": town.scene.notary.run, "round": 2, "tick": 10**6}
    town.scene.notary.writer.append(OTHER.sign(s.Statement(s.RESUME, {}, said)))
    stolen()
    said_ = town.run("dispute", "--veto", "--votes", town.root / "votes", key="a")
    assert "the anchored log gives no amounts" in said_
    assert "1 of 2 votes" in said_


def test_a_copy_of_another_run_is_no_reason_to_veto(
    town: Town,  # noqa: F811
    stolen: Callable[[], None],
) -> None:
    begun(town)
    own, other = town.folder, copy_of(town, "auditor")
    stolen()
    strange = scene_with(town.root / "strange", price=PRICE)
    strange.notary.close()
    shutil.rmtree(other / "record")
    shutil.copytree(strange.config.folder / "record", other / "record")
    veto = veto_of(town)
    on(town, other)
    assert "is not of the log that was registered" in town.run(*veto, key="a", code=1)
    on(town, own)


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


def audited(town: Town, signer: s.Signer, reason: str = "other payload") -> Path:  # noqa: F811
    """File of an auditor's verdict on site c."""
    verdict = Verdict("c", 0, "MISMATCH", reason, 3, same_class=True)
    signed = Signed(verdict, Selection("request"), signer.public, town.scene.notary.run)
    return write(town.folder, signed, signer, "5" * 64)


def test_auditors_agree_though_each_has_another_file(town: Town) -> None:  # noqa: F811
    begun(town)
    words = ("dispute", "--site", "c", "--round", 0, "--votes", town.root / "votes")
    audited(town, OTHER)  # whom the run file does not name
    assert "by an auditor of the run file" in town.run(*words, key="a", code=1)
    path = audited(town, AUDITOR)
    assert "1 of 2 votes" in town.run(*words, key="a")
    path.unlink()
    assert "no verdict MISMATCH" in town.run(*words, key="b", code=1)
    audited(town, AUDITOR, "found later")
    assert "slashed" in town.run(*words, key="b")


def test_what_lies_in_the_folder_of_audits_stops_no_dispute(
    town: Town,  # noqa: F811
) -> None:
    begun(town)
    words = ("dispute", "--site", "c", "--round", 0, "--votes", town.root / "votes")
    run, size = town.scene.notary.run, len(town.scene.entries())
    verdict = Verdict("c", 0, "MISMATCH", "of another log", 3, same_class=True)
    strange = Signed(verdict, Selection("request"), AUDITOR.public, run, Prefix(size, "00" * 32))
    other = write(town.folder, strange, AUDITOR, "5" * 64)
    other.rename(other.with_name("000000-a.json"))
    assert "passed over: the audit of round 0 of c was made by another log" in town.run(
        *words, key="a", code=1
    )
    other.with_name("000000-b.json").write_text("[")
    audited(town, AUDITOR)
    assert "1 of 2 votes" in town.run(*words, key="a")


def test_a_verdict_that_its_auditor_has_replaced_is_no_reason(town: Town) -> None:  # noqa: F811
    """By the log. Its file is still in the folder."""
    begun(town)
    path = audited(town, AUDITOR)
    prefix = read_prefix(town.folder)
    course = prefix.course
    said = of_file(read(path, course.run), path.read_text(), "")
    course.verdicts.append(said)
    assert disputes._evidence(town.folder, prefix, "c", 0)
    course.verdicts.append(replace(said, verdict="EXACT", digest="00" * 32, number=said.number + 1))
    with pytest.raises(SettlementError, match="round 0 of c: no verdict MISMATCH"):
        disputes._evidence(town.folder, prefix, "c", 0)


def test_the_tenth_goes_to_nobody_who_has_not_voted(town: Town) -> None:  # noqa: F811
    begun(town)
    audited(town, AUDITOR)
    votes = town.root / "votes"
    words = ("dispute", "--site", "c", "--round", 0, "--votes", votes)
    town.run(*words, key="a")
    said = json.loads(votes.read_text())
    said["values"]["challenger"] = town.accounts["owner"]
    votes.write_text(json.dumps({**said, "votes": {}}))
    assert "which has not voted" in town.run(*words, key="b", code=1)


VOTES = [
    "", "[]", "\udcff", '{"kind": 1, "values": [], "votes": {}}',
    '{"kind": "Veto", "values": {}, "votes": {"0x12": "00"}}',
    '{"kind": "Veto", "values": {}, "votes": {"0x1111111111111111111111111111111111111111": "zz"}}',
    '{"kind": "Veto", "values": {}, "votes": {"0x1111111111111111111111111111111111111111": 7}}',
]  # fmt: skip


@pytest.mark.parametrize("text", VOTES)
def test_a_bad_file_of_votes_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "votes"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettlementError, match="not a file of votes"):
        disputes._read_votes(path)


def test_the_order_of_the_log_does_not_change_a_root(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    entries = scene.entries()
    scene.notary.close()
    found = commitment_roots(entries, "c", 1)
    assert list(found) == [0, 1]
    kinds = [s.opened(each)[0].kind for each in entries]
    number = kinds.index(s.COMMITMENT)
    assert kinds[number : number + 3] == [s.COMMITMENT] * 3
    turned = [*entries[:number], *reversed(entries[number : number + 3]), *entries[number + 3 :]]
    assert commitment_roots(turned, "c", 1) == found
    assert commitment_roots(entries, "nobody", 1) == {}
    assert commitment_roots(entries, "a", 1) != found


def test_a_round_is_finished_by_its_last_exchange(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    entries = scene.entries()
    kinds = [s.opened(each)[0].kind for each in entries]
    ends = [number for number, kind in enumerate(kinds) if kind == s.STEP]
    assert len(ends) == 4
    found = commitment_roots(entries, "c", 1)
    late = next(each for number, each in enumerate(entries) if kinds[number] == s.COMMITMENT)
    for number, rounds in enumerate(([], [0], [0], [0, 1])):
        cut = entries[: ends[number] + 1]
        assert list(commitment_roots(cut, "c", 1)) == rounds
        assert commitment_roots([*cut, late], "c", 1).items() <= found.items()
    assert commitment_roots(entries, "c", 2) == {}, "the other stage has not exchanged yet"
    scene.notary.resumed(1, scene.driver.core.state.plans[1].first_tick)
    assert list(commitment_roots(scene.entries(), "c", 1)) == [0]
    scene.notary.close()
