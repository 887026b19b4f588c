"""A run that has ended is told from one that goes on, whoever opens its log later."""

from __future__ import annotations

import os
from pathlib import Path

from dilocox.record.log.run_end import has_summary, mark_start
from tests.support.witnessed import entries, write_log


def test_only_a_coordinators_start_takes_the_end_back(tmp_path: Path) -> None:
    write_log(tmp_path, entries(4))
    assert not has_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    os.utime(tmp_path / "record" / "log.pub", (1.0, 1.0))
    assert has_summary(tmp_path)
    write_log(tmp_path, entries(6))  # as a verdict that is handed in
    assert has_summary(tmp_path)
    mark_start(tmp_path)
    assert not has_summary(tmp_path)


def test_another_key_is_written(tmp_path: Path) -> None:
    write_log(tmp_path, entries(4))
    public = tmp_path / "record" / "log.pub"
    text = public.read_text()
    for other in ("", text[:-1], text + "x"):
        public.write_text(other)
        write_log(tmp_path, entries(4))
        assert public.read_text() == text
    public.unlink()
    write_log(tmp_path, entries(4))
    assert public.read_text() == text
