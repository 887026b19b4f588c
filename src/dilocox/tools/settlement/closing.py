"""How an owner ends a run on a chain, and gets back what is left of its pool."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dilocox.errors import DilocoxError, SettlementError
from dilocox.tools.settlement.claims_tree import ClaimsTree
from dilocox.tools.settlement.ledger import coins
from dilocox.tools.settlement.run_on_chain import Desk, RunOnChain
from dilocox.tools.settlement.settling import accepted_root, known_run, owed_at, withdraw

WINDOWS = 4
"""Windows from `close` until the pool can be taken back."""


def close(desk: Desk, run: RunOnChain, folder: Path, unsettled: bool = False) -> list[str]:
    """Announce the end of a run, unless that is done.

    One window later the contract takes no settlement any more. A pending one that is vetoed after
    that, or amounts that were never settled, could not be paid.

    Args:
        desk: The owner's.
        run: The run.
        folder: The run's folder, with its record.
        unsettled: Close also if what the newest head owes is not settled and accepted.

    Raises:
        SettlementError: The newest head is not settled, or the chain refuses or fails.
    """
    with desk.opened():
        state = known_run(desk.ledger, run)
        if not state["closedAt"]:
            if not unsettled:
                _check_settled(desk, run, folder, state)
            desk.send("close", run.run)
            state = known_run(desk.ledger, run)
        last = int(state["closedAt"]) + int(state["window"])
        until = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        late = desk.ledger.now() > last
        return [
            f"the last settle {'was' if late else 'is'} possible at {until}",
            f"closed; dilocox chain reclaim gives the rest of the pool back in {_left(desk, run)} "
            "seconds",
        ]


def _check_settled(desk: Desk, run: RunOnChain, folder: Path, state: Mapping[str, Any]) -> None:
    """Raise `SettlementError` unless what the newest head owes is settled and accepted."""
    now = desk.ledger.now()
    left = int(state["pendingSince"]) + int(state["window"]) - now
    if int.from_bytes(state["pending"]) and left > 0:
        raise SettlementError(
            f"settlement {state['settlements']} can be vetoed for {left} seconds, and if it is, "
            "another one may come too late: close after that, or with --unsettled"
        )
    if not state["size"]:
        return
    try:
        owed = owed_at(folder, state["size"], state["root"])
    except DilocoxError as error:
        raise SettlementError(f"{error}; --unsettled closes all the same") from None
    if owed and ClaimsTree(run.run, owed).root != accepted_root(state, now):
        raise SettlementError(
            f"what the newest head of {state['size']} statements owes is not settled: dilocox "
            "chain settle first, as later it is too late; --unsettled closes all the same"
        )


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
