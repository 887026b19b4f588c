"""Worker processes shared by all tests of the site room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worker_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
