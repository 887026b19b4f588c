"""A run that keeps its newest rounds only: what is left is verified, and what is gone is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from tests.support.harness import PATIENT, Run, Workshop

pytestmark = pytest.mark.runs

KEPT = ("outer.rounds=6", "record.keep=2", "checkpoint.every_rounds=0", PATIENT)


def judged(folder: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and verdict and reason of each claim."""
    report = verify(Places(folder), lambda what, share: None)
    return report.exit_code, {f.claim.name: (f.verdict, f.reason) for f in report.findings}


def bad(folder: Path) -> dict[str, str]:
    """Claims that are not PASS."""
    return {name: verdict for name, (verdict, _) in judged(folder)[1].items() if verdict != "PASS"}


@pytest.fixture(scope="module")
def bounded(shared_workshop: Workshop) -> Path:
    return shared_workshop.train("bounded", *KEPT).folder


@pytest.fixture
def copied(bounded: Path, tmp_path: Path) -> Path:
    """The parts of the run that are verified, to be changed."""
    folder = tmp_path / "run"
    shutil.copytree(bounded, folder)
    shutil.copytree(bounded.parent / "data", tmp_path / "data")
    return folder


def test_the_newest_rounds_are_verified(bounded: Path) -> None:
    code, found = judged(bounded)
    assert bad(bounded) == {"history": "NOT_RUN"}
    assert code == 0, found
    # Windows of one round: the newest two, and the one that is filled.
    assert found["history"][1] == (
        "rounds 0 to 2 are not replayable: payloads were removed as record.keep = 2 says; the "
        "replay begins with a state that lyon, paris signed"
    )
    assert found["replay"][1] == "outer steps of 2 stages, of rounds from 3 on, equal bit for bit"
    windows = sorted(path.name for path in (bounded / "record/store/windows/paris/0.0").iterdir())
    assert windows == ["00000003", "00000004", "00000005"]


def test_a_site_s_own_windows_are_enough(copied: Path) -> None:
    shutil.rmtree(copied / "record/store/windows/paris")
    assert bad(copied) == {"history": "NOT_RUN"}


def test_what_should_be_there_is_missed(copied: Path) -> None:
    """Of the two newest rounds nothing may be gone; it is no proof of a fraud either."""
    for site in ("paris", "lyon"):
        for name in ("00000003", "00000004"):
            shutil.rmtree(copied / f"record/store/windows/{site}/0.0/{name}")
    code, found = judged(copied)
    assert code == 3
    assert found["payloads"] == (
        "NOT_RUN",
        "payloads before round 5 are in no store, where the newest 2 rounds should be "
        "(record.keep); name more stores with --store",
    )
    assert found["replay"][0] == found["history"][0] == "NOT_RUN"


def test_a_payload_that_was_changed_is_found(copied: Path) -> None:
    """In the newest window of a stage, at every site."""
    for window in (copied / "record/store/windows").glob("*/1.0/00000005"):
        for path in window.rglob("*"):
            if path.is_file():
                path.write_bytes(b"x" * path.stat().st_size)
    code, found = judged(copied)
    assert code == 1
    assert found["payloads"][0] == "FAIL"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ("site.stages=1", "site.shards=2", "outer.exchange=reduce"),
        ("site.stages=1", "compression.codec=lowrank:4", "outer.momentum_dtype=bf16",
         "outer.fragments=1"),
        ("record.keep=3.1MB", "compression.codec=none", "outer.rounds=12", "site.stages=1"),
    ],
    ids=["reduce-shards", "lowrank-bf16", "bytes"],
)  # fmt: skip
def test_windows_of_other_layouts(
    shared_workshop: Workshop, sets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = f"bounded-{request.node.callspec.id}"
    run = shared_workshop.train(name, *KEPT, *sets)
    assert bad(run.folder) == {"history": "NOT_RUN"}


@pytest.mark.slow
def test_audits_of_kept_and_of_removed_rounds(shared_workshop: Workshop) -> None:
    run = shared_workshop.train("bounded-audited", *KEPT, "record.states_every=1")
    audit = Run(["audit", str(run.folder), "--json"], run.folder)
    shared_workshop.runs.append(audit)
    audit.wait()
    said = json.loads(audit.printed())["verdicts"]
    found = {(each["round"], each["site"]): each["verdict"] for each in said}
    for site in ("paris", "lyon"):
        assert [found[round_, site] for round_ in range(7)] == ["NOT_RUN"] * 3 + ["EXACT"] * 4, (
            next(each for each in said if (each["round"], each["site"]) == (3, site))
        )
    gone = next(each for each in said if each["round"] == 1)
    assert "are removed as record.keep = 2 says" in gone["reason"]
