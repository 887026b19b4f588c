"""Evidence of machines: signed by the site, kept in the log. Other formats are not judged."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Refused
from dilocox.record.log import statements as s
from dilocox.record.log.attestation_statements import Attestation
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from tests.support.record_scene import ONE, SIGNERS, Scene


def signed(scene: Scene, site: str, subjects: dict[str, str], **said: Any) -> str:
    predicate = {"run": scene.notary.run, "site": site, **said}
    return SIGNERS[site].sign(s.Statement(s.ATTESTATION, subjects, predicate))


def attest(scene: Scene, site: str, text: str) -> None:
    rank = m.RankId(site=site, stage=0, shard=0)
    scene.driver.core.witness.state(m.StateRequest(rank=rank, statement=text))


def test_evidence_is_kept_and_not_judged(scene: Scene) -> None:
    attest(scene, "a", signed(scene, "a", {"evidence": ONE}, format="tdx-quote"))
    course = scene.course()
    assert course.attestations == [Attestation("a", "tdx-quote", ONE)]
    assert course.unknown == 0
    found = {each.claim.name: each for each in verify(Places(scene.config.folder), print).findings}
    assert found["signatures"].verdict == "PASS"
    assert found["attestations"].verdict == "NOT_RUN"
    assert (
        found["attestations"].reason == "1 of a (tdx-quote); this dilocox judges no such evidence"
    )
    assert not found["attestations"].claim.required


def test_a_run_without_evidence_has_no_such_claim(scene: Scene) -> None:
    scene.course()
    findings = verify(Places(scene.config.folder), print).findings
    assert "attestations" not in {each.claim.name for each in findings}


@pytest.mark.parametrize(
    ("signer", "subjects", "said"),
    [
        pytest.param("b", {"evidence": ONE}, {"format": "tdx-quote"}, id="another site's"),
        pytest.param("a", {}, {"format": "tdx-quote"}, id="no evidence"),
        pytest.param("a", {"evidence": ONE}, {}, id="no format"),
    ],
)
def test_what_is_no_attestation_of_the_site_is_refused(
    scene: Scene, signer: str, subjects: dict[str, str], said: dict[str, str]
) -> None:
    before = scene.entries()
    with pytest.raises(Refused):
        attest(scene, "a", signed(scene, signer, subjects, **said))
    assert scene.entries() == before
