"""How a site or an owner puts down a stake, and takes it back. Every function can be repeated."""

from __future__ import annotations

from dilocox.config.run_config import RunConfig, digest_of
from dilocox.errors import SettlementError
from dilocox.tools.settlement.binding import UNBOUND, check_place
from dilocox.tools.settlement.contract_code import check_code
from dilocox.tools.settlement.ledger import Ledger, coins
from dilocox.tools.settlement.run_on_chain import Desk, RunOnChain
from dilocox.tools.settlement.settling import known_run, withdraw


def least_stake(ledger: Ledger, run: RunOnChain) -> int:
    """Return the run's least stake, wei, as its contract says.

    Raises `SettlementError` if the contract is another one than `RunLedger`, or does not know the
    run, or if the chain's server fails.
    """
    check_code(ledger)
    return int(known_run(ledger, run)["minStake"])


def check_run_file(ledger: Ledger, run: RunOnChain, config: RunConfig) -> list[str]:
    """Compare a run file with what the contract has; return a line if it names no contract.

    Raises `SettlementError` if the run file names another place, or if the run was registered with
    another run file.
    """
    terms = None if config.settlement is None else config.settlement.agreed()
    check_place(run, terms)
    found, own = known_run(ledger, run)["manifest"].hex(), digest_of(config.shared())
    if found != own:
        raise SettlementError(
            f"run 0x{run.run.hex()} was registered with the run file {found[:12]}…, this one is "
            f"{own[:12]}…: use the same file and the same --set options as the owner"
        )
    return [] if terms is not None and "contract" in terms else [UNBOUND]


def stake(desk: Desk, run: RunOnChain, amount: int) -> list[str]:
    """Stake what is missing until the account has a stake of `amount` wei.

    Raises `SettlementError` if the contract asks for more, or if the chain refuses or fails.
    """
    with desk.opened():
        least = known_run(desk.ledger, run)["minStake"]
        if amount < least:
            raise SettlementError(
                f"contract {run.contract} asks for a stake of {coins(least)}, more than "
                f"--amount, {coins(amount)}: nothing was staked"
            )
        before, leaving = desk.ledger.call("stakes", run.run, desk.account.address)
        missing = max(0, amount - before)
        if not missing and not leaving:
            return [f"{desk.account.address}: staked already, {coins(before)}"]
        if waiting := desk.ledger.waiting():
            raise SettlementError(
                f"{desk.account.address}: {waiting} transactions of another folder or program wait "
                "for a block, perhaps with this stake: nothing was staked; try again once a block "
                "has them"
            )
        desk.send("stake", run.run, value=missing)
    return [f"{desk.account.address}: staked, {coins(before + missing)}"]


def leave(desk: Desk, run: RunOnChain) -> list[str]:
    """Announce to leave, and take the stake back once it is free. Raises `SettlementError`."""
    with desk.opened():
        state = known_run(desk.ledger, run)
        amount, leaving = desk.ledger.call("stakes", run.run, desk.account.address)
        if not amount:
            return [f"{desk.account.address}: nothing is staked", *withdraw(desk)]
        if not leaving:
            desk.send("leaveRun", run.run)
            wait = 2 * state["window"]
            return [f"{desk.account.address}: leaving; run this again in {wait} seconds"]
        left = leaving + 2 * state["window"] - desk.ledger.now()
        if left > 0:
            return [f"{desk.account.address}: leaving; run this again in {left} seconds"]
        desk.send("withdrawStake", run.run)
        return [f"{desk.account.address}: has left with {coins(amount)}", *withdraw(desk)]
