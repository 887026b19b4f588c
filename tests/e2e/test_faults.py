"""What goes wrong: interrupts, ranks that die or hang, full disks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.forge import Forge
from tests.support.harness import Workshop
from tests.support.mounting import need_mounts

pytestmark = pytest.mark.stops

LONG = ("outer.rounds=2000", "checkpoint.every_rounds=2", "site.stages=1")


# --- interrupts ----------------------------------------------------------------------------------


def test_ctrl_c_in_a_terminal(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "interrupted", *LONG)
    run.until_round(1)
    run.ctrl_c()
    assert run.wait() == 130, run.output()
    assert "the same command with --resume goes on" in run.last_line()
    assert not run.left_behind()
    # A second one ends it at once, whatever it is doing, and leaves the checkpoint whole.
    again = forge.train(workshop, "interrupted", *LONG, flags=("--resume",))
    again.until_round(len(run.records()) + 1)
    again.ctrl_c()
    again.until(lambda: "(again: at once)" in again.printed())
    began = time.monotonic()
    again.ctrl_c()
    assert again.wait() == 130, again.output()
    # Nothing is waited for, which has limits of a minute (link_timeout) and more.
    assert time.monotonic() - began < 30.0
    assert "Traceback" not in again.printed()
    assert set(again.left_behind().values()) <= {-signal.SIGKILL}
    # So does the death of the main process; nothing that it has started outlives it.
    killed = forge.train(workshop, "interrupted", *LONG, flags=("--resume",))
    killed.until(lambda: len(killed.rank_processes()) >= 5)
    killed.until(lambda: "running" in killed.printed())
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.wait(10.0) == -signal.SIGKILL
    assert set(killed.left_behind().values()) == {-signal.SIGKILL}
    whole = list((run.folder / "checkpoints").glob("tick-*/*/*/*/files.json"))
    assert len(whole) >= 2


# --- ranks ---------------------------------------------------------------------------------------


def test_a_dead_or_hanging_rank_takes_its_site_down_which_comes_back(
    workshop: Workshop, forge: Forge
) -> None:
    sets = ("outer.rounds=2000", "checkpoint.every_rounds=0")
    run = forge.train(workshop, "dead-rank", *sets)
    run.until_round(1)
    before = run.rank_processes()
    blows = ((signal.SIGKILL, "lyon-stage1-shard0 was killed (signal 9)"),
             (signal.SIGSTOP, "no beat from stage 1 shard 0 for 2.25 s"))  # fmt: skip
    for number, (blow, said) in enumerate(blows, start=1):
        os.kill(run.rank_processes()["lyon:1.0"], blow)
        began = time.monotonic()
        run.until(lambda said=said: f"lyon is gone: {said}" in run.printed())
        # After a heartbeat, and not the minute that a link may be silent; a busy machine may take
        # its time to look, and to print.
        assert time.monotonic() - began < 30.0
        run.until(
            lambda times=number + 1: run.printed().count("lyon contributes from round") == times
        )
        assert run.printed().count("dilocox: site lyon joins again in ") == number
        after = run.rank_processes()
        assert all(after[name] != before[name] for name in ("lyon:0.0", "lyon:1.0"))
        assert all(after[name] == before[name] for name in ("paris:0.0", "paris:1.0", "lyon"))
        # Until its ranks train, the first one may ask for a plan, and hear there that it is gone.
        trained = len(run.records("round", "lyon"))
        run.until(lambda trained=trained: len(run.records("round", "lyon")) > trained + 1)
    # A rank that hangs in a collective with the one that was stopped says where, and ends.
    log = (run.folder / "logs" / "lyon-stage0-shard0.log").read_text()
    assert "the training loop does not answer" in log
    alone = {r["round"] for r in run.records() if r["sites"] == 1}
    last = max(alone, default=0)
    run.until(lambda: any(r["round"] > last and r["sites"] == 2 for r in run.records()))
    run.ctrl_c()
    assert run.wait() == 130, run.output()
    assert not run.left_behind()
    paris = [r["round"] for r in run.records("round", "paris")]
    assert paris == list(range(len(paris))), "who was not hit lost no round"


# --- disks ---------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_training_goes_on(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    need_mounts(tmp_path)
    place = workshop.folder("full") / "checkpoints"
    sets = ("outer.rounds=4", "checkpoint.every_rounds=1", "checkpoint.hugging_face=true")
    try:
        run = forge.train(workshop, "full", *sets, hooks="small-disk")
        assert run.wait() == 0, run.output()
        said = re.findall(r"(paris|lyon): checkpoint after slot (\d+) was not", run.printed())
        assert int(said[0][1]) > 8, said
        assert "No space left on device" in run.printed()
        assert "Traceback" not in run.printed()
        assert [record["round"] for record in run.records()] == [0, 1, 2, 3]
        assert re.search(r"paris: .*model-tick-00000008", run.printed())
        assert (run.folder / "model-tick-00000016" / "config.json").exists()
        # The one before is whole, and what did not fit has been removed.
        whole = {file.parents[3].name for file in place.glob("tick-*/*/*/*/files.json")}
        assert "tick-00000008" in whole
        assert (run.folder / "model" / "config.json").exists()
    finally:
        subprocess.run(["umount", str(place)], check=False, capture_output=True)
