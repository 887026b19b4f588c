"""Joining a site's ranks by a store and under an existing launcher."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("launcher", [False, True], ids=["store", "launcher"])
def test_every_rank_finds_its_place(pool: Pool, tmp_path: Path, launcher: bool) -> None:
    place = str(tmp_path / "store")
    if launcher:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = str(probe.getsockname()[1])
    places = pool.run(
        4,
        "tests.support.site_model_cases",
        "joined",
        join=False,
        stages=2,
        shards=2,
        place=place,
        launcher=launcher,
    )
    assert places == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]


def test_collectives_of_a_replica_have_the_time_limit_of_the_site(
    pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(
        4,
        "tests.support.site_model_cases",
        "patience_of_replicas",
        join=False,
        place=str(tmp_path / "store"),
    )
    assert found == [(77.0, 77.0, 365 * 86400.0)] * 4
