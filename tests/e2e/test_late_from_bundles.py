"""A site that comes later takes its first state from the published bundles of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forge import Forge
from tests.support.harness import Run, Workshop, verdicts

pytestmark = [pytest.mark.slow, pytest.mark.stops]
# On a link declared as slow a donor's transfer is expected to take minutes.
SETS = (
    "outer.rounds=300", "checkpoint.every_rounds=0", "outer.fragments=2", "site.stages=2",
    "compression.codec=int4", "control.link=100kbit", "evaluation.every_rounds=0",
)  # fmt: skip


def late_site(
    workshop: Workshop, forge: Forge, name: str, url: str, publishing: bool
) -> tuple[Run, str]:
    """A run whose second site is lost and comes back with `record.published`; its log."""
    run = workshop.start(name, *SETS)
    run.until(lambda: len(run.records("round")) >= 3)
    for rank, process in run.rank_processes().items():
        if rank.startswith("lyon"):
            os.kill(process, signal.SIGKILL)
    run.until(lambda: "lyon is gone" in run.printed())
    command = [sys.executable, "-m", "dilocox", "publish", str(run.folder), "--to", url]
    once = subprocess.run([*command, "--every", "1"], check=True, capture_output=True, text=True)
    assert "the run goes on" in once.stdout
    publisher = None
    if publishing:
        follow = [*command, "--every", "1", "--follow"]
        publisher = subprocess.Popen(follow, stdout=subprocess.DEVNULL)
    try:
        endpoint = json.loads((run.folder / "coordinator" / "endpoint.json").read_text())
        file, *overrides = workshop.run_file(run.folder.name, *SETS, f"record.published={url}")
        joined = forge.command(
            workshop, f"{name}-late", "join", endpoint["url"].removeprefix("https://"),
            "--site", "lyon", "--run-file", file, *overrides,
            "--token-file", str(run.folder / "coordinator" / "tokens" / "lyon"),
        )  # fmt: skip
        run.until(lambda: run.printed().count("lyon contributes from round") == 2)
    finally:
        if publisher is not None:
            publisher.terminate()
            publisher.wait()
    assert joined.wait() == 0, joined.output()
    assert run.wait() == 0, run.output()
    assert run.records("round")[-1]["sites"] == 2
    assert verdicts(run.folder) == {}
    logs = [path.read_text() for path in (run.folder / "logs").glob("*lyon*")]
    return run, "".join(logs)


def test_a_late_site_starts_from_the_bundles(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    run, log = late_site(workshop, forge, "from-bundles", f"file://{tmp_path}/public", True)
    # Each of the two ranks.
    assert log.count("2 pieces are replayed from file://") == 2
    assert log.count("2 pieces are those of paris") == 2
    assert "the state comes from a donor" not in log + run.printed()


def test_bundles_that_are_behind_are_left_for_the_donor(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    run, log = late_site(workshop, forge, "behind", f"file://{tmp_path}/public", False)
    assert "the state comes from a donor, not from published bundles: they would take" in log
    assert "pieces are replayed" not in log
    assert run.printed().count("the state comes from a donor") == 1
