"""Both chains that the contract is tested on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.chains import Chain
    from tests.support.ledger_scene import LedgerScene


@pytest.fixture(scope="module")
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    """The chain that a file's tests ask for; without a question, the one in this process."""
    from tests.support.chains import anvil, in_process

    if getattr(request, "param", None) == "anvil":
        with anvil() as found:
            yield found
    else:
        yield in_process()


@pytest.fixture(scope="module")
def address(chain: Chain) -> str:
    """Address of a deployed contract."""
    from tests.support.ledger_scene import deployed

    return deployed(chain)


@pytest.fixture
def scene_of(
    chain: Chain, address: str, request: pytest.FixtureRequest
) -> Callable[..., LedgerScene]:
    """Returns a registered run of its own, with other values of `LedgerScene` if given."""
    from tests.support.ledger_scene import LedgerScene

    def build(name: str = "", **values: Any) -> LedgerScene:
        return LedgerScene.on(chain, address, f"{request.node.name} {name}", **values)

    return build


@pytest.fixture
def scene(scene_of: Callable[..., LedgerScene]) -> LedgerScene:
    """A registered run of its own, whose owner has staked."""
    return scene_of()
