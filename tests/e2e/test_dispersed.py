"""A run of three sites whose payloads are cut into pieces: lost, rebuilt, and verified."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from dilocox.record.log.blob_store import Store, piece_path
from dilocox.record.verify.verify import Places, Report, verify
from dilocox.tools.availability.cuts import read_cuts
from dilocox.tools.availability.piece_stores import PieceStores
from dilocox.tools.availability.restore import restore
from dilocox.tools.availability.sampling import sample
from tests.support.forge import ForkedRun
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
    (claim,) = [each for each in judged(run.folder).findings if each.claim.name == "payloads"]
    assert claim.verdict == "NOT_RUN"
    assert claim.reason.endswith("from pieces with `dilocox availability --rebuild`")

    assert sample(signed, PieceStores([str(store)]), 30, random.Random(0)).passed
    target = run.folder.parent / "rebuilt"
    assert restore(signed, PieceStores([str(store)]), target).passed
    again = judged(run.folder, target)
    assert (again.exit_code, verdicts(again)) == (0, verdicts(whole))


def test_any_two_of_three_sites_give_the_whole_record_back(workshop: Workshop) -> None:
    """Each site has a run folder of its own, and removes whole payloads. The first is then lost."""
    folders = {site: workshop.root / site / "apart" for site in SITES}
    file, *sets = workshop.run_file(
        "apart", "site.stages=1", "outer.rounds=2", "availability.keep_whole=false", PATIENT,
        sites=SITES,
    )  # fmt: skip

    def dilocox(site: str, *arguments: str) -> ForkedRun:
        own = ["--set", f"run.folder={folders[site]}"]
        return workshop.forge.command(workshop, "apart", *arguments, *sets, *own)

    prepared = dilocox("paris", "data", "prepare", file)
    assert prepared.wait() == 0, prepared.output()
    run = dilocox("paris", "coordinator", file)
    run.until(lambda: run.printed().count("dilocox join") == len(SITES))
    (address,) = set(re.findall(r"dilocox join (\S+)", run.printed()))
    tokens = folders["paris"] / "coordinator/tokens"
    joins = [
        dilocox(site, "join", address, "--site", site, "--run-file", file, "--token-file",
                str(tokens / site))
        for site in SITES
    ]  # fmt: skip
    assert [each.wait() for each in joins] == [0, 0, 0], "".join(each.output() for each in joins)
    assert run.wait() == 0, run.output()

    signed = read_cuts(folders["paris"])
    assert len(signed.certified) == len(signed.cuts) == 6
    stores = {site: folder / "record/store" for site, folder in folders.items()}
    for cut in signed.cuts:
        pieces = PieceStores([str(stores["lyon"])]).first(cut, range(3), 1)
        for digest, _ in pieces[0].layout.objects:
            left = [site for site in SITES if Store(str(stores[site])).has(digest)]
            # The last certificates may come when a site has ended already.
            assert cut.round > 0 or not left
            for site in left:
                Store(str(stores[site])).drop(digest)

    shutil.rmtree(stores["paris"])  # which had made theta_0
    others = [stores["lyon"], stores["nice"]]
    target = workshop.root / "rebuilt"
    assert restore(signed, PieceStores(list(map(str, others))), target).passed
    report = judged(folders["paris"], *others, target)
    assert report.exit_code == 0, [each for each in report.findings if each.verdict != "PASS"]
    one = PieceStores([str(stores["lyon"])])
    assert len(restore(signed, one, workshop.root / "too-few").lost) == 6
