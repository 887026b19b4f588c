"""How an owner ends a run on a chain, and gets back what is left of its pool."""

from __future__ import annotations

from dilocox.errors import SettlementError
from dilocox.tools.settlement.ledger import coins
from dilocox.tools.settlement.run_on_chain import Desk, RunOnChain
from dilocox.tools.settlement.settling import known_run, withdraw

WINDOWS = 4
"""Windows from `close` until the pool can be taken back."""


def close(desk: Desk, run: RunOnChain) -> list[str]:
    """Announce the end of a run, unless that is done.

    Raises `SettlementError` if the chain refuses or fails.
    """
    with desk.opened():
        if not known_run(desk.ledger, run)["closedAt"]:
            desk.send("close", run.run)
        left = _left(desk, run)
        return [f"closed; dilocox chain reclaim gives the rest of the pool back in {left} seconds"]


def reclaim(desk: Desk, run: RunOnChain) -> list[str]:
    """Take back what is left of a closed run's pool, and withdraw all credit of the owner.

    Raises `SettlementError` if the run is not closed, if it was forked, or if the chain refuses or
    fails.
    """
    with desk.opened():
        state = known_run(desk.ledger, run)
        if not state["closedAt"]:
            raise SettlementError(f"run 0x{run.run.hex()} is not closed: dilocox chain close first")
        left = _left(desk, run)
        if left:
            return [f"sites can claim for {left} seconds; then run this again"]
        if not state["pool"]:
            return ["the pool is empty", *withdraw(desk)]
        desk.send("reclaim", run.run)
        return [f"reclaimed {coins(state['pool'])}", *withdraw(desk)]


def _left(desk: Desk, run: RunOnChain) -> int:
    """Return seconds until the pool of a closed run can be taken back; 0 if it can be now."""
    state = known_run(desk.ledger, run)
    free = int(state["closedAt"]) + WINDOWS * int(state["window"])
    return max(0, free - desk.ledger.now())
