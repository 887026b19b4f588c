"""A run whose sites vouch for pretended machines, while it trains; what a reader makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from dilocox.record.log import statements as s
from dilocox.record.log.attestation_statements import Attestation
from dilocox.tools.attestation.collecting import CHIP
from dilocox.tools.attestation.policy import PolicyFile
from dilocox.tools.attestation.simulated_machine import MEASUREMENT, SimulatedMachine
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop

pytestmark = pytest.mark.runs
SITES = ("paris", "lyon")
ROUNDS = 12


def policy(folder: Path) -> PolicyFile:
    """Write a policy that accepts one pretended machine; both sites share its authority."""
    machine = SimulatedMachine.kept(folder / "machine", CHIP)
    rules = {
        "environment": "simulation",
        "max_age_rounds": ROUNDS,
        "snp": {"measurements": [MEASUREMENT.hex()]},
        "simulation": {"roots": [machine.root]},
    }
    (folder / "tee.toml").write_text(tomli_w.dumps(rules))
    return PolicyFile.read(folder / "tee.toml")


def judged(forge: Forge, workshop: Workshop, run: Path | str, *words: str) -> tuple[int, str, str]:
    """`dilocox verify`: its exit code, and verdict and reason of the claim `attestations`."""
    said = forge.command(workshop, "verify", "verify", str(run), "--json", *words)
    code = said.wait()
    found = {each["name"]: each for each in json.loads(said.printed())["claims"]}
    return code, found["attestations"]["verdict"], found["attestations"]["reason"]


def test_a_run_of_pretended_machines(workshop: Workshop, forge: Forge) -> None:
    file = policy(workshop.root)
    sets = (
        PATIENT, f'record.tee="{file.digest}"', f"outer.rounds={ROUNDS}", "outer.inner_steps=10",
        "site.stages=1", "outer.fragments=1",
    )  # fmt: skip
    run = forge.train(workshop, "attested", *sets)
    run.until(lambda: (run.folder / "private" / "lyon.key").exists())
    beside = [
        forge.command(
            workshop, f"attest-{site}", "attest", str(run.folder), "--site", site, "--simulate",
            str(workshop.root / "machine"), "--policy", str(workshop.root / "tee.toml"),
            "--follow", "--every", "1",
        )
        for site in SITES
    ]  # fmt: skip
    assert run.wait() == 0, run.output()
    for each in beside:
        each.terminate()
        each.wait()
    tee = ("--tee", str(workshop.root / "tee.toml"))

    lines = (run.folder / "record/statements.jsonl").read_text().splitlines()
    statements = [s.opened(line)[0] for line in lines]
    filed = [Attestation.of(each) for each in statements if each.kind == s.ATTESTATION]
    for site in SITES:
        sizes = {each.machine.size for each in filed if each.site == site and each.machine}
        assert len(sizes) >= 2, [each.printed() for each in beside]

    code, verdict, reason = judged(forge, workshop, run.folder, *tee)
    assert (code, verdict) == (3, "SIMULATED"), reason
    assert f"{len(filed)} pieces of evidence (SNP)" in reason
    assert judged(forge, workshop, run.folder)[:2] == (0, "NOT_RUN")

    place = f"file://{workshop.root}/public"
    published = forge.command(workshop, "publish", "publish", str(run.folder), "--to", place)
    assert published.wait() == 0, published.printed()
    assert judged(forge, workshop, place, *tee)[:2] == (3, "SIMULATED")

    other = workshop.root / "other.toml"
    other.write_text((workshop.root / "tee.toml").read_text() + "\n")
    assert judged(forge, workshop, run.folder, "--tee", str(other))[:2] == (1, "FAIL")

    changed = workshop.root / "changed"
    shutil.copytree(run.folder, changed)
    digest = filed[-1].evidence
    path = changed / "record/store/sha256" / digest[:2] / digest[2:]
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    code, verdict, reason = judged(forge, workshop, changed, *tee)
    assert (code, verdict) == (1, "FAIL")
    assert "holds other bytes than its name says" in reason
