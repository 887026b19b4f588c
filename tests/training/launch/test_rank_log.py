"""A rank's log has all that its process writes, whatever its parent has made of the output."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dilocox.training.builder import RankPlace
from dilocox.training.launch.rank_job import RankJob
from dilocox.training.launch.rank_log import flight_records, set_up_log

pytestmark = pytest.mark.waits


def _writes(file: Path, owns: bool) -> None:
    job = SimpleNamespace(log_file=file, debug=False)
    if owns:
        # Once nothing refers to it, it closes the descriptor.
        sys.stdout = os.fdopen(os.dup2(os.dup(1), 1), "w", buffering=1)
    set_up_log(cast(RankJob, job))
    print("a line, \udc80")
    print("an error", file=sys.stderr)
    logging.getLogger("x").info("a message")
    os.write(1, b"from a library\n")


@pytest.mark.parametrize(("captured", "owns"), [(True, False), (False, False), (False, True)])
def test_a_rank_writes_to_its_log_where_output_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool, owns: bool
) -> None:
    """As in a notebook: `sys.stdout` has no file descriptor, and a forked rank inherits that."""
    if captured:
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    file = tmp_path / "logs" / "rank.log"
    rank = multiprocessing.get_context("fork").Process(target=_writes, args=(file, owns))
    rank.start()
    rank.join(30)
    assert rank.exitcode == 0
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "a line, \\udc80"
    assert lines[1] == "an error"
    assert lines[2].endswith("INFO x: a message")
    assert lines[3] == "from a library"


@pytest.mark.parametrize("started_here", [True, False])
def test_flight_records_lie_beside_the_log(tmp_path: Path, started_here: bool) -> None:
    """Ranks that a cluster started have no log of their own, but a run folder."""
    log = tmp_path / "site" / "logs" / "lyon-stage1-shard2.log"
    job = SimpleNamespace(
        log_file=log if started_here else None,
        config=SimpleNamespace(folder=tmp_path / "run"),
        place=RankPlace("lyon", 1, 2),
    )
    found = flight_records(cast(RankJob, job))
    folder = log.parent if started_here else tmp_path / "run" / "logs"
    assert found == folder / "lyon-stage1-shard2-nccl-"
