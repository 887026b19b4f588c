"""Sites and coordinators that die, come back, leave: with real signals to real processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3

import pytest

from tests.support.forge import Forge, ForkedRun
from tests.support.harness import Workshop

pytestmark = pytest.mark.stops

SMALL = ("outer.rounds=12", "checkpoint.every_rounds=0", "site.stages=1")


def coordinate(forge: Forge, workshop: Workshop, name: str, *words: str) -> ForkedRun:
    """`dilocox coordinator` until it listens. `words`: the run file, overrides and options."""
    run = forge.command(workshop, name, "coordinator", *words)
    run.until(lambda: run.printed().count("dilocox join") == 2)
    return run


def join_lines(run: ForkedRun) -> dict[str, list[str]]:
    """Arguments of the printed join lines, by site."""
    lines = re.findall(r"dilocox (join .* --site (\w+) .*)", run.printed())
    return {site: shlex.split(line) for line, site in lines}


def join_all(forge: Forge, workshop: Workshop, run: ForkedRun) -> dict[str, ForkedRun]:
    """Every site, by its printed line."""
    name = run.folder.name
    return {site: forge.command(workshop, name, *line) for site, line in join_lines(run).items()}


def flush_digests(run: ForkedRun) -> set[str]:
    """Anchor digests that the sites ended with."""
    return {r["anchor_digest"] for s in ("paris", "lyon") for r in run.records("flush", s)}


def recorded_once(run: ForkedRun, *sites: str) -> list[int]:
    """Rounds of the run, of which every site's report and every combined record is there once.

    A site may report a round after the other site's report of the next round. Then the late report
    completes the round: a second record of the run has one site more.
    """
    counts: dict[int, list[int]] = {}
    for record in run.records():
        counts.setdefault(record["round"], []).append(record["sites"])
    for round_, found in counts.items():
        assert found == sorted(set(found)), f"round {round_} is recorded twice: {found}"
        assert found[-1] == len(sites), f"round {round_} is not whole: {found}"
    for site in sites:
        rounds = [record["round"] for record in run.records("round", site)]
        assert rounds == sorted(counts), f"{site} reports each round once, in order"
    return sorted(counts)


# --- the coordinator -----------------------------------------------------------------------------


def test_a_killed_coordinator_goes_on_with_the_same_command(
    workshop: Workshop, forge: Forge
) -> None:
    words = workshop.run_file("restarted", *SMALL)
    first = coordinate(forge, workshop, "restarted", *words)
    sites = join_all(forge, workshop, first)
    first.until_round(1)
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.wait(10.0) == -signal.SIGKILL
    before = len({record["round"] for record in first.records()})
    # The sites notice nothing but silence; the next coordinator is where they look for it.
    again = coordinate(forge, workshop, "restarted", *words)
    assert join_lines(again) == join_lines(first)
    refused = forge.command(workshop, "restarted", "coordinator", *words)
    assert refused.wait() == 1
    assert "its run is going on right now" in refused.printed()
    assert [site.wait() for site in sites.values()] == [0, 0], sites["lyon"].output()
    assert again.wait() == 0, again.output()
    for site, joined in sites.items():
        assert joined.last_line() == f"site {site} is done; model {again.folder / 'model'}"
    assert re.search(r"coordinator restarted: the run is running, .*, epoch 1; paris, lyon expected"
                     r" within 5 s", again.printed())  # fmt: skip
    summary = again.summary()
    assert summary["rounds"] == 12 > before
    # Twelve rounds of eight steps of four sequences at two sites, each number once.
    assert (summary["sequences_committed"], summary["sequences_doubled"]) == (768, 0)
    assert (summary["sequences_waiting"], summary["sequences_missing"]) == (0, 0)
    assert (again.folder / "ledger.json").exists()
    assert recorded_once(again, "paris", "lyon") == list(range(12))
    assert len(flush_digests(again)) == 1
    log = sqlite3.connect(again.folder / "coordinator" / "coordinator.sqlite")
    kinds = [row[0] for row in log.execute("SELECT kind FROM events")]
    assert kinds.count("Enrolled") == kinds.count("Ready") == 2, "nobody had to come back"
    assert not {"Gone", "Resumed"} & set(kinds)
    # The wrong command names the right one.
    over = forge.command(workshop, "restarted", "coordinator", *words)
    assert over.wait() == 1
    assert "this run is finished" in over.printed()


def test_a_stopped_run_is_resumed_and_not_gone_on_with(workshop: Workshop, forge: Forge) -> None:
    words = workshop.run_file("stopped", *SMALL)
    run = coordinate(forge, workshop, "stopped", *words)
    run.interrupt()
    assert run.wait() == 130, run.output()
    again = forge.command(workshop, "stopped", "coordinator", *words)
    assert again.wait() == 1
    assert "its run is stopped (interrupted at the coordinator); add --resume" in again.printed()
    assert again.printed().count("\n") == 1


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sites_leave_when_their_round_is_done(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=2000", "checkpoint.every_rounds=0", "site.stages=1")
    words = workshop.run_file("leaving", *sets)
    run = coordinate(forge, workshop, "leaving", *words)
    sites = join_all(forge, workshop, run)
    run.until_round(1)
    said = forge.command(workshop, "leaving", "leave", str(run.folder), "--site", "lyon")
    assert said.wait() == 0, said.output()
    told = re.fullmatch(r"site lyon leaves before round (\d+), "
                        r"after finishing all earlier rounds\n", said.printed())  # fmt: skip
    assert told, said.printed()
    first_without = int(told[1])
    assert sites["lyon"].wait() == 0, sites["lyon"].output()
    run.until(lambda: "lyon is gone: asked to leave, and done" in run.printed())
    run.until_round(first_without + 1)
    lyon = [record["round"] for record in run.records("round", "lyon")]
    assert lyon == list(range(first_without)), "it finished what was planned for it"
    # Nothing was begun again: all that lyon owed was decided before it went.
    assert "begins attempt" not in run.printed()
    paris = {r["round"]: r["contributors"] for r in run.records("round", "paris")}
    assert [paris[r] for r in range(first_without)] == [2] * first_without
    # It may come back, and goes again when it gets a SIGTERM.
    again = forge.command(workshop, "leaving", *join_lines(run)["lyon"])
    run.until(lambda: run.printed().count("lyon contributes from round") == 2)
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == 130, again.output()
    assert "site lyon leaves before round" in again.printed()
    run.until(lambda: run.printed().count("lyon is gone: asked to leave, and done") == 2)
    # The last one cannot go without the run: that stops, and can be resumed.
    sites["paris"].interrupt()
    assert sites["paris"].wait() == 130, sites["paris"].output()
    assert run.wait() == 130, run.output()
    assert "stopping at slot" in run.printed()
    assert run.summary()["reason"] == "paris, the only active site, is to leave"
    wrong = forge.command(workshop, "leaving", "leave", str(run.folder), "--site", "lyon")
    assert wrong.wait() == 1
    assert wrong.printed().count("\n") == 1


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_used(
    workshop: Workshop, forge: Forge
) -> None:
    # So many that the stop comes before the end on a fast machine, too.
    sets = ("outer.rounds=16", "checkpoint.every_rounds=1", "site.stages=1")
    run = forge.train(workshop, "damaged", *sets, flags=())
    run.until_round(3)
    run.interrupt()
    assert run.wait() == 130, run.output()
    paris = sorted((run.folder / "checkpoints").glob("tick-*/paris/*/write-*/*.distcp"))
    ticks = [int(path.parents[3].name.removeprefix("tick-")) for path in paris]
    os.truncate(paris[-1], 100)
    resumed = forge.train(workshop, "damaged", *sets, flags=("--resume",))
    assert resumed.wait() == 0, resumed.output()
    assert f"{paris[-1].name}: missing or changed since it was written" in resumed.printed()
    slots = re.findall(r"resumed at round \d+ slot \d+", resumed.printed())
    assert f"checkpoint at slot {ticks[-1]} is spoiled" in resumed.printed()
    assert len(slots) == 2
    assert [r["round"] for r in resumed.records()][-1] == 15
    assert resumed.summary()["rounds"] == 16
    assert len(flush_digests(resumed)) == 1
