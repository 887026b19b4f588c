"""Verdicts of a run that was resumed: what was trained anew has not been audited."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.neighbours import SLOTS, Cheat, Neighbour, Registry, honest, run_config
from tests.tools.audit.test_cheats import here, other_text, shard
from tests.training.launch.test_preflight import write_text

from dilocox.cli import audit
from dilocox.data import prepare
from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Signed, read_all, write
from dilocox.record.log.statements import Signer
from dilocox.record.verify.audit_claims import Audits
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import judge
from dilocox.training.rank_state import capture_round, restore_round

SIGNER = Signer.from_hex("0a" * 32)


class Resumed:
    """Two sites train three rounds; then the run goes back to where the third began."""

    def __init__(self, root: Path) -> None:
        write_text(root / "text", 0)
        config = run_config(root, "run")
        files = prepare(config.data, config.data_folder, config.run.seed)
        torch.set_num_threads(1)
        self.folder = config.folder
        self.folder.mkdir(parents=True)
        (self.folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")
        self.registry = Registry(config, {}, {})
        self.sites = [Neighbour(self.registry, name, n, files)
                      for n, name in enumerate(config.sites)]  # fmt: skip
        for round_ in range(2):
            self.train(round_)
        self.kept = [self._kept(site) for site in self.sites]
        self.train(2)
        self.registry.notary.sync()
        self.registry.notary.writer.cover()

    def train(self, round_: int, cheats: Mapping[str, Cheat] | None = None) -> None:
        """A round, of the plan that it had before if it had one."""
        plan = self.registry.plans.get(round_) or self.registry.plan(round_)
        self.registry.notary.planned(plan)

        def one(site: Neighbour) -> None:
            with (cheats or {}).get(site.name, honest)(site):
                site.trainer.train_round(plan)
            site.watch.wait()

        with ThreadPoolExecutor(len(self.sites)) as pool:
            list(pool.map(one, self.sites))

    def _kept(self, site: Neighbour) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        site.outer.settle()
        tensors, state = capture_round(site.trainer.state)
        return {name: each.clone() for name, each in tensors.items()}, copy.deepcopy(state)

    def resume(self, cheats: Mapping[str, Cheat] | None = None) -> None:
        """Go back, train the third round anew, and one more."""
        self.registry.notary.resumed(2, 2 * SLOTS)
        self.registry._in.clear()
        for site, (tensors, state) in zip(self.sites, self.kept, strict=True):
            site.outer.pending.clear()
            site.watch._steps = None
            restore_round(site.trainer.state, tensors, state, 2 * SLOTS)
        with ThreadPoolExecutor(len(self.sites)) as pool:
            list(pool.map(lambda site: site.outer.resume_in_flight(), self.sites))
        self.train(2, cheats)
        self.train(3)
        self.registry.notary.sync()
        self.registry.notary.writer.cover()


class Auditor:
    """`dilocox auditor`, which looks when it is told to; repetitions in this process."""

    def __init__(self, folder: Path) -> None:
        self.run, self.done = AuditedRun(folder, (), None), set[tuple[int, int, int]]()
        self.own = read_all(folder, self.run.course.run)
        self.randomness = folder / "randomness"
        self.randomness.write_text("".join(f"{n} {n:064x}\n" for n in range(9)))

    def look(self) -> list[tuple[int, str, str]]:
        """What it has audited now: round, site, verdict."""
        found = []
        self.run.refresh()
        for chosen in audit._selected(self.run, 1.0, self.randomness, self.done):
            if audit._is_audited(self.run, chosen, self.own):
                continue
            seen = self.run.seen()
            verdict = judge(self.run.case(), chosen.site, chosen.round, here, lambda step: None)
            key = SIGNER.public
            self.own.append(Signed(verdict, chosen.selection, key, self.run.course.run, seen))
            write(self.run.folder, self.own[-1], SIGNER, "00")
            found.append((chosen.round, chosen.site, verdict.verdict))
        return found


def claims(folder: Path) -> Audits:
    run = AuditedRun(folder, (), None)
    return Audits(run.course, run.entries, folder, ())


ALL = [(round_, site, "EXACT") for round_ in range(4) for site in ("lyon", "paris")]


@pytest.mark.slow
def test_what_is_trained_anew_is_audited_anew(tmp_path: Path) -> None:
    """Lyon trains the third round honestly, is audited, and then trains it on other text."""
    run = Resumed(tmp_path)
    auditor = Auditor(run.folder)
    assert auditor.look() == ALL[:6]
    before = read_all(run.folder, auditor.run.course.run)
    assert claims(run.folder).verdicts().startswith("6 of 6 rounds")
    assert claims(run.folder).beacon().startswith("6 rounds")
    run.resume({"lyon": other_text(shard)})
    # Of round 1 an exchange was under way, and is decided anew; round 0 is as it was.
    said = claims(run.folder).verdicts()
    assert said.startswith("2 of 8 rounds")
    assert said.endswith("4 more on rounds trained again since")
    # The site's verdict of before does not stand for what it has done since.
    later = Auditor(run.folder)
    found = later.look()
    assert found[:4] == [*ALL[2:4], (2, "lyon", "MISMATCH"), ALL[5]]
    assert auditor.look() == found, "one that was there all the time sees the same"
    with pytest.raises(RecordError, match="round 2 of lyon: MISMATCH"):
        claims(run.folder).verdicts()
    # A verdict that does not say what its auditor has read: by the point that has selected it, or
    # by the latest resume.
    shutil.rmtree(run.folder / "record" / "audits")
    for each in before:
        write(run.folder, replace(each, seen=None), SIGNER, "00")
    assert claims(run.folder).verdicts() == said
    request = replace(before[4].selection, by="request", size=0, root="")
    write(run.folder, replace(before[4], seen=None, selection=request), SIGNER, "00")
    assert claims(run.folder).verdicts() == said


def test_honest_sites_pass_after_a_resume(tmp_path: Path) -> None:
    run = Resumed(tmp_path)
    auditor = Auditor(run.folder)
    auditor.look()
    run.resume()
    assert auditor.look() == ALL[2:]
    assert auditor.look() == Auditor(run.folder).look() == []
    assert claims(run.folder).verdicts().startswith("8 of 8 rounds")
    assert claims(run.folder).beacon().startswith("8 rounds")
    # Another log's verdict is no verdict of a course that was left.
    (first, *_) = read_all(run.folder, auditor.run.course.run)
    assert first.seen is not None
    for other in (replace(first.seen, root="00" * 32), replace(first.seen, size=10**6)):
        write(run.folder, replace(first, seen=other), SIGNER, "00")
        with pytest.raises(RecordError, match="was made by another log"):
            claims(run.folder).verdicts()
