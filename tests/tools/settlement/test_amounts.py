"""What sites have earned, against a second implementation that shares no code with the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.record_scene import Scene
from tests.support.second_opinion import second_opinion

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError, SettlementError
from dilocox.record.log import statements as s
from dilocox.record.log.statements import Signer
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.tools.settlement.amounts import amounts, by_account, read_prefix

ACCOUNTS = {"a": "0x" + "aA" * 20, "b": "0x" + "bb" * 20, "c": "0x" + "aa" * 20}
AUDITOR, OTHER = Signer.from_hex("77" * 32), Signer.from_hex("78" * 32)
PRICE = 3_000_001


def scene_with(root: Path, vouch: Callable[[Scene, str], Any] | None = None, **terms: Any) -> Scene:
    """Two rounds of three sites; b withdraws from one of four exchanges.

    `vouch` returns a site's `StakeProof`; it is not asked for if it is None.
    """
    said = {"price": PRICE, "accounts": ACCOUNTS, "auditors": [AUDITOR.public], **terms}
    scene = Scene(root, settlement=said)
    if vouch is None:
        scene.enrol()
    else:
        scene.driver.core.stakes = None  # no chain is asked
        scene.enrol(partial(vouch, scene))
    for round_ in (0, 1):
        scene.driver.plan(round_, "a")
        for fragment in (0, 1):
            key = ExchangeKey.outer(round_, 0, fragment)
            scene.begin(key)
            for site in "abc":
                scene.vote(site, key, contributes=(site, fragment, round_) != ("b", 1, 0))
        for site in "abc":
            scene.driver.round_done(site, round_)
    return scene


def paid(scene: Scene, size: int | None = None) -> dict[str, int]:
    """By account; both implementations agree."""
    folder = scene.config.folder
    prefix = read_prefix(folder, size)
    found = by_account(amounts(prefix.course))
    assert found == second_opinion(folder, prefix.size)
    return found


def test_a_site_is_paid_for_the_exchanges_that_count(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.notary.close()
    course = read_prefix(scene.config.folder).course
    a, b, c = amounts(course)
    length = course.config["data"]["sequence_length"]
    assert a.tokens == c.tokens == 2 * 4 * 4 * length  # rounds, inner steps, batch
    assert b.tokens == a.tokens * 3 / 4
    assert (a.rounds, b.rounds, a.withheld) == (2, 2, ())
    assert a.wei == a.tokens * PRICE * 1000
    # Two sites that share an account, though written in two ways, share its payments.
    assert paid(scene) == {"0x" + "aa" * 20: a.wei + c.wei, "0x" + "bb" * 20: b.wei}


def test_amounts_grow_with_the_log(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.notary.close()
    before: dict[str, int] = {}
    for size in range(1, read_prefix(scene.config.folder).size + 1):
        now = paid(scene, size)
        assert all(now.get(who, 0) >= wei for who, wei in before.items())
        before = now
    with pytest.raises(SettlementError, match="covers"):
        read_prefix(scene.config.folder, 10_000)


@pytest.mark.parametrize("verdict", ["MISMATCH", "FAIL", "EXACT", "NOT_RUN"])
def test_a_bad_verdict_of_an_auditor_of_the_run_file_withholds_a_round(
    tmp_path: Path, verdict: str
) -> None:
    scene = scene_with(tmp_path)
    scene.hand_in(OTHER, "a", 0, "MISMATCH")  # anybody's: no matter
    scene.hand_in(AUDITOR, "c", 1, verdict)
    scene.notary.close()
    paid(scene)
    a, _, c = amounts(read_prefix(scene.config.folder).course)
    assert a.withheld == ()
    bad = verdict in ("MISMATCH", "FAIL")
    assert c.withheld == ((1,) if bad else ())
    assert c.tokens == (a.tokens / 2 if bad else a.tokens)


def test_a_newer_verdict_replaces_the_auditor_s_earlier_one(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.hand_in(AUDITOR, "c", 1, "MISMATCH")
    scene.hand_in(AUDITOR, "c", 1, "EXACT")
    scene.notary.close()
    paid(scene)
    assert amounts(read_prefix(scene.config.folder).course)[2].withheld == ()


def test_an_older_verdict_that_is_handed_in_again_undoes_no_bad_one(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.hand_in(AUDITOR, "c", 1, "EXACT")
    again = scene.entries()[-1]
    scene.hand_in(AUDITOR, "c", 1, "MISMATCH")
    scene.notary.writer.append(again)
    scene.notary.close()
    paid(scene)
    assert amounts(read_prefix(scene.config.folder).course)[2].withheld == (1,)


Change = Callable[[dict[str, Any], dict[str, str]], object]


def forged(monkeypatch: pytest.MonkeyPatch, change: Change, fragments: Collection[int]) -> None:
    """Let the coordinator sign something else as outer steps of round 1."""
    real = TransparencyLogSink._say

    def say(self: Any, kind: str, said: Any, subjects: Any, **more: Any) -> None:
        if kind == s.STEP and said["round"] == 1 and said["fragment"] in fragments:
            said, subjects = json.loads(json.dumps(said)), dict(subjects)
            change(said, subjects)
        real(self, kind, said, subjects, **more)

    monkeypatch.setattr(TransparencyLogSink, "_say", say)


def two_hundred(said: dict[str, Any], subjects: object) -> None:
    said["ranges"]["c"] = [[1000, 200]]


def of_another(said: dict[str, Any], subjects: object) -> None:
    said["ranges"]["c"] = said["ranges"]["a"]


def longer(said: dict[str, Any], subjects: object) -> None:
    said["ranges"]["c"], said["inner_steps"] = [[1000, 200]], 100


def without_ranges(said: dict[str, Any], subjects: object) -> None:
    del said["ranges"]["c"]


def without_space(said: dict[str, Any], subjects: object) -> None:
    del said["spaces"]["c"]


@pytest.mark.parametrize("fragments", [(0,), (0, 1)])
@pytest.mark.parametrize("change", [two_hundred, of_another, longer, without_ranges, without_space])
def test_a_round_with_ranges_that_cannot_be_is_not_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, fragments: Collection[int]
) -> None:
    """Ranges are the coordinator's word."""
    forged(monkeypatch, change, fragments)
    scene = scene_with(tmp_path)
    scene.notary.close()
    paid(scene)
    a, b, c = amounts(read_prefix(scene.config.folder).course)
    assert (a.rounds, b.rounds, c.rounds) == (1, 1, 1)


