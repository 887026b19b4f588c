"""A whole run in bundles: low rank, payloads removed as the run goes on, claims of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.record.bundles.place import Place
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.storage.follow import publish_once
from tests.support.bundled_run import publisher, reasons, verdicts, verified
from tests.support.harness import PATIENT, Workshop

pytestmark = pytest.mark.runs

SETS = (
    "outer.rounds=5",
    "record.keep=1",
    "compression.codec=lowrank:4",
    "checkpoint.every_rounds=0",
    PATIENT,
)


def test_a_run_that_kept_its_newest_rounds(shared_workshop: Workshop, tmp_path: Path) -> None:
    run = shared_workshop.train("bundled", *SETS).folder
    url = f"file://{tmp_path}/public"
    publish_once(publisher(run, Place(url), every=2))
    report, own = verified(url), verify(Places(run), lambda what, share: None)
    assert (report.exit_code, own.exit_code) == (0, 0)
    found, expected = verdicts(report), verdicts(own)
    assert found.pop("bundles") == "PASS"
    assert "objects were in no store" in reasons(report)["bundles"]
    assert (found.pop("data"), expected.pop("data")) == ("NOT_RUN", "PASS")  # not published
    assert found == expected
    assert found["history"] == "NOT_RUN"
    secrets = [path for path in run.rglob("*") if path.suffix == ".key"]
    secrets += [run / "coordinator" / name for name in ("record-key", "token-secret")]
    kept = [path.read_bytes().strip() for path in secrets if path.is_file()]
    assert len(kept) > 1
    published = b"".join(p.read_bytes() for p in (tmp_path / "public").rglob("*") if p.is_file())
    assert not any(each in published for each in kept)
