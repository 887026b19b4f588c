"""All evidence of a run is judged by a policy; every kind of tampering is a FAIL that names it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.attested_scene import AttestedScene, policy_file
from tests.support.machines import SNP, gpu_rules, policy, snp, tdx, with_gpus
from tests.support.record_scene import SIGNERS

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.refusals import Refused
from dilocox.record.log.attestation_statements import MACHINE, Attestation, MachineFacts
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.attestation.certificates import AMD
from dilocox.tools.attestation.renewal import Filed, check_renewed, idle, round_at
from dilocox.tools.attestation.run_judge import _need_steps
from dilocox.tools.attestation.runtime_data import nonce_of

pytestmark = pytest.mark.usefixtures("no_network")
USUAL = policy_file()


@pytest.fixture
def scene(tmp_path: Path) -> AttestedScene:
    found = AttestedScene(tmp_path, USUAL)
    found.enrol()
    return found


def attested(scene: AttestedScene, *but: str) -> None:
    """Sites file evidence, all but those of `but`; then a round is decided."""
    for site in "abc":
        if site not in but:
            scene.file(site)
    scene.exchange()


def test_evidence_of_pretended_machines_is_never_a_pass(scene: AttestedScene) -> None:
    attested(scene)
    found = scene.finding(USUAL)
    assert found.verdict == "SIMULATED"
    assert found.reason.startswith("3 pieces of evidence (SNP) as of their filing, 20")
    assert "; read 20" in found.reason
    assert found.claim.required


def test_evidence_of_genuine_machines_is_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = policy_file(policy(environment="production", simulation=None, tdx=None))
    monkeypatch.setitem(AMD, "Simulated", SNP.root)
    scene = AttestedScene(tmp_path, strict)
    scene.enrol()
    attested(scene)
    assert scene.finding(strict).verdict == "PASS"
    monkeypatch.delitem(AMD, "Simulated")
    found = scene.finding(strict)
    assert found.verdict == "FAIL"
    assert "its root" in found.reason


def test_without_a_policy_evidence_is_not_judged(scene: AttestedScene) -> None:
    attested(scene)
    found = scene.finding(None)
    assert found.verdict == "NOT_RUN"
    assert found.reason == "3 of a, b, c (dilocox/machine/v1); give the policy with --tee"
    assert not found.claim.required


def test_a_run_that_owes_evidence_has_the_claim(scene: AttestedScene) -> None:
    found = scene.finding(None)
    assert (found.verdict, found.reason) == (
        "NOT_RUN", "no site has filed evidence; give the policy with --tee",
    )  # fmt: skip


def test_nothing_is_owed_before_the_first_step(scene: AttestedScene) -> None:
    found = scene.finding(USUAL)
    assert (found.verdict, found.reason) == (
        "NOT_RUN", "no site has filed evidence, and no site has contributed yet",
    )  # fmt: skip
    assert scene.exit_code == 3


def test_a_run_without_policy_and_evidence_has_no_claim(tmp_path: Path) -> None:
    scene = AttestedScene(tmp_path, None)
    scene.course()
    found = verify(Places(scene.config.folder), print).findings
    assert "attestations" not in {each.claim.name for each in found}
    assert scene.finding(USUAL).verdict == "NOT_RUN"
    assert "tee" not in scene.config.shared()["record"]


def test_sites_that_agreed_owe_evidence(scene: AttestedScene) -> None:
    attested(scene, "c")
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert found.reason == "the log has no evidence of c for its rounds 0 to 0"


def test_sites_that_never_agreed_owe_none(tmp_path: Path) -> None:
    scene = AttestedScene(tmp_path, None)
    scene.enrol()
    attested(scene, "c")
    found = scene.finding(USUAL)
    assert (found.verdict, found.reason) == (
        "NOT_RUN", "the log has no evidence of c for its rounds 0 to 0",
    )  # fmt: skip


def test_the_policy_must_be_the_agreed_one(scene: AttestedScene) -> None:
    attested(scene)
    found = scene.finding(policy_file(policy(max_age_rounds=6)))
    assert found.verdict == "FAIL"
    assert "the sites agreed on" in found.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "9" * 64), ("manifest", "9" * 64), ("site", "b"), ("incarnation", 2),
        ("node", 1), ("nodes", 3), ("key", "9" * 64), ("nonce", "9" * 64),
        ("evm", "0x" + "9" * 40),
    ],
)  # fmt: skip
def test_evidence_bound_to_something_else_is_found(
    scene: AttestedScene, name: str, value: Any
) -> None:
    more = {"nodes": 2} if name == "node" else {}
    scene.file("a", dataclasses.replace(scene.said("a"), **{name: value}, **more))
    attested(scene, "a")
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert f"of a: the machine is bound to another {name}: " in found.reason


def test_evidence_of_an_earlier_moment_is_not_of_a_later_one(scene: AttestedScene) -> None:
    early = scene.said("a")
    scene.file("b")
    scene.cover()
    assert scene.said("a").nonce != early.nonce
    scene.file("a", early)
    attested(scene, "a", "b")
    assert "bound to another nonce" in scene.finding(USUAL).reason


@pytest.mark.parametrize("facts", [{"root": "9" * 64}, {"size": 10**6}])
def test_a_moment_that_the_log_never_had_is_found(
    scene: AttestedScene, facts: dict[str, Any]
) -> None:
    scene.file("a", **facts)
    attested(scene, "a")
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert "it names a moment that this log never had" in found.reason


def test_missing_evidence_is_not_judged_and_changed_evidence_fails(scene: AttestedScene) -> None:
    digest = scene.file("a")
    attested(scene, "a")
    path = Path(scene.store.path(digest))
    data = path.read_bytes()
    path.unlink()
    found = scene.finding(USUAL)
    assert found.verdict == "NOT_RUN"
    assert "is not here; name site a's store with --store" in found.reason
    path.write_bytes(data.replace(b'"tee":"snp"', b'"tee":"tdx"'))
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert "holds other bytes than its name says" in found.reason


@pytest.mark.parametrize("lost", [False, True], ids=["bad", "not here"])
@pytest.mark.parametrize("contributes", [False, True])
def test_evidence_counts_if_its_site_contributed(
    scene: AttestedScene, contributes: bool, lost: bool
) -> None:
    digest = scene.file("c", make=snp if lost else lambda said: snp(said, debug=True))
    for site in "ab":
        scene.file(site)
    scene.begin()
    for site in "abc":
        scene.vote(site, contributes=contributes or site != "c")
    if lost:
        Path(scene.store.path(digest)).unlink()
    found = scene.finding(USUAL)
    why = "is not here" if lost else "of c: SNP: the guest can be debugged"
    assert why in found.reason
    if contributes:
        assert found.verdict == ("NOT_RUN" if lost else "FAIL")
    else:
        assert found.verdict == "SIMULATED"
        assert found.reason.startswith("2 pieces of evidence (SNP) as of their filing")
        assert "; 1 more do not count, as their sites contributed nothing" in found.reason


def test_evidence_that_is_kept_back_hides_no_fault_of_others(scene: AttestedScene) -> None:
    digest = scene.file("a")
    scene.file("b", make=lambda said: snp(said, debug=True))
    attested(scene, "a", "b")
    Path(scene.store.path(digest)).unlink()
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert "of b: SNP: the guest can be debugged" in found.reason


def test_evidence_that_is_kept_back_hides_no_site_without_any(scene: AttestedScene) -> None:
    digest = scene.file("a")
    attested(scene, "a", "c")
    Path(scene.store.path(digest)).unlink()
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert found.reason == "the log has no evidence of c for its rounds 0 to 0"


def test_a_reader_without_the_library_cannot_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = AttestedScene(tmp_path, USUAL)
    scene.enrol()
    for site in "abc":
        scene.file(site, make=tdx)
    scene.exchange()
    assert scene.finding(USUAL).verdict == "SIMULATED"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = scene.finding(USUAL)
    assert found.verdict == "NOT_RUN"
    assert "of a: TDX quotes need dcap-qvl: pip install" in found.reason
    assert "(and 2 more)" in found.reason


def test_evidence_of_some_sites_is_no_verdict_on_a_run_without_steps(tmp_path: Path) -> None:
    """Without outer steps nothing shows who owes evidence: it is no PASS."""
    scene = AttestedScene(tmp_path, USUAL)
    scene.enrol()
    scene.file("a")
    found = scene.finding(USUAL)
    assert (found.verdict, found.reason) == (
        "NOT_RUN", "1 pieces of evidence, and no site has contributed yet",
    )  # fmt: skip
    course = SimpleNamespace(steps={}, config={"outer": {"method": "allreduce"}})
    with pytest.raises(NotRunError, match="method allreduce has no outer steps"):
        _need_steps(course, 2)  # type: ignore[arg-type]


def test_a_guest_that_can_be_debugged_fails(scene: AttestedScene) -> None:
    scene.file("a", make=lambda said: snp(said, debug=True))
    attested(scene, "a")
    assert "can be debugged" in scene.finding(USUAL).reason


def test_a_gpu_report_of_another_site_is_found(tmp_path: Path) -> None:
    rules = policy_file(policy(gpu=gpu_rules()))
    scene = AttestedScene(tmp_path, rules)
    scene.enrol()
    other = scene.said("b")

    def spliced(said: Any) -> Any:
        return dataclasses.replace(with_gpus(said=said), gpus=with_gpus(said=other).gpus)

    scene.file("a", make=spliced)
    assert "GPU 0: its report is not bound to this machine" in scene.finding(rules).reason


def test_revocation_that_is_required_is_not_known(tmp_path: Path) -> None:
    rules = policy_file(policy(gpu=gpu_rules(revocation="required")))
    scene = AttestedScene(tmp_path, rules)
    scene.enrol()
    for site in "abc":
        scene.file(site, make=lambda said: with_gpus(said=said))
    scene.exchange()
    found = scene.finding(rules)
    assert found.verdict == "NOT_RUN"
    assert found.reason.startswith("whether GPU certificates are revoked is not known offline")


def test_all_machines_of_a_site_must_have_said(scene: AttestedScene) -> None:
    for node in (0, 1):
        scene.file("a", scene.said("a", node=node, nodes=2), node=node, nodes=2)
    scene.file("b", scene.said("b", node=1, nodes=2), node=1, nodes=2)
    scene.file("c")
    scene.exchange()
    assert scene.finding(USUAL).reason == "the log has no evidence of machine 0 of b"


def test_public_randomness_is_compared(scene: AttestedScene) -> None:
    nonce = nonce_of(scene.head.size, scene.head.root, b"\7")
    scene.file("a", scene.said("a", nonce=nonce), randomness="07")
    attested(scene, "a")
    assert scene.finding(USUAL).verdict == "SIMULATED"
    assert scene.finding(USUAL, randomness={5: b"\7"}).verdict == "SIMULATED"
    found = scene.finding(USUAL, randomness={0: b"\7"})
    assert "it names other public randomness than --randomness gives" in found.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"time": int(time.time()) - 2000}, "another time than the coordinator's"),
        ({"incarnation": 7}, "of start 7 of the site, not of 1"),
        ({"node": 2}, "malformed"),
        ({"randomness": "xy"}, "malformed"),
        ({"size": -1}, "malformed"),
    ],
)
def test_the_coordinator_refuses_what_is_wrong_at_once(
    scene: AttestedScene, facts: dict[str, Any], reason: str
) -> None:
    before = scene.entries()
    with pytest.raises(Refused, match=reason):
        scene.file("a", **facts)
    assert scene.entries() == before


def test_a_statement_with_more_fields_is_refused(scene: AttestedScene) -> None:
    facts = MachineFacts(1, 0, 1, 1, "9" * 64, "", int(time.time()))
    said = Attestation("a", MACHINE, "9" * 64, facts).statement(scene.notary.run)
    more = dataclasses.replace(said, predicate={**said.predicate, "more": 1})
    with pytest.raises(Refused, match="fields that such a statement does not have"):
        scene.driver.core.witness.attest("a", SIGNERS["a"].sign(more))
    with pytest.raises(Refused, match="is of site 'a', not of b"):
        scene.driver.core.witness.attest("b", SIGNERS["b"].sign(said))
    with pytest.raises(Refused, match="not one of key"):
        scene.driver.core.witness.attest("a", SIGNERS["b"].sign(said))


def test_the_same_statement_is_taken_once(scene: AttestedScene) -> None:
    moment = int(time.time())
    scene.file("a", time=moment)
    before = scene.entries()
    signed = before[-1]
    scene.driver.core.witness.attest("a", signed)
    assert scene.entries() == before


def course(rounds: dict[int, str], starts: dict[str, list[int]]) -> Any:
    """A history in which round r was decided at statement 100 r + 50."""
    steps = {
        f"outer/{number}": SimpleNamespace(key=SimpleNamespace(round=number), set=tuple(sites))
        for number, sites in rounds.items()
    }
    numbers = {f"outer/{number}": 100 * number + 50 for number in rounds}
    return SimpleNamespace(steps=steps, numbers=numbers, starts=starts)


def filed(site: str, *rounds: int, node: int = 0, nodes: int = 1) -> list[Filed]:
    return [Filed(site, 100 * each + 5, node, nodes, each) for each in rounds]


ROUNDS = dict.fromkeys(range(10), "ab")
STARTS = {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    ("own", "gap"),
    [
        ((0, 3, 6, 9), ""),
        ((3, 6), ""),
        ((2, 5, 8), ""),
        ((0, 3, 6), ""),
        ((0, 4, 7), "rounds 0 to 4"),
        ((4, 7), "rounds 0 to 4"),
        ((0, 3), "rounds 3 to 9"),
        ((), "no evidence of a for its rounds 0 to 9"),
    ],
)
def test_evidence_is_renewed_in_time(own: tuple[int, ...], gap: str) -> None:
    found = check_renewed(course(ROUNDS, STARTS), filed("a", *own) + filed("b", 0, 2, 4, 6, 8), 3)
    assert bool(found) == bool(gap)
    assert gap in found


def test_each_start_of_a_site_owes_evidence() -> None:
    again = course(dict.fromkeys(range(10), "a"), {"a": [1, 500]})
    assert check_renewed(again, filed("a", 0, 2, 4), 5) == (
        "the log has no evidence of a for its rounds 5 to 9"
    )
    late = [*filed("a", 0, 2, 4), *filed("a", 6)]
    assert check_renewed(again, late, 5) == ""


def test_every_machine_is_renewed() -> None:
    both = filed("a", 0, 3, 6, 9, nodes=2) + filed("a", 0, 3, node=1, nodes=2)
    assert "machine 1 of a is not renewed in rounds 3 to 9" in check_renewed(
        course(dict.fromkeys(range(10), "a"), STARTS), both, 3
    )
    other = filed("a", 0, nodes=2) + filed("a", 0, nodes=3)
    assert "2 machines, and 3" in check_renewed(course({0: "a"}, STARTS), other, 3)


def test_a_site_that_was_away_owes_nothing_for_that_time() -> None:
    away = {number: "b" if 3 <= number < 8 else "ab" for number in range(10)}
    own = filed("a", 0, 2, 8) + filed("b", 0, 3, 6, 9)
    found = check_renewed(course(away, STARTS), own, 3)
    assert found.startswith("evidence of machine 0 of a is not renewed in rounds 2 to 8: ")


def test_a_statement_is_idle_in_a_start_that_contributed_nothing() -> None:
    again = course({0: "a", 5: "a"}, {"a": [1, 100, 500], "b": [2]})
    at = {5: False, 60: False, 105: True, 499: True, 505: False}
    assert {number: idle(again, "a", number) for number in at} == at
    assert idle(again, "b", 10)
    # Nothing shows it.
    assert not idle(again, "a", 0)
    assert not idle(again, "c", 10)
    assert not idle(course({}, STARTS), "a", 10)


def test_evidence_without_contributions_around_it_is_no_gap() -> None:
    away = course(dict.fromkeys((0, 1, 2, 12), "a"), STARTS)
    assert check_renewed(away, filed("a", 0, 2, 4, 11), 3) == ""


def test_stale_evidence_is_found(tmp_path: Path) -> None:
    rules = policy_file(policy(max_age_rounds=1))
    scene = AttestedScene(tmp_path, rules)
    scene.enrol()
    early = scene.head
    for round_ in range(2):
        scene.driver.plan(round_, "a")
        scene.exchange(ExchangeKey.outer(round_, 0, 0))
        scene.exchange(ExchangeKey.outer(round_, 0, 1))
        for site in "abc":
            scene.driver.round_done(site, round_)
    scene.head = early
    scene.file("a")
    found = scene.finding(rules)
    assert found.verdict == "FAIL"
    assert "of a: stale: made 2 rounds before it was filed" in found.reason


def test_a_coordinator_cannot_move_evidence_to_another_start(scene: AttestedScene) -> None:
    """A statement that the notary would have refused is in the log all the same."""
    said = scene.said("a")
    digest = scene.store.put(snp(said).to_bytes())
    head = scene.head
    facts = MachineFacts(9, 0, 1, head.size, head.root.hex(), "", int(time.time()))
    text = Attestation("a", MACHINE, digest, facts).statement(scene.notary.run)
    scene.notary.log.append(SIGNERS["a"].sign(text))
    found = scene.finding(USUAL)
    assert found.verdict == "FAIL"
    assert "it is of another start of the site" in found.reason


def test_rounds_count_by_decided_steps() -> None:
    found = course(ROUNDS, STARTS)
    assert [round_at(found, size) for size in (0, 50, 51, 150, 151, 10**6)] == [0, 0, 1, 1, 2, 10]
