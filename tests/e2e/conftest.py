"""One workshop (corpus and token files) for all real runs of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.harness import Workshop, write_corpus

if TYPE_CHECKING:
    from tests.support.forked import Forge


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """One interpreter that the processes of a session are forked from."""
    from tests.support.forked import (
        Forge,  # torch and transformers: seconds that others need not wait
    )

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
