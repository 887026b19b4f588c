"""The folder of a run that is published: when it has ended."""

from __future__ import annotations

import os
from pathlib import Path

from dilocox.record.log.run_end import mark_start
from dilocox.record.writer.one_writer import held
from dilocox.tools.storage.run_source import RunSource
from dilocox.training.launch import verdict_hand_in


def test_a_run_has_ended_though_a_verdict_is_handed_in_later(run: Path) -> None:
    source = RunSource(run)
    assert not source.has_ended(set())
    (run / "summary.json").write_text('{"reason": "stopped"}')
    os.utime(run / "record" / "log.pub", (1.0, 1.0))
    assert source.has_ended(set())
    verdict_hand_in._own(run)(None)
    assert source.has_ended(set())
    with held(run / "coordinator"):
        assert not source.has_ended(set()), "a coordinator starts"
    mark_start(run)
    assert not source.has_ended(set()), "it was resumed, and has left no summary"
