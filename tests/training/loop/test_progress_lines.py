"""Where a user's program shows the lines about its site."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from dilocox.training.loop.progress_lines import ProgressLines


def program_of(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the logger as a program without handlers has it, and with no handlers of pytest.

    Called within a test: pytest adds its handlers after the fixtures.
    """
    logger = logging.getLogger("dilocox.site")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    return logger


def test_lines_go_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = program_of(monkeypatch)
    ProgressLines()("round   0\x1b[2J")
    assert capsys.readouterr() == ("", "round   0\N{REPLACEMENT CHARACTER}[2J\n")
    assert program.handlers == []


def test_a_quiet_site_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program_of(monkeypatch)
    ProgressLines(quiet=True)("round   0")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_program_with_handlers_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    program = program_of(monkeypatch)
    text = io.StringIO()
    program.addHandler(logging.StreamHandler(text))
    ProgressLines(quiet)("below its level")
    program.setLevel(logging.INFO)
    try:
        ProgressLines(quiet)("100% shown")
    finally:
        program.setLevel(logging.NOTSET)
    assert text.getvalue() == "100% shown\n"
    assert capsys.readouterr() == ("", "")


def test_a_closed_standard_error_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program_of(monkeypatch)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    ProgressLines()("round   0")
