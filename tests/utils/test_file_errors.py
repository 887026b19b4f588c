"""Lines on files that cannot be used, and names that are folders."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dilocox.utils.file_errors import file_problem, names_folder


def test_the_systems_own_errors_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place, said in (
        (tmp_path, "cannot be used (Is a directory); it is a folder, so name a file"),
        (tmp_path / "none", "cannot be used (No such file or directory); check its name"),
        (tmp_path / "file" / "x", "cannot be used (Not a directory); a part of its path is a file"),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - each of its kinds
            place.read_text()
        told = file_problem(caught.value)
        assert told is not None
        assert told.startswith(f"{place}: {said}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no file"),
        OSError("no number"),
        OSError(errno.EIO, "Input/output error", "/x"),
        PermissionError(errno.EACCES, "Permission denied"),
        PermissionError(errno.EACCES, "Permission denied", 7),
    ],
)
def test_what_names_no_file_or_has_no_mend_is_left_to_others(error: Exception) -> None:
    assert file_problem(error) is None


def test_names_of_folders() -> None:
    for place in ("/srv/model", "~/model", "./model", "..", "a/b/c"):
        assert names_folder(place)
    for place in ("model", "Qwen/Qwen3-0.6B", ""):
        assert not names_folder(place)
