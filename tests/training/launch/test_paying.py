"""A site pays after every check of its machine, and when the coordinator would admit it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import installed_versions
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.errors import SettlementError
from dilocox.training.launch import local
from dilocox.training.launch.supervisor import Ended
from tests.support.process_starts import config, prepared, refusal
from tests.support.served_run import Run

pytestmark = pytest.mark.waits


def small(root: Path, **sections: Any) -> RunConfig:
    network = {"heartbeat": 0.2, "link_timeout": 5.0}
    return config(root, network=network, control={"adapt": "off"}, **sections)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files, shared by the tests of this module."""
    return prepared(tmp_path_factory.mktemp("paying"))


@pytest.fixture
def run(place: Path) -> RunConfig:
    return small(place)


@pytest.fixture
def served(tmp_path: Path, run: RunConfig) -> Iterator[Run]:
    found = Run(tmp_path / "coordinator", config=run)
    yield found
    found.close()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the site has done; it does not train."""
    found: list[str] = []

    def keep_site(*_: object) -> Ended:
        found.append("joined")
        return Ended(0)

    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local, "keep_site", keep_site)
    return found


def join(run: RunConfig, url: str, token: str, done: list[str], **options: Any) -> int:
    """Join as paris, with a deposit that is noted in `done`."""
    endpoint = Endpoint.at(url, "paris", token)
    deposit = options.pop("deposit", lambda: done.append("paid"))
    return local.join(run, site="paris", endpoint=endpoint, debug=False, deposit=deposit)


def test_a_site_pays_once_it_would_be_admitted_and_then_joins(
    run: RunConfig, served: Run, done: list[str]
) -> None:
    before = served.core.state.sites["paris"].role
    assert join(run, served.url, served.token("paris"), done) == 0
    assert done == ["paid", "joined"]
    assert served.core.state.sites["paris"].role == before, "asking changes nothing"


def test_a_site_that_cannot_pay_does_not_join(run: RunConfig, served: Run, done: list[str]) -> None:
    def deposit() -> None:
        raise SettlementError("the pool is empty")

    said = refusal(join, run, served.url, served.token("paris"), done, deposit=deposit)
    assert (said, done) == ("the pool is empty", [])


def test_nothing_is_paid_if_this_machine_is_not_ready(
    place: Path, tmp_path: Path, served: Run, done: list[str]
) -> None:
    token, nowhere = served.token("paris"), str(tmp_path / "nowhere")
    lost = small(place, data={"source": nowhere, "folder": nowhere})
    assert "nowhere" in refusal(join, lost, served.url, token, done)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = small(place, sites={"paris": {"ports": f"{port}-{port + 1}"}})
        assert str(port) in refusal(join, taken, served.url, token, done)
    assert done == []


def test_nothing_is_paid_if_the_coordinator_is_dead(run: RunConfig, done: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(join, run, address, str(JoinToken("0" * 64, "0" * 32)), done)
    assert address in said
    assert done == []


def test_nothing_is_paid_if_the_coordinator_would_refuse_the_site(
    place: Path, run: RunConfig, served: Run, done: list[str]
) -> None:
    other = small(place, outer={"rounds": 3})
    said = refusal(join, other, served.url, served.token("paris"), done)
    assert "its run file differs from this run's" in said
    assert "belongs to site lyon" in refusal(join, run, served.url, served.token("lyon"), done)
    served.enrol("lyon", stages=2, versions=installed_versions(), data_digest="0" * 64)
    said = refusal(join, run, served.url, served.token("paris"), done)
    assert "its token files differ from the first site's" in said
    assert done == []