def without_payload(said: object, subjects: dict[str, str]) -> None:
    del subjects["c/0"]


def share_of_zero(said: dict[str, Any], subjects: object) -> None:
    said["shares"] = {"a": [[65536]], "b": [[1]], "c": [[0]]}


def unsigned_payload(said: object, subjects: dict[str, str]) -> None:
    subjects["c/0"] = "5" * 64


@pytest.mark.parametrize("change", [without_payload, share_of_zero, unsigned_payload])
def test_a_site_without_payload_or_with_share_0_is_not_paid_for_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    forged(monkeypatch, change, (0,))
    scene = scene_with(tmp_path)
    scene.notary.close()
    paid(scene)
    a, b, c = amounts(read_prefix(scene.config.folder).course)
    assert c.tokens == b.tokens == a.tokens * 3 / 4


MORE_PARTS = [
    {"stage": 1, "exchange_key": "outer/1/1/1"},
    {"fragments": 3, "fragment": 2, "exchange_key": "outer/1/0/2"},
    {"exchange_key": "gradient/1/0/0/1"},
]


@pytest.mark.parametrize("change", MORE_PARTS)
def test_a_round_is_not_paid_for_more_exchanges_than_it_has(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Even if all sites have signed them."""
    scene = scene_with(tmp_path)
    said, subjects = scene.decisions()[-1]
    scene.decide({**said, **change}, subjects)
    scene.notary.close()
    paid(scene)
    assert [each.rounds for each in amounts(read_prefix(scene.config.folder).course)] == [1, 1, 1]


def test_a_decision_that_is_repeated_after_a_resume_undoes_no_verdict(tmp_path: Path) -> None:
    """The coordinator goes back to a tick that nothing has reached, so nothing is abandoned."""
    scene = scene_with(tmp_path)
    scene.hand_in(AUDITOR, "c", 1, "MISMATCH")
    scene.notary.resumed(2, 10**6)
    for said, subjects in scene.decisions()[2:]:
        scene.decide(said, subjects)
    scene.notary.close()
    paid(scene)
    a, _, c = amounts(read_prefix(scene.config.folder).course)
    assert (c.withheld, c.tokens) == ((1,), a.tokens / 2)


def test_an_exchange_that_a_resume_leaves_undecided_undoes_no_verdict(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.hand_in(AUDITOR, "c", 1, "MISMATCH")
    first, last = (said["tick"] for said, _ in scene.decisions()[2:])
    assert first < last
    scene.notary.resumed(1, first)
    scene.notary.close()
    paid(scene)
    a, _, c = amounts(read_prefix(scene.config.folder).course)
    assert (a.rounds, c.rounds, c.withheld) == (2, 1, (1,))


def test_a_verdict_on_a_round_that_was_trained_again_does_not_count(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.hand_in(AUDITOR, "c", 1, "MISMATCH")
    scene.notary.resumed(1, scene.driver.core.state.plans[1].first_tick)
    for said, subjects in scene.decisions()[2:]:
        scene.decide(said, subjects)
    scene.notary.close()
    paid(scene)
    a, _, c = amounts(read_prefix(scene.config.folder).course)
    assert (c.withheld, c.tokens) == ((), a.tokens)


def test_a_run_file_that_says_nothing_of_sequences_is_one_line(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.notary.close()
    course = read_prefix(scene.config.folder).course
    del course.manifest["config"]["data"]["sequence_length"]
    with pytest.raises(SettlementError, match="the run file in the log is malformed"):
        amounts(course)


def test_a_log_that_is_not_what_its_checkpoint_covers_is_not_read(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    scene.notary.close()
    path = scene.config.folder / "record/statements.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for text, reason in ((lines[:-1], "it was cut"), ([*lines[:-1], lines[0]], "was changed")):
        path.write_text("".join(text))
        with pytest.raises(RecordError, match=reason):
            read_prefix(scene.config.folder, 3)


def test_an_abandoned_round_is_not_paid(tmp_path: Path) -> None:
    scene = scene_with(tmp_path)
    before = len(scene.entries())
    scene.notary.resumed(1, scene.driver.core.state.plans[1].first_tick)
    scene.notary.close()
    full, less = paid(scene, before), paid(scene)
    assert 2 * less["0x" + "aa" * 20] == full["0x" + "aa" * 20]


def test_who_has_no_account_is_not_paid(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, accounts={"b": ACCOUNTS["b"]})
    scene.notary.close()
    assert list(paid(scene)) == [ACCOUNTS["b"]]
    found = amounts(read_prefix(scene.config.folder).course)
    assert [(each.site, each.account) for each in found] == [
        ("a", ""), ("b", ACCOUNTS["b"]), ("c", ""),
    ]  # fmt: skip


def test_a_run_without_a_price_owes_nothing_that_can_be_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.enrol()
    scene.notary.close()
    with pytest.raises(SettlementError, match=r"no \[settlement\]"):
        amounts(read_prefix(scene.config.folder).course)
