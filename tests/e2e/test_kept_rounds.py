"""A run that keeps its newest rounds only: what is left is verified, and what is gone is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.record.verify import Places, verify
from tests.e2e.harness import PATIENT, Workshop


def verdicts(folder: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    report = verify(Places(folder), lambda what, share: None)
    return report.exit_code, {f.claim.name: (f.verdict, f.reason) for f in report.findings}


@pytest.fixture(scope="module")
def bounded(shared_workshop: Workshop) -> Path:
    sets = ("outer.rounds=6", "record.keep=2", "checkpoint.every_rounds=0", PATIENT)
    return shared_workshop.train("bounded", *sets).folder


def test_the_newest_rounds_are_verified(bounded: Path) -> None:
    code, found = verdicts(bounded)
    assert code == 0, found
    bad = {name: each for name, each in found.items() if each[0] != "PASS"}
    assert list(bad) == ["history"]
    verdict, reason = found["history"]
    assert verdict == "NOT_RUN"
    assert reason == (
        "rounds 0 to 2 are not replayable: payloads were removed as record.keep = 2 says; the "
        "replay begins with a state that lyon, paris signed"
    )
