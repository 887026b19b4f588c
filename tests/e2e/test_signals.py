"""A request to end that reaches every process of a run at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import pytest

from dilocox.cli.status import ask
from dilocox.tools.report.status import status_of
from tests.e2e.test_operations import coordinate, join_all, join_lines
from tests.support.forge import Forge
from tests.support.harness import Workshop

pytestmark = pytest.mark.stops

SETS = ("outer.rounds=400", "checkpoint.every_rounds=0", "site.stages=1")


def test_sigterm_to_the_group_of_train_ends_with_a_checkpoint(
    workshop: Workshop, forge: Forge
) -> None:
    """What systemd's default, `scancel`, `timeout` and containers do; and twice, as `make` does."""
    run = forge.train(workshop, "group", *SETS)
    run.until_round(1)
    os.killpg(run.process.pid, signal.SIGTERM)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 130, run.output()
    assert "was killed" not in run.printed()
    assert run.printed().count("stopping at the next slot end") == 1
    assert list((run.folder / "checkpoints").glob("tick-*"))
    assert run.summary()["phase"] == "stopped"
    assert not run.left_behind()


def test_sigterm_to_the_group_of_a_join_lets_it_finish_its_round(
    workshop: Workshop, forge: Forge
) -> None:
    run = coordinate(forge, workshop, "units", *workshop.run_file("units", *SETS))
    sites = join_all(forge, workshop, run)
    run.until_round(1)
    asked = status_of(run.folder, time.time())
    ask(asked, run.folder)
    assert (asked.state, asked.exit_code, asked.warnings) == ("training", 0, [])
    assert {site.name: site.role for site in asked.sites} == {"paris": "active", "lyon": "active"}
    os.killpg(sites["lyon"].process.pid, signal.SIGTERM)
    assert sites["lyon"].wait() == 130, sites["lyon"].output()
    assert "site lyon leaves before round" in sites["lyon"].printed()
    # What is on call looks into logs: both commands say what goes on there, too.
    said = sites["lyon"].printed()
    assert f"site lyon has joined run {run.folder.name} at 127.0.0.1:" in said
    assert "site lyon takes over the model from another site" in said
    assert "site paris takes part from round 0 on" in sites["paris"].printed()
    assert re.search(r"^round   1  step +\d+  loss \d", said, re.MULTILINE), said
    assert re.search(r"^round   1  step +\d+/\d+  loss \d", run.printed(), re.MULTILINE)
    assert run.printed().index("dilocox join") < 400, "the join lines are what is read first"
    # A site's folder tells it by itself; here it is the coordinator's, too.
    alone = run.folder.with_name("units-lyon")
    alone.mkdir()
    shutil.copy(run.folder / "site-lyon.jsonl", alone)
    left = status_of(alone, time.time())
    assert (left.state, left.reason, left.exit_code) == ("left", "", 3)
    assert left.round is not None
    assert left.round >= 1
    assert left.sites[0].loss is not None
    assert left.coordinator.startswith("127.0.0.1:")
    run.until(lambda: "lyon is gone: asked to leave, and done" in run.printed())
    # Twice, as `make` does: one request, and a checkpoint.
    run.interrupt()
    run.terminate()
    assert run.wait() == 130, run.output()
    assert sites["paris"].wait() in (0, 130), sites["paris"].output()
    assert run.summary()["phase"] == "stopped"
    assert list((run.folder / "checkpoints").glob("tick-*"))


def test_one_interrupt_ends_a_run_that_waits_for_sites(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=400", "checkpoint.every_rounds=0", "outer.min_sites=2")
    words = workshop.run_file("waiting", *sets)
    run = coordinate(forge, workshop, "waiting", *words)
    # Before any site is there, and when one of two is: nothing has begun.
    lines = join_lines(run)
    paris = forge.command(workshop, "waiting", *lines["paris"])
    run.until(lambda: "paris enrolled" in run.printed())
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert paris.wait() == 0, paris.output()
    run.folder.rename(run.folder.with_name("waiting-first"))
    # When a site has died that the others need.
    run = coordinate(forge, workshop, "waiting", *words)
    sites = join_all(forge, workshop, run)
    run.until_round(1)
    os.kill(sites["lyon"].process.pid, signal.SIGKILL)
    run.until(lambda: "the run waits for sites" in run.printed())
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert sites["paris"].wait() == 0, sites["paris"].output()
    assert "joins again" not in sites["paris"].printed()
    summary = run.summary()
    assert summary["phase"] == "stopped"
    assert "while the run waited for sites (there is no checkpoint)" in summary["reason"]


def test_sigterm_to_a_launcher_ends_with_a_checkpoint(workshop: Workshop, forge: Forge) -> None:
    """What `scancel` does to a site of one job, the run's only one: its ranks are not killed."""
    sets = ("outer.rounds=400", "checkpoint.every_rounds=0", "site.stages=2", "outer.min_sites=1")
    words = workshop.run_file("job", *sets, sites=("paris",))
    run = forge.command(workshop, "job", "coordinator", *words)
    run.until(lambda: "dilocox join" in run.printed())
    line = re.findall(r"dilocox (join .*)", run.printed())[0]
    own = ("--nproc-per-node=2", "--standalone", "-m", "dilocox")
    ranks = forge.command(workshop, "job", "torchrun", *own, *line.split())
    run.until_round(1)
    ranks.terminate()
    ranks.wait()
    assert "is the only active one: the run stops with a checkpoint" in ranks.printed()
    assert run.wait() == 130, run.output()
    assert "is gone" not in run.printed()
    assert run.summary()["phase"] == "stopped"
    assert list((run.folder / "checkpoints").glob("tick-*"))
