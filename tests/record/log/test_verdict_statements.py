"""Verdicts that auditors hand in: what enters the log, and who is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.enrolment import hand_in
from dilocox.coordinator.identity import OPERATOR, Identity
from dilocox.coordinator.protocol.audit_messages import HandInRequest, TokenHandInRequest
from dilocox.coordinator.server import budgets
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.errors import DilocoxError, JoinError
from dilocox.record.log import statements as s
from dilocox.record.log.verdict_statements import MOST_BYTES, HandedIn, latest
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.coordinator_driver import run_config
from tests.support.record_scene import ONE, SIGNERS, Scene
from tests.support.served_run import Run

AUDITOR = s.Signer.from_hex("0a" * 32)
TWO = "2" * 64
GOOD = HandedIn("b", 0, "EXACT", AUDITOR.public, "a", ONE, 1, 1)
BAD = replace(GOOD, verdict="MISMATCH", digest=TWO)
OWNER = Caller(OPERATOR, 0)


@pytest.fixture
def audited(tmp_path: Path) -> Scene:
    """A run that keeps states of every round for audits; its first round is planned."""
    scene = Scene(tmp_path, record={"states_every": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    return scene


def signed(scene: Scene, verdict: HandedIn, signer: s.Signer = AUDITOR) -> str:
    return signer.sign(verdict.statement(scene.notary.run))


def give(scene: Scene, text: str, site: str = "a") -> None:
    request = TokenHandInRequest(token=scene.driver.token(site), statement=text)
    scene.driver.core.verdicts.take_by_token(request)


def kept(scene: Scene) -> list[str]:
    return [entry for entry in scene.entries() if s.opened(entry)[0].kind == s.VERDICT]


def test_a_verdict_is_in_the_log_once_and_for_all(audited: Scene) -> None:
    good, bad = signed(audited, GOOD), signed(audited, BAD)
    give(audited, good)
    give(audited, bad)
    give(audited, good)  # its answer was lost
    audited.reopen()
    give(audited, bad)
    assert kept(audited) == [good, bad]
    first, second = audited.course().verdicts
    assert first == replace(GOOD, number=first.number)
    assert second == replace(BAD, number=first.number + 1)
    assert latest([first, second]) == [second], "an auditor's newest word on a round counts"


def test_a_verdict_that_is_handed_in_again_undoes_no_newer_one() -> None:
    good, bad = replace(GOOD, number=3), replace(BAD, number=4)
    again = replace(good, by="c", number=5)
    assert latest([good, bad, again]) == [bad]
    # The auditor signs how much of the log it had read; who hands a verdict in late does not.
    newer = replace(bad, seen=3)
    assert latest([newer, replace(good, number=6)]) == [newer]


def test_what_is_bad_is_told_in_the_run(audited: Scene) -> None:
    told: list[str] = []
    core = audited.driver.core
    core.listener = replace(core.listener, on_message=told.append)
    give(audited, signed(audited, GOOD))
    assert told == []
    give(audited, signed(audited, BAD))
    give(audited, signed(audited, BAD))
    key = AUDITOR.public[:12]
    assert told == [
        f"audit: round 0 of b: MISMATCH, signed by {key}… and handed in by site a"
    ]  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"site": "d"}, "site d: not in the run file"),
    ({"site": "\x1b[2J"}, "is malformed"),
    ({"round": 1}, "round 1 of b: not planned to be audited; the newest is round 0"),
    ({"round": -1}, "is malformed"),
    ({"round": True}, "is malformed"),
    ({"verdict": "GOOD"}, "is malformed"),
    ({"by": "b"}, "says that b hands it in, but a does"),
    ({"by": ""}, "says that the operator hands it in, but a does"),
    ({"auditor": SIGNERS["a"].public}, "signature is not one of key"),
    ({"auditor": "x"}, "names no auditor's key"),
    ({"digest": "x"}, "is malformed"),
    ({"seen": 10**6}, "is malformed"),
]


def test_what_is_refused(audited: Scene) -> None:
    for changes, why in REFUSED:
        with pytest.raises(Refused, match=why) as refused:
            give(audited, signed(audited, replace(GOOD, **changes)))
        assert refused.value.kind == "refused"
    said = GOOD.statement(audited.notary.run)
    more = s.Statement(said.kind, said.subjects, {**said.predicate, "reason": "because"})
    large = s.Statement(said.kind, said.subjects, {**said.predicate, "site": "x" * 1500})
    for text, why in {
        AUDITOR.sign(more): "has fields that a verdict does not have",
        AUDITOR.sign(large): f"the limit is {MOST_BYTES}",
        AUDITOR.sign(GOOD.statement("1" * 32)): "is of run '1111",
        AUDITOR.sign(s.Statement(s.AUDIT, said.subjects, said.predicate)): "type audit;",
        audited.entries()[-1]: "names no auditor's key",
        "": "not a DSSE envelope",
    }.items():
        with pytest.raises(Refused, match=why):
            give(audited, text)
    assert kept(audited) == []


def test_strangers_are_refused(audited: Scene) -> None:
    core, text = audited.driver.core, signed(audited, GOOD)
    for token in ("", "x", f"dilocox1-{ONE}-{'0' * 32}"):
        with pytest.raises(Refused, match="not a token of this run, or no longer valid"):
            core.verdicts.take_by_token(TokenHandInRequest(token=token, statement=text))
    void = audited.driver.token("a")
    core.standings._ban("a")
    with pytest.raises(Refused, match="no longer valid"):
        core.verdicts.take_by_token(TokenHandInRequest(token=void, statement=text))
    assert kept(audited) == []


def test_each_member_has_a_budget_of_its_own(audited: Scene) -> None:
    most = budgets.EVENTS["verdicts"]

    def one(number: int, site: str) -> None:
        give(audited, signed(audited, replace(GOOD, by=site, digest=f"{number:064x}")), site)

    for number in range(most):
        one(number, "a")
    with pytest.raises(Refused, match=f"its {most} verdicts since the last plan") as refused:
        one(most, "a")
    assert refused.value.kind == "quota"
    one(0, "b")
    for number in range(most + 1):  # the operator's disk is the operator's matter
        text = signed(audited, replace(GOOD, by="", digest=f"{number:064x}"))
        audited.driver.core.verdicts.take(HandInRequest(statement=text), OWNER)
    audited.driver.plan(1, "a")
    one(most, "a")
    assert len(kept(audited)) == 2 * most + 3


def test_a_site_s_own_process_hands_in_in_the_site_s_name(audited: Scene) -> None:
    core = audited.driver.core
    reply = core.verdicts.take(HandInRequest(), Caller("b", 1))
    assert (reply.by, reply.run) == ("b", audited.notary.run)
    assert core.verdicts.take(HandInRequest(), OWNER).by == ""
    with pytest.raises(Refused, match="says that a hands it in, but b does"):
        core.verdicts.take(HandInRequest(statement=signed(audited, GOOD)), Caller("b", 1))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_without_states_or_record_takes_none(tmp_path: Path, recorded: bool) -> None:
    if recorded:
        scene = Scene(tmp_path)
        scene.enrol()
        scene.driver.plan(0, "a")
        with pytest.raises(Refused, match=r"none is \(record.states_every\)"):
            give(scene, signed(scene, GOOD))
        return
    core = Coordinator(run_config("ab"), tmp_path)
    with contextlib.closing(core), pytest.raises(Refused, match="keeps no record"):
        core.verdicts.take(HandInRequest(statement=None), OWNER)


def test_readers_of_before_pass_over_it() -> None:
    """They know no type of another prefix than their own, and take those of theirs that they do not
    know for tampered with."""
    said = GOOD.statement("1" * 32).to_bytes()
    assert b'"predicateType":"urn:dilocox:audit-verdict:v1"' in said
    assert not s.VERDICT.startswith(s.PREFIX)
    later = said.replace(s.VERDICT.encode(), b"urn:dilocox:record:of-later:v1")
    assert s.Statement.from_bytes(later).kind == "urn:dilocox:record:of-later:v1"
    assert not s.Statement.from_bytes(later).known


# --- over the network ---


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, TransparencyLogSink]]:
    folder = tmp_path_factory.mktemp("served")
    sections = {"folder": str(folder / "run")}
    config = run_config("ab", run=sections, record={"states_every": 1})
    notary = TransparencyLogSink.open(config, folder, print)
    run = Run(folder, run=sections, record={"states_every": 1}, notary=notary)
    try:
        run.start()["a"].plan(0)
        yield run, notary
    finally:
        run.close()
        notary.close()


def test_it_is_handed_in_by_a_token_or_by_the_operator(
    served: tuple[Run, TransparencyLogSink],
) -> None:
    run, notary = served
    limits = run.core.timeouts
    by = hand_in(run.url, run.token("a"), limits, None)
    assert (by.by, by.run) == ("a", notary.run)
    size = notary.writer.size
    hand_in(run.url, run.token("a"), limits, AUDITOR.sign(GOOD.statement(notary.run)))
    operator = Identity.load(run.core.authority.operator_path)
    with contextlib.closing(CoordinatorClient(run.url, operator, limits)) as client:
        assert client.hand_in().by == ""
        client.hand_in(AUDITOR.sign(replace(BAD, by="").statement(notary.run)))
    assert notary.writer.size == size + 2
    other = str(run.core.tokens.of("a", 7))
    with pytest.raises(JoinError, match="not a token of this run, or no longer valid"):
        hand_in(run.url, other, limits, None)
    with pytest.raises(JoinError, match="says that a hands it in, but b does"):
        hand_in(run.url, run.token("b"), limits, AUDITOR.sign(GOOD.statement(notary.run)))


def test_without_certificate_and_token_nobody_hands_in(
    served: tuple[Run, TransparencyLogSink],
) -> None:
    run, notary = served
    stranger = f"dilocox1-{run.core.tokens.fingerprint}-{'0' * 32}"
    size = notary.writer.size
    with pytest.raises(DilocoxError):
        hand_in(run.url, stranger, run.core.timeouts, AUDITOR.sign(BAD.statement(notary.run)))
    assert notary.writer.size == size
