"""Entries that stay on the disk read as those in memory do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.entries import FileEntries

line = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(line, max_size=8), st.integers(-9, 9), st.integers(-9, 9), st.integers(-3, 9))
def test_they_are_as_a_list(
    tmp_path: Path, lines: list[str], start: int, stop: int, after: int
) -> None:
    path = tmp_path / "log"
    path.write_bytes("".join(f"{each}\n" for each in lines).encode())
    found = FileEntries(path)
    assert (len(found), list(found)) == (len(lines), lines)
    assert found == lines
    part = found[start:stop]
    assert list(part) == lines[start:stop]
    assert list(part[after:]) == lines[start:stop][after:]
    for number in range(len(lines)):
        assert found[number] == lines[number]
        assert found[-1 - number] == lines[-1 - number]
    with pytest.raises(IndexError):
        found[len(lines)]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(RecordError, match="missing; was this run recorded"):
        FileEntries(path)
    path.write_text("one\ntwo")
    with pytest.raises(RecordError, match="cut short"):
        FileEntries(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(RecordError, match="cannot be read"):
        FileEntries(path)
    path.write_text("one\ntwo\n")
    found = FileEntries(path)
    path.write_text("one\n")
    with pytest.raises(RecordError, match="cut while it was read"):
        list(found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(line, max_size=6), st.integers(0, 8), st.sampled_from(["", "no en"]))
def test_the_beginning_of_a_file_that_is_being_written(
    tmp_path: Path, lines: list[str], most: int, rest: str
) -> None:
    path = tmp_path / "log"
    path.write_bytes(("".join(f"{each}\n" for each in lines) + rest).encode())
    found = FileEntries.covered(path, most)
    assert (len(found), list(found)) == (min(most, len(lines)), lines[:most])
