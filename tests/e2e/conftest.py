"""One workshop (corpus and token files) for all real runs of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.forge import Forge
from tests.support.harness import Workshop, write_corpus


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """One interpreter that the processes of a session are forked from."""
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture(scope="session")
def shared_workshop(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Workshop:
    root = tmp_path_factory.mktemp("runs")
    return Workshop(root, write_corpus(root), forge)


@pytest.fixture
def workshop(shared_workshop: Workshop) -> Iterator[Workshop]:
    yield shared_workshop
    shared_workshop.end_all()
