"""Coordinator and joins as separate commands, torchrun, and what may not join."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import PATIENT, Run, Workshop, verdicts

pytestmark = pytest.mark.runs

SETS = ("outer.rounds=3", "checkpoint.every_rounds=0", PATIENT)


def start_coordinator(
    workshop: Workshop, name: str, *sets: str, flags: tuple[str, ...] = ()
) -> tuple[Run, dict[str, str]]:
    """A coordinator, and its join line for each site."""
    arguments = ("coordinator", *workshop.run_file(name, *sets), *flags)
    run = workshop.forge.command(workshop, name, *arguments)
    run.until(lambda: run.printed().count("dilocox join") == 2)
    lines = re.findall(r"dilocox (join .* --site (\w+) .*)", run.printed())
    return run, {site: line for line, site in lines}


def join(workshop: Workshop, run: Run, line: str, *more: str) -> Run:
    return workshop.forge.command(workshop, run.folder.name, *line.split(), *more)


def test_printed_join_lines_make_the_same_run(workshop: Workshop) -> None:
    here = workshop.train("one-machine", *SETS)
    run, lines = start_coordinator(workshop, "joined", *SETS, flags=("--verbose",))
    sites = [join(workshop, run, line) for line in lines.values()]
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert run.wait() == 0, run.output()
    assert run.summary()["anchor_digest"] == here.summary()["anchor_digest"]
    assert (run.folder / "model" / "config.json").exists()
    assert verdicts(run.folder) == {}
    # The join lines are the first; asked for, time-outs follow, each derived from link_timeout.
    first, *rest = run.printed().splitlines()
    assert first.startswith("coordinator of run joined on ")
    assert any("link_timeout" in line for line in rest)


def test_who_may_not_join(workshop: Workshop) -> None:
    run, lines = start_coordinator(workshop, "closed", *SETS)
    line = lines["lyon"]
    address = line.split()[1]
    token = Path(line.split()[-1]).read_text().strip()
    assert token not in run.printed(), "the secret is in a file, not on the screen"
    wrong_token = token[:-4] + ("0000" if not token.endswith("0000") else "1111")
    for name, text in (("wrong", wrong_token), ("rubbish", "rubbish")):
        (workshop.root / name).write_text(text)
    refused = {
        "--set inner.learning_rate=0.5": "run file",
        "--set site.stages=1": "run file",
        "--site nowhere": "nowhere",
        f"--token-file {workshop.root}/wrong": "token: not a token of this run",
        f"--token-file {workshop.root}/rubbish": "token: not a join token",
    }
    processes = {more: join(workshop, run, line, *more.split()) for more in refused}
    unreachable = join(workshop, run, line.replace(address, "127.0.0.1:1"), "--set",
                       "network.link_timeout=5", "--set", "network.heartbeat=5")  # fmt: skip
    for more, process in processes.items():
        assert process.wait() == 1, process.printed()
        printed = process.printed().strip()
        assert refused[more] in printed, printed
        assert "Traceback" not in printed
        assert printed.count("\n") == 0, printed
    assert unreachable.wait() == 1
    assert "127.0.0.1:1" in unreachable.printed()
    # A name that is taken.
    first = join(workshop, run, lines["lyon"])
    run.until(lambda: "lyon enrolled" in run.printed())
    second = join(workshop, run, lines["lyon"])
    assert second.wait() == 1
    assert "lyon" in second.printed()
    assert "taken" in second.printed() or "already" in second.printed()
    # A member that is banned goes, and joins no more.
    ban = workshop.forge.command(
        workshop, run.folder.name, "leave", str(run.folder), "--site", "lyon", "--ban"
    )
    assert ban.wait() == 0, ban.output()
    assert "its join token is void" in ban.printed()
    assert first.wait() == 1, first.output()
    assert "site lyon: banned by the operator" in first.printed()
    assert "lyon is banned by the operator" in run.printed()
    run.interrupt()
    assert run.wait() == 130, run.output()


def test_ranks_of_a_launcher_join(workshop: Workshop) -> None:
    """By torchrun's variables. torchrun itself: below, and in test_signals.py."""
    run, lines = start_coordinator(workshop, "ranks", *SETS)
    other = join(workshop, run, lines["lyon"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [
        workshop.forge.command(
            workshop, "ranks", *lines["paris"].split(),
            environment={
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()
    assert other.wait() == 0, other.output()
    assert run.wait() == 0, run.output()
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"]


@pytest.mark.slow
def test_ranks_of_torchrun_join(workshop: Workshop) -> None:
    run, lines = start_coordinator(workshop, "launched", *SETS)
    other = join(workshop, run, lines["lyon"])
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        found = shutil.which("torchrun")
        if found is None:
            pytest.skip("torchrun is not installed beside this Python")
        torchrun = Path(found)
    command = [str(torchrun), "--nproc-per-node=2", "--standalone", "-m", "dilocox"]
    ranks = subprocess.run(
        [*command, *lines["paris"].split()],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr
    assert other.wait() == 0, other.output()
    assert run.wait() == 0, run.output()
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"]
