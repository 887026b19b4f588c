"""What goes wrong: values that are not finite, interrupts, ranks that die or hang, full disks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.forked import Forge, ForkedRun
from tests.e2e.harness import Workshop, verdicts

LONG = ("outer.rounds=2000", "checkpoint.every_rounds=2")
ONE_STAGE = ("site.stages=1", "checkpoint.every_rounds=1")


def last_line(run: ForkedRun) -> str:
    return run.printed().strip().splitlines()[-1]


# --- values that are not finite ------------------------------------------------------------------


def test_a_sick_round_is_dropped_and_the_run_goes_on(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "sick-once", "outer.rounds=4", hooks="sick-once")
    assert run.wait() == 0, run.output()
    culprit = "stage 0, shard 0: gradient of model.embed_tokens.weight"
    lyon = {record["round"]: record for record in run.records("round", "lyon")}
    assert [r for r, record in lyon.items() if record.get("dropped") == culprit] == [1]
    assert not any("dropped" in record for record in run.records("round", "paris"))
    # Left out of this round's exchanges only; the last of them lands in the next.
    assert [lyon[r]["contributors"] for r in range(4)] == [2, 1, 1, 2]
    # The loss is that of the steps that were taken; no round is missing.
    assert [record["round"] for record in run.records()] == [0, 1, 2, 3]
    assert all(3.0 < record["loss"] < 6.0 for record in run.records())
    said = f"lyon, round 1: {culprit} is not finite"
    assert said in run.printed()
    log = (run.folder / "logs" / "lyon-stage1-shard0.log").read_text()
    assert f"site {said}" in log
    digests = {r["anchor_digest"] for r in run.records("flush", "paris")}
    assert digests == {r["anchor_digest"] for r in run.records("flush", "lyon")}
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"] - 0.5
    assert verdicts(run.folder) == {}, "sets without it are replayed as well"


def test_two_sick_rounds_end_the_run_which_can_be_resumed(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=6", *ONE_STAGE)
    run = forge.train(workshop, "sick-twice", *sets, hooks="sick-twice")
    assert run.wait() == 1, run.output()
    assert "site lyon, round 3: stage 0, shard 0: gradient of model." in last_line(run)
    assert "second round in a row" in last_line(run)
    assert "Traceback" not in run.printed()
    assert not run.left_behind()
    healthy = forge.train(workshop, "sick-twice", *sets, flags=("--resume",))
    assert healthy.wait() == 0, healthy.output()
    assert healthy.summary()["rounds"] == 6
    # From the checkpoint after round 2 on, whose record of the sick round is not lost.
    dropped = [r["round"] for r in healthy.records("round", "lyon") if "dropped" in r]
    assert dropped == [2]
    assert [r["round"] for r in healthy.records()][-3:] == [3, 4, 5]


@pytest.mark.parametrize(
    ("hooks", "stages", "what"),
    [
        ("sick-alone", 1, "stage 0, shard 0: gradient of model.embed_tokens.weight"),
        ("poisoned-alone", 2, "stage 0: pseudo-gradient of model.embed_tokens.weight[9571]"),
    ],
)
def test_a_site_alone_ends_with_one_line(
    workshop: Workshop, forge: Forge, hooks: str, stages: int, what: str
) -> None:
    sets = ("outer.rounds=4", "checkpoint.every_rounds=1", f"site.stages={stages}")
    run = forge.train(workshop, hooks, *sets, hooks=hooks, sites=("paris",))
    assert run.wait() == 1, run.output()
    assert "site paris, round 1: " in last_line(run)
    assert f"{what} is not finite" in last_line(run)


def test_a_poisoned_pseudo_gradient_is_dropped(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "poisoned", "outer.rounds=4", hooks="poisoned")
    assert run.wait() == 0, run.output()
    dropped = {r["round"]: r["dropped"] for r in run.records("round", "lyon") if "dropped" in r}
    assert dropped == {1: "stage 0: pseudo-gradient of model.embed_tokens.weight[9571]"}
    assert all("loss" in record for record in run.records("round", "lyon"))


def test_synchronous_training_leaves_a_sick_site_out(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=4", *ONE_STAGE, "outer.method=allreduce", "outer.fragments=1",
            "outer.inner_steps=8")  # fmt: skip
    run = forge.train(workshop, "sick-synchronous", *sets, hooks="sick-once")
    assert run.wait() == 0, run.output()
    assert [r["round"] for r in run.records("round", "lyon") if "dropped" in r] == [1]
    paris = [r["anchor_digest"] for r in run.records("round", "paris")]
    assert paris == [r["anchor_digest"] for r in run.records("round", "lyon")]
    assert len(set(paris)) == 4


# --- interrupts ----------------------------------------------------------------------------------


def test_ctrl_c_in_a_terminal(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "interrupted", *LONG)
    run.until_round(1)
    run.ctrl_c()
    assert run.wait() == 130, run.output()
    assert "the same command with --resume goes on" in last_line(run)
    assert not run.left_behind()
    # A second one ends it at once, whatever it is doing, and leaves the checkpoint whole.
    again = forge.train(workshop, "interrupted", *LONG, flags=("--resume",))
    again.until_round(len(run.records()) + 4)
    again.ctrl_c()
    again.until(lambda: "(again: at once)" in again.printed())
    began = time.monotonic()
    again.ctrl_c()
    assert again.wait() == 130, again.output()
    assert time.monotonic() - began < 5.0
    assert "Traceback" not in again.printed()
    assert set(again.left_behind().values()) <= {-signal.SIGKILL}
    # So does the death of the main process; nothing that it has started outlives it.
    killed = forge.train(workshop, "interrupted", *LONG, flags=("--resume",))
    killed.until(lambda: len(killed.rank_processes()) >= 7)
    killed.until(lambda: "running" in killed.printed())
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.wait(10.0) == -signal.SIGKILL
    assert set(killed.left_behind().values()) == {-signal.SIGKILL}
    whole = list((run.folder / "checkpoints").glob("tick-*/*/*/*/files.json"))
    assert len(whole) >= 4


# --- ranks ---------------------------------------------------------------------------------------


def test_a_dead_or_hanging_rank_takes_its_site_down_which_comes_back(
    workshop: Workshop, forge: Forge
) -> None:
    sets = ("outer.rounds=2000", "checkpoint.every_rounds=0")
    run = forge.train(workshop, "dying", *sets)
    run.until_round(1)
    before = run.rank_processes()
    blows = ((signal.SIGKILL, "lyon-stage1-shard0 was killed (signal 9)"),
             (signal.SIGSTOP, "no beat from stage 1 shard 0 for"))  # fmt: skip
    for number, (blow, said) in enumerate(blows, start=1):
        os.kill(run.rank_processes()["lyon:1.0"], blow)
        began = time.monotonic()
        run.until(lambda said=said: f"lyon is gone: {said}" in run.printed())
        # The silence of a heartbeat, and the time it takes to print that on a busy machine.
        assert time.monotonic() - began < 2.5 + 2.5
        run.until(
            lambda times=number + 1: run.printed().count("lyon contributes from round") == times
        )
        assert run.printed().count("dilocox: site lyon joins again in ") == number
        after = run.rank_processes()
        assert all(after[name] != before[name] for name in ("lyon:0.0", "lyon:1.0"))
        assert all(after[name] == before[name] for name in ("paris:0.0", "paris:1.0", "lyon"))
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


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


def test_a_full_disk_is_reported_and_training_goes_on(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not may_mount(tmp_path):
        pytest.skip("mounting a small file system is not allowed here")
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
