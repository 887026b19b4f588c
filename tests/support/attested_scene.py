"""Sites of a recorded scene that file evidence of pretended machines."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from dilocox.record.log.acceptance import digest_of_entry
from dilocox.record.log.attestation_statements import MACHINE, Attestation, MachineFacts
from dilocox.record.log.blob_store import Store
from dilocox.record.verify.claims import Finding
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.policy import Policy, PolicyFile
from dilocox.tools.attestation.run_judge import RunJudge
from dilocox.tools.attestation.runtime_data import RuntimeData, nonce_of
from tests.support.machines import policy, snp
from tests.support.record_scene import SIGNERS, Scene


def policy_text(rules: Policy | None = None) -> bytes:
    """The bytes of a policy's file; by default that of the pretended machines."""
    found = (rules or policy()).model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps(found).encode()


def policy_file(rules: Policy | None = None) -> PolicyFile:
    """A policy as a file has it; by default that of the pretended machines."""
    return PolicyFile.parse(policy_text(rules), "policy")


class AttestedScene(Scene):
    """A scene whose sites have agreed on a policy."""

    def __init__(self, root: Path, file: PolicyFile | None, **sections: Any) -> None:
        """`file`: the policy that the run file names; None: it names none."""
        record = {} if file is None else {"tee": file.digest}
        super().__init__(root, record=record, **sections)
        self.store = Store(self.config.record_store)
        self.head = self.notary.head()
        """The moment of the log that evidence names."""

    def enrol(self, vouch: Callable[[str], Any] = lambda site: None) -> None:
        """All sites enrol and accept, and the first round is planned."""
        super().enrol(vouch)
        self.driver.plan(0, "a")
        self.cover()

    def cover(self) -> None:
        """Evidence names the end of the log from now on."""
        self.notary.log.writer.cover()
        self.head = self.notary.head()

    def said(self, site: str, **changes: Any) -> RuntimeData:
        """What an honest machine of `site` binds its evidence to now, fields changed."""
        head = self.head
        found = RuntimeData(
            self.notary.run, digest_of_entry(self.notary.manifest), site,
            self.driver.incarnations[site], 0, 1, SIGNERS[site].public,
            nonce_of(head.size, head.root, b""),
        )  # fmt: skip
        return dataclasses.replace(found, **changes)

    def file(
        self,
        site: str,
        said: RuntimeData | None = None,
        make: Callable[[RuntimeData], Evidence] = snp,
        **facts: Any,
    ) -> str:
        """File evidence of `said`; fields of the statement may be changed. Returns its digest."""
        head = self.head
        said = said or self.said(site)
        digest = self.store.put(make(said).to_bytes())
        usual = {
            "incarnation": self.driver.incarnations[site], "node": 0, "nodes": 1,
            "size": head.size, "root": head.root.hex(), "randomness": "", "time": int(time.time()),
        }  # fmt: skip
        found = Attestation(site, MACHINE, digest, MachineFacts(**{**usual, **facts}))
        signed = SIGNERS[site].sign(found.statement(self.notary.run))
        self.driver.core.witness.attest(site, signed)
        return digest

    def finding(self, file: PolicyFile | None, **given: Any) -> Finding:
        """The claim `attestations`, judged by the policy of `file`."""
        self.notary.close()
        now = datetime.datetime.now(datetime.UTC)
        judge = None if file is None else RunJudge(file, now, given.get("randomness", {}))
        found = verify(Places(self.config.folder, machines=judge), lambda what, share: None)
        self.exit_code = found.exit_code
        (own,) = (each for each in found.findings if each.claim.name == "attestations")
        return own
