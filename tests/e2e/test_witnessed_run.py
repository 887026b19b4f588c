"""A run whose log is cosigned while it trains: by a live witness, beside a dead one."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from dilocox.cli.verify import judged
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.record.verify.witness_claims import Witnesses
from dilocox.tools.report.compliance import compliance_text
from dilocox.tools.report.folder import read_run
from dilocox.tools.witness.folder import WitnessFolder, create
from tests.support.harness import PATIENT, Workshop
from tests.support.witnessed import serving

pytestmark = [pytest.mark.slow, pytest.mark.runs]


def test_a_run_is_cosigned_beside_a_dead_witness(workshop: Workshop) -> None:
    create(workshop.root / "w", "live.example/1")
    dead = create(workshop.root / "dead", "dead.example/1").key
    folder = workshop.folder("witnessed")
    with serving(workshop.root / "w") as (process, witness), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hook = [sys.executable, "-m", "dilocox", "witness", "ask", str(folder),
                "--witness", str(witness.key), witness.url,
                "--witness", str(dead), f"http://127.0.0.1:{closed.getsockname()[1]}"]  # fmt: skip
        run = workshop.start(
            "witnessed", "outer.rounds=4", "site.stages=1", "checkpoint.every_rounds=0", PATIENT,
            f"record.anchor={json.dumps(hook)}",
        )  # fmt: skip
        public = folder / "record" / "log.pub"
        run.until(public.exists)
        WitnessFolder(workshop.root / "w").trust(NoteKey.parse(public.read_text()))
        assert run.wait() == 0, run.output()
        assert process.poll() is None
    # The hook fails because of the dead one; that is said once.
    assert run.printed().count("record.anchor: ") == 1, run.printed()

    def verdict(*keys: str, quorum: int | None = None) -> str:
        places = Places(folder, witnesses=Witnesses.parse(keys, quorum, []))
        found = verify(places, lambda what, share: None).findings
        return {each.claim.name: each.verdict for each in found}["witnesses"]

    assert verdict(str(witness.key)) == "PASS"
    assert verdict(str(witness.key), str(dead)) == "NOT_RUN"
    assert verdict(str(witness.key), str(dead), quorum=1) == "PASS"
    # The report on compliance takes its figures from the same record.
    claims = judged(folder)
    files = read_run(folder)
    text = compliance_text(files, 0.0, claims)
    tokens = sum(each["tokens"] for each in run.records())
    assert f"| tokens trained on | {tokens:,.0f} | metrics.jsonl | metrics PASS |" in text
    assert "| outer.method | dilocox | run.toml | run-file PASS |" in text
    assert str(workshop.root) not in text
