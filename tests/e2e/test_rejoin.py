"""A site that is killed leaves, the others go on; it comes back and contributes again."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.support.forge import Forge
from tests.support.harness import Run, Workshop, verdicts

pytestmark = pytest.mark.stops


def join_again(workshop: Workshop, run: Run, site: str, *sets: str) -> Run:
    endpoint = json.loads((run.folder / "coordinator" / "endpoint.json").read_text())
    address = endpoint["url"].removeprefix("https://")
    file, *overrides = workshop.run_file(run.folder.name, *sets)
    arguments = ["join", address, "--site", site, "--run-file", file, *overrides]
    arguments += ["--token-file", str(run.folder / "coordinator" / "tokens" / site)]
    joined = Run(arguments, run.folder)
    workshop.runs.append(joined)
    return joined


# A rank that dies and whose site comes back is in test_faults.py, which costs less.
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_kill_and_rejoin(workshop: Workshop, exchange: str) -> None:
    sets = ("outer.rounds=220", "checkpoint.every_rounds=0", f"outer.exchange={exchange}")
    run = workshop.start(f"killed-{exchange}", *sets)
    run.until(lambda: len(run.records("round")) >= 3)
    # The whole site at once, as a power cut does.
    victims = {n: p for n, p in run.rank_processes().items() if n.startswith("lyon")}
    assert len(victims) == 3, victims
    for process in victims.values():
        os.kill(process, signal.SIGKILL)
    last_together = max(r["round"] for r in run.records("round", "lyon"))
    run.until(lambda: "lyon is gone" in run.printed())
    run.until(lambda: len(run.records("round", "paris")) > last_together + 4)
    alone = run.records("round")[-1]
    assert alone["sites"] == 1
    joined = join_again(workshop, run, "lyon", *sets)
    run.until(lambda: run.records("round", "lyon")[-1]["round"] > last_together + 4)
    assert joined.wait() == 0, joined.output()
    assert run.wait() == 0, run.output()
    summary = run.summary()
    # Both sites held the same anchor after every round they shared, else the run had failed.
    after = [r for r in run.records("round") if r["round"] > last_together + 4]
    assert [r["sites"] for r in after][-1] == 2
    shared = [r for r in run.records("round", "lyon") if r["round"] > last_together + 4]
    assert all(r["contributors"] == 2 for r in shared[2:-1])
    assert summary["val_loss_last"] < summary["val_loss_first"] - 1.0
    # What the killed site had contributed is signed, and kept by who received it.
    assert verdicts(run.folder) == {}


@pytest.mark.slow
def test_a_donor_that_dies_is_replaced_by_another(workshop: Workshop, forge: Forge) -> None:
    """Lyon enters again, fetching from paris, which dies of the first fragment that it gives."""
    sets = (
        "outer.rounds=5000",
        "checkpoint.every_rounds=0",
        "site.stages=1",
        "network.heartbeat=5",
    )
    sites = ("paris", "lyon", "oslo")
    run = forge.train(workshop, "donor", *sets, hooks="donor-dies", sites=sites)
    run.until_round(2)
    os.kill(run.rank_processes()["lyon:0.0"], signal.SIGKILL)
    run.until(lambda: "paris is gone: paris-stage0-shard0 was killed" in run.printed(), 200.0)
    # Both come back; lyon with the processes that it had begun to enter with.
    run.until(lambda: run.printed().count("lyon contributes from round") == 2, 200.0)
    run.until(lambda: run.printed().count("paris contributes from round") == 2, 200.0)
    said = run.printed()
    assert "lyon enters, fetching from paris" in said
    assert said.count("lyon enrolled") == 2
    assert said.count("dilocox: site lyon joins again in ") == 1
    log = (run.folder / "logs" / "lyon-stage0-shard0.log").read_text()
    assert "paris is gone: fetching from oslo" in log
    run.until_together(3, 200.0)
    run.ctrl_c()
    assert run.wait(200.0) == 130, run.output()
    assert run.sequences_amiss() == (0, 0)


@pytest.mark.slow
def test_a_donor_that_gives_a_false_state_is_replaced_and_the_run_goes_on(
    workshop: Workshop, forge: Forge
) -> None:
    """Rome enters again from paris, whose anchor most do not hold."""
    sets = (
        "outer.rounds=150",
        "checkpoint.every_rounds=0",
        "site.stages=1",
        "network.heartbeat=20",
        "network.link_timeout=20",
    )
    sites = ("paris", "lyon", "oslo", "rome")
    run = forge.train(workshop, "false-donor", *sets, hooks="false-donor", sites=sites)
    assert run.wait(400.0) == 0, run.output()
    said = run.printed()
    assert "paris gave rome a state that most do not hold: it enters from lyon" in said
    assert said.count("rome contributes from round ") >= 2
    assert "holds another anchor" not in said, "what rome trained on was the run's"
    assert len({r["anchor_digest"] for s in sites[:3] for r in run.records("flush", s)}) == 1
    log = (run.folder / "logs" / "rome-stage0-shard0.log").read_text()
    assert "paris is not believed: fetching from lyon" in log


@pytest.mark.slow
def test_a_site_comes_back_in_the_middle_of_a_long_round(workshop: Workshop, forge: Forge) -> None:
    """What is left of the round takes longer than a lease, a second here, goes ahead."""
    sets = ("outer.rounds=5000", "outer.inner_steps=30", "checkpoint.every_rounds=0",
            "site.stages=1")  # fmt: skip
    run = forge.train(workshop, "long-rounds", *sets, hooks="slow-steps")
    run.until_round(0)
    for times in (2, 3):
        run.until_together(2, 200.0)
        os.kill(run.rank_processes()["lyon:0.0"], signal.SIGKILL)
        run.until(lambda count=times: run.printed().count("lyon contributes from round") == count)
    run.until_together(2, 200.0)
    run.ctrl_c()
    assert run.wait(200.0) == 130, run.output()
    # Each time it came back once, and stayed.
    assert run.printed().count("lyon enrolled") == 3
    assert run.sequences_amiss() == (0, 0)


@pytest.mark.slow
def test_the_global_batch_stays_while_a_site_is_away(workshop: Workshop) -> None:
    sets = ("outer.rounds=5000", "outer.global_batch=fixed", "checkpoint.every_rounds=0",
            "network.heartbeat=5")  # fmt: skip
    run = workshop.start("fixed", *sets)
    run.until_round(2)
    os.kill(run.rank_processes()["lyon:1.0"], signal.SIGKILL)
    run.until(lambda: run.printed().count("lyon contributes from round") == 2, 200.0)
    run.until_together(2, 200.0)
    run.interrupt()
    assert run.wait(200.0) == 130, run.output()
    # Eight steps of eight sequences of 32 tokens, by one site or two.
    by_members = {
        number: {r["tokens"] for r in run.records("round", "paris") if r["members"] == number}
        for number in (1, 2)
    }
    assert by_members == {1: {2048}, 2: {1024}}
    whole = {r["tokens"] for r in run.records() if r["sites"] == 2}
    assert whole == {2048}
    assert run.sequences_amiss() == (0, 0)


@pytest.mark.slow
def test_where_all_sites_are_needed_a_dead_one_is_waited_for(workshop: Workshop) -> None:
    """Wherever lyon dies: paris ends the round and makes one for what has to land, no more."""
    sets = ("outer.rounds=60", "outer.min_sites=2", "checkpoint.every_rounds=0",
            "network.heartbeat=5")  # fmt: skip
    run = workshop.start("needed", *sets)
    run.until_round(2)
    for times in (2, 3, 4):
        os.kill(run.rank_processes()["lyon:1.0"], signal.SIGKILL)
        run.until(lambda count=times: run.printed().count("lyon contributes from round") == count)
    assert run.wait(200.0) == 0, run.output()
    alone = [r["round"] for r in run.records("round") if r["sites"] == 1]
    assert len(alone) <= 2 * 3, alone
    assert run.sequences_amiss() == (0, 0)


@pytest.mark.slow
def test_a_straggler_is_left_behind_and_catches_up(workshop: Workshop) -> None:
    """Two sites; lyon hardly runs for some seconds, but lives. Paris goes on alone meanwhile."""
    sets = ("outer.rounds=60", "network.link_timeout=8", "network.heartbeat=5")
    run = workshop.start("straggler", *sets)
    run.until_round(3)
    deadline = time.monotonic() + 60
    while "lyon is left behind" not in run.printed():
        assert time.monotonic() < deadline, run.output()
        lyon = [pid for name, pid in run.rank_processes().items() if name.startswith("lyon:")]
        for number, pause in ((signal.SIGSTOP, 1.2), (signal.SIGCONT, 0.03)):
            for pid in lyon:
                os.kill(pid, number)
            time.sleep(pause)
    assert run.wait() == 0, run.output()
    said = run.printed()
    assert "lyon is gone" not in said
    # On a busy machine it may fall behind again: each time it comes back.
    times = said.count("lyon is left behind")
    assert len(re.findall(r"lyon contributes from round \d+ on", said)) == 1 + times
    without = [r for r in run.records(site="lyon") if r["anchor_digest"] is None]
    assert len(without) == times
    alone = {r["round"]: r for r in run.records(site="paris")}
    # How long depends on where in a round it stopped.
    assert sum(r["waited_for"].get("lyon", 0.0) for r in alone.values()) > 0.2
    assert run.sequences_amiss() == (0, 0)
    assert verdicts(run.folder) == {}
