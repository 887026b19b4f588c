"""A run over a network whose sites bring functions of their own, and end it by one of them."""

from __future__ import annotations

import re

import pytest

import dilocox
from dilocox.data import TokenFiles
from tests.e2e.test_operations import coordinate, flush_digests, join_lines
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts
from tests.support.own_functions import FUNCTIONS

pytestmark = pytest.mark.runs

SETS = (
    "outer.rounds=400", "evaluation.every_rounds=1", "checkpoint.every_rounds=0", "site.stages=1",
    "inner.optimizer=sgd", "network.heartbeat=10",
)  # fmt: skip


def test_sites_with_functions_of_their_own(workshop: Workshop, forge: Forge) -> None:
    code = dilocox.code_digest(**FUNCTIONS)
    words = workshop.run_file("own", *SETS, f"run.code={code}")

    def begun(hooks: str, *more: str) -> tuple[ForkedRun, list[ForkedRun]]:
        run = coordinate(forge, workshop, "own", *words, *more)
        lines = join_lines(run)
        if not more:
            bare = forge.command(workshop, "own", *lines["lyon"])
            assert bare.wait() == 1
            assert "this run trains with the user's own functions" in bare.printed()
        return run, [forge.command(workshop, "own", *line, hooks=hooks) for line in lines.values()]

    run, sites = begun("own-functions")
    run.until_round(1)
    run.interrupt()
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert run.wait() == 130, run.output()
    first = run.summary()
    # Own sequences are evaluated by the own loss; what a callback prints is in its rank's log.
    assert 0 < first["val_loss_last"] < first["val_loss_first"]
    log = (run.folder / "logs" / "paris-stage0-shard0.log").read_text()
    assert re.findall(r"^evaluation after round (-?\d+): ", log, re.MULTILINE)[:3] == [
        "-1", "0", "1",
    ]  # fmt: skip
    rates = [row["learning_rate"] for row in run.records("round", "paris")]
    assert rates[0] == 3e-3
    # The own optimizer's state goes on with the run, and the callback ends it as if it were
    # through.
    again, sites = begun("own-functions-enough", "--resume")
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert again.wait() == 0, again.output()
    assert f"model {again.folder / 'model'}" in sites[0].last_line()
    last = again.summary()
    why = "paris: on_evaluation returned True"
    assert (last["phase"], last["reason"]) == ("finished", why)
    assert first["rounds"] < last["rounds"] < 400
    assert last["val_loss_last"] < first["val_loss_last"]
    assert f"ended early       {why}" in again.printed()
    assert len(flush_digests(again)) == 1
    assert not verdicts(again.folder)


def test_sites_that_learn_nothing_end_the_run_together(workshop: Workshop) -> None:
    # So low a rate changes no weight: the loss stays what it was, at both sites. It is that of
    # held-out text of its own.
    run = workshop.train(
        "patient", "outer.rounds=400", "evaluation.every_rounds=1", "evaluation.patience=2",
        "inner.learning_rate=1e-30", "site.stages=1", PATIENT,
        f"data.folder={workshop.root / 'patient-data'}", f"data.validation_source={workshop.text}",
    )  # fmt: skip
    summary = run.summary()
    assert 3 <= summary["rounds"] <= 5
    assert summary["reason"].startswith("no lower held-out loss than ")
    assert summary["reason"].endswith("2 evaluations (evaluation.patience), at paris, lyon")
    splits = TokenFiles.open(workshop.root / "patient-data").content["splits"]
    assert splits["validation"]["documents"] == splits["train"]["documents"]
    told = run.records("peer_evaluation", "lyon")
    assert [each["after_round"] for each in told][:3] == [0, 1, 2]
    assert not run.records("peer_evaluation", "paris")
    # Checkpoints were written: PyTorch's words about that are nobody's matter.
    assert list((run.folder / "checkpoints").glob("tick-*"))
    assert (
        "torch.distributed is" not in (run.folder / "logs" / "paris-stage0-shard0.log").read_text()
    )
    assert not verdicts(run.folder)
