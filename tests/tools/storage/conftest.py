"""A run that the tests publish: an old one, committed, of which each test has a copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.nonsense_server import nonsense
from tests.support.older_record import unpacked

if TYPE_CHECKING:
    from eth_account.signers.local import LocalAccount
    from tests.support.zerog_scene import Network


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def nonsense_port() -> Iterator[int]:
    """Port of a web server that answers everything with success and something else."""
    with nonsense() as port:
        yield port


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A network of 0G Storage of its own; on anvil if a test asks for that."""
    from tests.support.chains import anvil, in_process
    from tests.support.zerog_scene import network_on

    from dilocox.tools.storage import zerog_destination

    monkeypatch.setattr(zerog_destination, "NODE_SECONDS", 0.5)
    monkeypatch.setattr(zerog_destination, "POLL", 0.01)
    on_anvil = getattr(request, "param", None) == "anvil"
    with anvil() if on_anvil else nullcontext(in_process()) as chain, network_on(chain) as found:
        yield found


@pytest.fixture
def who(network: Network) -> LocalAccount:
    """Who publishes."""
    return network.chain.funded("publisher")
