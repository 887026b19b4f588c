"""A run that is published into 0G Storage on this machine, with servers that fail as told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eth_account.signers.local import LocalAccount

from dilocox.record.bundles.zerog_node import ZerogUrl
from dilocox.tools.storage.publisher import Publisher
from dilocox.tools.storage.run_source import RunSource
from dilocox.tools.storage.uplink import Uplink
from dilocox.tools.storage.zerog_destination import ZerogAccess, ZerogDestination
from tests.support.chains import Chain
from tests.support.zerog_network import RpcServer, StorageNode, answers_of, deploy_flow

MOST = 10**17
"""Wei that a transaction may cost."""


class Cut:
    """Ends connections after some calls, before a call is done or when its answer is under way."""

    def __init__(self, answer: Callable[[str, list[Any]], Any]) -> None:
        self._answer = answer
        self.left: int | None = None
        """Calls that still work; None: all."""
        self.after = False
        self.change: Callable[[str, Any], Any] = lambda method, said: said
        """Changes answers."""

    def __call__(self, method: str, params: list[Any]) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                if self.after and self.left == -1:
                    self._answer(method, params)
                raise ConnectionResetError
        return self.change(method, self._answer(method, params))


@dataclass
class Network:
    """A chain, the contracts, a node, and servers of both that can fail."""

    chain: Chain
    flow: Any
    node: StorageNode
    asked: Cut
    """Calls to the node."""
    rpc: Cut
    """Calls to the chain's server; unused on anvil."""
    ports: dict[str, int]
    chain_url: str
    said: list[str] = field(default_factory=list)
    """Lines that destinations have told."""

    def destination(self, run: Path, who: LocalAccount, **places: Any) -> ZerogDestination:
        url = ZerogUrl.parse(places.get("url", f"zerog://127.0.0.1:{self.ports['node']}"))
        rpc, fee = places.get("rpc", self.chain_url), places.get("fee", MOST)
        access = ZerogAccess(url, rpc, self.flow.address, who, fee)
        return ZerogDestination(access, run / "coordinator", seconds=2.0, tell=self.said.append)

    def publisher(self, run: Path, who: LocalAccount, **places: Any) -> Publisher:
        """A fresh publisher, as a new process has it."""
        return Publisher(RunSource(run), self.destination(run, who, **places), 1, Uplink(None))

    def submissions(self, who: LocalAccount) -> list[Any]:
        """Events of all submissions of an account."""
        return list(
            self.flow.events.Submit().get_logs(
                from_block=0, argument_filters={"sender": who.address}
            )
        )

    def balance(self, who: LocalAccount) -> int:
        return int(self.chain.web3.eth.get_balance(who.address))


@contextmanager
def network_on(chain: Chain) -> Iterator[Network]:
    """A network with contracts of its own on a chain."""
    flow = deploy_flow(chain)
    node = StorageNode(flow)
    asked, rpc = Cut(node.call), Cut(answers_of(chain))
    servers = {"node": RpcServer(asked), "rpc": RpcServer(rpc)}
    ports = {name: each.port for name, each in servers.items()}
    url = chain.url or f"http://127.0.0.1:{ports['rpc']}"
    yield Network(chain, flow, node, asked, rpc, ports, url)
    for each in servers.values():
        each.close()
