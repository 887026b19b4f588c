"""A run of three sites whose payloads are cut into pieces: lost, rebuilt, and verified."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dilocox.record.log.blob_store import piece_path
from dilocox.record.verify.verify import Places, Report, verify
from dilocox.tools.availability.cuts import read_cuts
from dilocox.tools.availability.piece_stores import PieceStores
from dilocox.tools.availability.restore import restore
from dilocox.tools.availability.sampling import sample
from tests.support.harness import PATIENT, Workshop

pytestmark = pytest.mark.runs
SITES = ("paris", "lyon", "nice")


def judged(folder: Path, *stores: Path) -> Report:
    places = Places(folder, [str(each) for each in stores])
    return verify(places, lambda what, share: None)


def verdicts(report: Report) -> dict[str, str]:
    return {each.claim.name: each.verdict for each in report.findings}


def test_payloads_are_rebuilt_from_the_pieces_of_two_of_three_sites(workshop: Workshop) -> None:
    run = workshop.train(
        "dispersed", "site.stages=1", "outer.rounds=2", "availability.needed=2", PATIENT,
        sites=SITES,
    )  # fmt: skip
    whole = judged(run.folder)
    (claim,) = [each for each in whole.findings if each.claim.name == "availability"]
    assert (whole.exit_code, claim.verdict) == (0, "PASS"), claim.reason

    signed = read_cuts(run.folder)
    # Two rounds and the flush, of two fragments each; the last are signed before the run ends.
    assert len(signed.certified) == len(signed.cuts) == 6
    store = run.folder / "record/store"
    lost = signed.code.sites.index("lyon")
    digests = set()
    for cut in signed.cuts:
        (store / piece_path(cut.root, lost)).unlink()
        pieces = PieceStores([str(store)]).first(cut, range(3), 2)
        digests |= {digest for digest, _ in pieces[0].layout.objects}
    for digest in digests:
        (store / "sha256" / digest[:2] / digest[2:]).unlink()
    assert verdicts(judged(run.folder))["payloads"] == "NOT_RUN"

    assert sample(signed, PieceStores([str(store)]), 30, random.Random(0)).passed
    target = run.folder.parent / "rebuilt"
    assert restore(signed, PieceStores([str(store)]), target).passed
    again = judged(run.folder, target)
    assert (again.exit_code, verdicts(again)) == (0, verdicts(whole))
