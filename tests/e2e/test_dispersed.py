"""A run of three sites whose payloads are cut into pieces: lost, rebuilt, and verified."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from dilocox.record.log.blob_store import Store, piece_path
from dilocox.record.verify.piece_stores import PieceStores
from dilocox.record.verify.places import Places
from dilocox.record.verify.signed_cuts import SignedCuts, read_cuts
from dilocox.record.verify.verify import Report, verify
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


def lost(signed: SignedCuts, store: Path, site: str) -> None:
    """Remove a site's pieces."""
    for cut in signed.cuts:
        (store / piece_path(cut.root, signed.code.sites.index(site))).unlink()


@pytest.mark.slow
def test_pieces_of_two_of_three_sites_give_removed_rounds_back(workshop: Workshop) -> None:
    """Whole payloads of old rounds go (`record.keep`), pieces of all rounds stay."""
    run = workshop.train(
        "dispersed", "outer.rounds=5", "record.keep=2", "compression.codec=lowrank:4",
        "availability.needed=2", PATIENT, sites=SITES,
    )  # fmt: skip
    kept = judged(run.folder)
    assert (kept.exit_code, verdicts(kept)["availability"]) == (0, "PASS")
    assert verdicts(kept)["history"] == "PASS", "the replay takes old rounds from the pieces"

    signed = read_cuts(run.folder)
    # Five rounds and the flush, at two stages, of two fragments each.
    assert len(signed.certified) == len(signed.cuts) == 24
    store = run.folder / "record/store"
    shutil.rmtree(store / "windows")
    lost(signed, store, "lyon")
    assert sample(signed, PieceStores([str(store)]), 30, random.Random(0)).passed
    assert verdicts(judged(run.folder)) == verdicts(kept)

    target = run.folder.parent / "rebuilt"
    assert restore(signed, PieceStores([str(store)]), target).passed
    lost(signed, store, "nice")
    (claim,) = [each for each in judged(run.folder).findings if each.claim.name == "payloads"]
    assert claim.verdict == "NOT_RUN", claim.reason
    assert verdicts(judged(run.folder, target)) == verdicts(kept)


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
    # `verify` also takes the pieces themselves. One site's are too few.
    assert verdicts(judged(folders["paris"], *others)) == verdicts(report)
    alone = judged(folders["paris"], others[0])
    (claim,) = [each for each in alone.findings if each.claim.name == "payloads"]
    assert claim.verdict == "NOT_RUN"
    assert "2 pieces are needed, 1 are there (lyon)" in claim.reason
    one = PieceStores([str(stores["lyon"])])
    assert len(restore(signed, one, workshop.root / "too-few").lost) == 6


@pytest.mark.slow
def test_a_killed_run_signs_what_was_left_when_it_is_resumed(workshop: Workshop) -> None:
    sets = ("site.stages=1", "outer.rounds=8", "availability.needed=2", "checkpoint.every_rounds=1",
            PATIENT)  # fmt: skip
    run = workshop.start("killed", *sets, sites=SITES)
    run.until_round(3)
    run.process.kill()
    run.process.wait()
    again = workshop.start("killed", *sets, flags=("--resume",), sites=SITES)
    assert again.wait() == 0, again.output()
    report = judged(run.folder)
    assert (report.exit_code, verdicts(report)["availability"]) == (0, "PASS"), report.findings
