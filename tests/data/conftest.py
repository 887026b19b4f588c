"""One small corpus and its token files, prepared once for the whole room."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dilocox.config.data import DataSection
from dilocox.data import TokenFiles, prepare

WORDS = [
    *("river", "stone", "over", "under", "light", "paper", "train", "model", "layer", "token"),
    *("site", "round", "slot", "merge", "north", "window", "garden", "copper"),
]


def story(number: int, words: int = 120) -> str:
    """A text of its own for every number."""
    draw = random.Random(number)
    return f"Story {number}. " + " ".join(draw.choice(WORDS) for _ in range(words)) + ".\n"


def write_corpus(folder: Path, documents: int = 40) -> Path:
    """A folder of text files."""
    for number in range(documents):
        path = folder / f"part{number % 3}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(story(number), encoding="utf-8")
    return folder


def section(source: str | Path | list[str] | None, **changes: object) -> DataSection:
    """A `[data]` section for small corpora."""
    given: dict[str, object] = {
        "source": str(source) if isinstance(source, Path) else source,
        "vocabulary_size": 300,
        "sequence_length": 16,
        "validation_fraction": 0.1,
    }
    return DataSection.model_validate(given | changes)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def files(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    """Read-only: tests that change files take `copy`."""
    return prepare(section(corpus), tmp_path_factory.mktemp("files") / "data", seed=0)


@pytest.fixture
def copy(files: TokenFiles, tmp_path: Path) -> TokenFiles:
    """The same token files in a folder that may be spoilt."""
    shutil.copytree(files.folder, tmp_path / "copy")
    return TokenFiles.open(tmp_path / "copy")
