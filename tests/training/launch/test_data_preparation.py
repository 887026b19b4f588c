"""Token files before a start: those in the run's own folder are the run's, others are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import DataError
from dilocox.training.launch.data_preparation import prepare_data
from tests.data.conftest import story, write_corpus


def config(root: Path, **data: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "run", "folder": str(root / "{name}")},
            "model": {"architecture": {"model_type": "qwen3"}},
            "data": {"source": str(root / "corpus"), "vocabulary_size": 300,
                     "sequence_length": 16, "validation_fraction": 0.2, **data},
            "sites": {"paris": {}},
        }
    )  # fmt: skip


def test_overwriting_makes_token_files_again_that_do_not_fit(tmp_path: Path) -> None:
    corpus, lines = write_corpus(tmp_path / "corpus", documents=10), list[str]()
    display: Any = SimpleNamespace(step=lambda *_: None, step_done=lambda: None, line=lines.append)
    elsewhere = config(tmp_path, folder=str(tmp_path / "shared"))
    linked = config(tmp_path, folder=str(tmp_path / "run" / "linked"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "linked").symlink_to(tmp_path / "shared")
    own = config(tmp_path)
    first = [prepare_data(run, display).digest for run in (elsewhere, own)]
    assert prepare_data(own, display, overwrite=True).digest == first[1]
    assert lines == []
    (corpus / "more.txt").write_text(story(99))
    with pytest.raises(DataError, match="has changed since"):
        prepare_data(own, display)
    assert prepare_data(own, display, overwrite=True).digest != first[1]
    (line,) = lines
    assert line.startswith("token files were made again (--overwrite), because the earlier ones")
    assert line.endswith("has changed since these token files were made (+1 files)")
    for run in (elsewhere, linked):
        with pytest.raises(DataError, match=r"set data.folder to another folder or delete this"):
            prepare_data(run, display, overwrite=True)
