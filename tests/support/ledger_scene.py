"""A registered run on a chain of its own accounts, for tests of `RunLedger`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from eth_account.signers.local import LocalAccount

from dilocox.record.log.merkle import consistency_proof, leaf_hash, root_of
from dilocox.tools.settlement.claims_tree import AuditorsTree, ClaimsTree
from dilocox.tools.settlement.ledger import Ledger, RefusedError, Sent, deploy, run_id
from tests.support.chains import ETHER, Chain, account_of

WINDOW = 1000
"""Seconds."""
AUDITORS, QUORUM = 5, 3
MANIFEST = hashlib.sha256(b"run file").digest()
LEAVES = [leaf_hash(b"statement %d" % number) for number in range(64)]
"""Leaf hashes of a log; tests anchor its prefixes."""


def root(size: int, leaves: Sequence[bytes] = LEAVES) -> bytes:
    """Root of a log's first `size` statements."""
    return root_of(leaves[:size])


def proof(earlier: int, size: int, leaves: Sequence[bytes] = LEAVES) -> list[bytes]:
    """Consistency proof of two prefixes of a log; empty from an empty one."""
    return consistency_proof(leaves[:size], earlier) if earlier else []


@dataclass
class LedgerScene:
    """A deployed contract, one registered run, and everybody's view of the contract."""

    chain: Chain
    address: str
    log: str
    """Id of the run's log, hex."""
    pool: int = 10 * ETHER
    stake: int = ETHER
    gas: dict[str, int] = field(default_factory=dict)
    """Gas of the last transaction of each function."""
    _ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Everybody's view, by name."""

    @classmethod
    def on(cls, chain: Chain, address: str, name: str, **values: Any) -> LedgerScene:
        """Register the run of a log named `name`; its owner stakes."""
        scene = cls(chain, address, hashlib.sha256(name.encode()).hexdigest(), **values)
        scene.register()
        scene.send("owner", "stake", scene.run, value=scene.stake)
        return scene

    def register(self) -> None:
        self.send("owner", "register", *self.parameters, value=self.pool)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Arguments of `register`."""
        auditors = self.auditors_tree.root
        return bytes.fromhex(self.log), MANIFEST, WINDOW, self.stake, auditors, QUORUM

    @property
    def run(self) -> bytes:
        return run_id(self.who("owner").address, self.log)

    @property
    def state(self) -> dict[str, Any]:
        """All that the contract keeps about the run, by name."""
        return self.ledger("owner").state(self.run)

    def who(self, name: str) -> LocalAccount:
        return account_of(name)

    def ledger(self, name: str) -> Ledger:
        if name not in self._ledgers:
            self._ledgers[name] = Ledger(self.chain.web3, self.address, self.who(name))
        return self._ledgers[name]

    def send(self, name: str, function: str, *arguments: Any, value: int = 0) -> Sent:
        """Send a transaction of `name`."""
        self.chain.funded(name)
        sent = self.ledger(name).send(function, *arguments, value=value)
        self.gas[function] = sent.gas
        return sent

    def refused(
        self, reason: str, name: str, function: str, *arguments: Any, value: int = 0
    ) -> None:
        """Check that the contract refuses a transaction of `name` with the error `reason`."""
        with pytest.raises(RefusedError) as caught:
            self.send(name, function, *arguments, value=value)
        assert caught.value.reason == reason, caught.value

    def call(self, function: str, *arguments: Any) -> Any:
        return self.ledger("owner").call(function, *arguments)

    def anchor(self, size: int, leaves: Sequence[bytes] = LEAVES) -> None:
        """Anchor the first `size` statements of the log."""
        earlier = self.state["size"]
        proven = proof(earlier, size, leaves)
        self.send("owner", "anchor", self.run, size, size, root(size, leaves), proven)

    def settle(self, amounts: dict[str, int], wait: bool = True) -> ClaimsTree:
        """Settle amounts by name on the newest head; wait until they can be claimed."""
        tree = self.claims(amounts)
        self.send("owner", "settle", self.run, self.state["size"], tree.root)
        if wait:
            self.chain.advance(WINDOW + 1)
        return tree

    def claims(self, amounts: dict[str, int]) -> ClaimsTree:
        return ClaimsTree(self.run, {self.who(name).address: n for name, n in amounts.items()})

    def claim(self, tree: ClaimsTree, name: str, amount: int) -> tuple[Any, ...]:
        """Arguments of `claim`."""
        address = self.who(name).address
        return self.run, address, amount, tree.proof(address)

    @property
    def auditors(self) -> list[LocalAccount]:
        """In ascending order of addresses, as votes are."""
        accounts = [self.who(f"auditor {n}") for n in range(AUDITORS)]
        return sorted(accounts, key=lambda each: int(each.address, 16))

    @property
    def auditors_tree(self) -> AuditorsTree:
        return AuditorsTree(each.address for each in self.auditors)

    def votes(
        self, signers: Sequence[LocalAccount], kind: str, **values: Any
    ) -> list[tuple[bytes, list[bytes]]]:
        """Votes of auditors on a message about this run."""
        domain, tree = self.ledger("owner").domain, self.auditors_tree
        return [
            (domain.sign(each, kind, run=self.run, **values), tree.proof(each.address))
            for each in signers
        ]

    def signed(self, name: str, kind: str, **values: Any) -> bytes:
        """Sign a message about this run."""
        return self.ledger("owner").domain.sign(self.who(name), kind, **{"run": self.run, **values})

    def two_commits(self, name: str, round_: int = 3) -> tuple[Any, ...]:
        """Arguments of `slashEquivocated`: two roots of one round, both signed."""
        return (round_, *self._two(name, "Commit", round=round_))

    def two_heads(self, name: str, size: int = 8) -> tuple[Any, ...]:
        """Arguments of `slashForked`: two heads of one size, both signed."""
        return (size, *self._two(name, "Head", size=size))

    def _two(self, name: str, kind: str, **values: Any) -> tuple[Any, ...]:
        roots = (b"\1" * 32, b"\2" * 32)
        signed = [(each, self.signed(name, kind, root=each, **values)) for each in roots]
        return tuple(part for pair in signed for part in pair)

    def owed(self) -> int:
        """Wei that the contract owes: the pool, stakes and credits of everybody here."""
        names = ["owner", "site", "lazy", "thief", "late", "challenger"]
        addresses = [self.who(each).address for each in names]
        stakes = sum(self.call("stakes", self.run, each)[0] for each in addresses)
        credited = sum(self.call("balanceOf", each) for each in addresses)
        return int(self.state["pool"] + stakes + credited)


def deployed(chain: Chain) -> str:
    """Deploy a contract; return its address."""
    address = deploy(chain.web3, chain.funded("owner")).contract
    assert address is not None
    return address
