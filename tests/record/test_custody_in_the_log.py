"""Custody in the log: what the notary takes, what it answers, and the claim `availability`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol.custody_messages import CustodyRequest
from dilocox.coordinator.protocol.messages import RankId
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.custody import Custody, Held
from dilocox.record.verify.availability_claim import judge_availability
from dilocox.record.verify.claims import NotRunError
from dilocox.record.writer.log_summary import Memory
from dilocox.utils.typed_json import decode, encode
from tests.support.dispersed import NEXT, Town
from tests.support.record_scene import KEY, ONE, SIGNERS, Scene


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


def said(site: str = "a", **changes: Any) -> Custody:
    held = (Held(KEY.text, ONE, ONE, ONE, 9),)
    whole = Custody(site, 0, 0, 0, 2, 3, "abc".index(site), held)
    return dataclasses.replace(whole, **changes)


def submit(
    scene: Scene, custody: Custody, signer: str = "a", rank: str = "a", **asked: Any
) -> dict[str, str]:
    text = SIGNERS[signer].sign(custody.statement(scene.notary.run))
    request = CustodyRequest(rank=RankId(site=rank, stage=0, shard=0), statement=text, **asked)
    return scene.driver.core.saves.custody(request).certified


def test_all_cuts_of_a_run_are_certified(town: Town) -> None:
    town.exchange(KEY, NEXT)
    text = judge_availability(town.scene.course())
    assert text == "2 cuts, 2 of 3 pieces each, signed by at least 2 sites"


def test_a_dead_site_delays_nothing_but_its_signature(town: Town) -> None:
    town.scene.exchange(KEY)
    for name in "ab":
        town.sites[name].keep(KEY)
    town.wait()
    assert "1 cuts" in judge_availability(town.scene.course())


def test_too_few_signatures_are_not_run_and_named(town: Town) -> None:
    town.exchange(KEY)
    town.scene.exchange(NEXT)
    town.sites["b"].keep(NEXT)
    town.wait()
    with pytest.raises(NotRunError, match=rf"1 of 2 cuts .* {NEXT.text} shard 0 \(b\)"):
        judge_availability(town.scene.course())


def test_custody_of_other_payloads_does_not_count(town: Town) -> None:
    town.scene.exchange(KEY)
    for site in town.sites.values():
        site.keep(KEY, sites="ab")  # without the third payload, which counts
    town.wait()
    with pytest.raises(NotRunError, match=r"nobody"):
        judge_availability(town.scene.course())


def test_two_roots_of_the_same_payloads_fail_and_name_the_sites(town: Town) -> None:
    town.exchange(KEY)
    course = town.scene.course()
    (content,) = {named.split(" ")[0] for named in course.custody.signed[f"{KEY.text}#0"]}
    course.custody.add(said("c", held=(Held(KEY.text, content, ONE, ONE, 9),)))
    with pytest.raises(RecordError, match=r"somebody has cut wrongly \(a, b, c: .*; c: 1111"):
        judge_availability(course)


def test_a_run_without_payloads_is_not_run(town: Town) -> None:
    with pytest.raises(NotRunError, match="no payload counts yet"):
        judge_availability(town.scene.course())


def test_the_answer_names_certified_roots_once_two_thirds_have_signed(town: Town) -> None:
    scene, asked = town.scene, [KEY.text, NEXT.text]
    assert submit(scene, said("a"), asked=asked) == {}
    assert submit(scene, said("b"), "b", "b", asked=asked) == {KEY.text: ONE}
    scene.reopen()  # the summary of the log has them, too
    assert submit(scene, said("a"), asked=asked) == {KEY.text: ONE}
    assert scene.kinds().count(s.CUSTODY) == 2  # a repeated statement is filed once


def test_the_summary_of_the_log_survives_as_json(town: Town) -> None:
    """It is written as a mark, from which a coordinator of a long log starts."""
    town.exchange(KEY, NEXT)
    memory = town.scene.notary.memory
    assert memory.custody.signed
    assert decode(Memory, json.loads(json.dumps(encode(Memory, memory)))) == memory


@pytest.mark.parametrize(("custody", "signer", "rank", "why"), [
    (said(needed=1), "a", "a", "2 of 3"), (said(index=1), "a", "a", "not that of a"),
    (said("b"), "a", "a", "another rank"), (said("b"), "b", "a", "signature"),
    (said(shard=1), "a", "a", "another rank"), (said(round=4), "a", "a", "malformed"),
])  # fmt: skip
def test_a_wrong_custody_is_refused(
    town: Town, custody: Custody, signer: str, rank: str, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        submit(town.scene, custody, signer, rank)
    assert s.CUSTODY not in town.scene.kinds()


def test_a_run_without_availability_takes_none(scene: Scene) -> None:
    with pytest.raises(Refused, match=r"no \[availability\]"):
        submit(scene, said())
    assert s.CUSTODY not in scene.kinds()
    with pytest.raises(RecordError, match=r"no \[availability\]"):
        judge_availability(scene.course())
