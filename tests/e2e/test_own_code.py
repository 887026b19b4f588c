"""A run over a network whose sites bring functions of their own, and end it by one of them."""

from __future__ import annotations

import re

import dilocox
from dilocox.own_code import ENDED
from tests.e2e.forked import Forge, ForkedRun
from tests.e2e.harness import Workshop
from tests.e2e.own_functions import FUNCTIONS
from tests.e2e.test_operations import coordinate, join_lines

SETS = (
    "outer.rounds=400", "evaluation.every_rounds=1", "checkpoint.every_rounds=0", "site.stages=1",
    "inner.optimizer=sgd",
)  # fmt: skip


def test_sites_with_functions_of_their_own(workshop: Workshop, forge: Forge) -> None:
    code = dilocox.code_digest(**FUNCTIONS)
    words = workshop.run_file("own", *SETS, f"run.code={code}")

    def trained(*more: str) -> ForkedRun:
        run = coordinate(forge, workshop, "own", *words, *more)
        lines = join_lines(run)
        if not more:
            bare = forge.command(workshop, "own", *lines["lyon"])
            assert bare.wait() == 1
            assert "this run trains by functions of its own" in bare.printed()
        sites = [
            forge.command(workshop, "own", *line, hooks="own-functions") for line in lines.values()
        ]
        assert [site.wait() for site in sites] == [0, 0], sites[0].output()
        assert run.wait() == 130, run.output()
        assert f"model {run.folder / 'model'}" in sites[0].last_line()
        return run

    run = trained()
    first = run.summary()
    assert (first["phase"], first["reason"]) == ("stopped", f"{ENDED} after round 1")
    assert (run.folder / "model" / "config.json").is_file()
    assert list((run.folder / "checkpoints").glob("tick-*"))
    # Own sequences are evaluated by the own loss; what a callback prints is in its rank's log.
    assert 0 < first["val_loss_last"] < first["val_loss_first"]
    log = (run.folder / "logs" / "paris-stage0-shard0.log").read_text()
    assert re.findall(r"^evaluation after round (-?\d+): ", log, re.MULTILINE)[:3] == [
        "-1", "0", "1",
    ]  # fmt: skip
    rates = [row["learning_rate"] for row in run.records("round", "paris")]
    assert rates[0] == 3e-3
    # The own optimizer's state goes on with the run.
    again = trained("--resume")
    assert again.summary()["reason"].startswith(ENDED)
    assert again.summary()["rounds"] > first["rounds"]
    assert again.summary()["val_loss_last"] < first["val_loss_last"]
