"""How an account drops transactions that no block takes, so that later ones are sent again."""

from __future__ import annotations

from dilocox.errors import SettlementError
from dilocox.tools.settlement.ledger import check_balance, one_line
from dilocox.tools.settlement.resending import Signed, fees
from dilocox.tools.settlement.run_on_chain import Desk


def cancel(desk: Desk) -> list[str]:
    """Replace the account's open transactions by empty ones of the same numbers, with higher fees.

    A block takes either, and only one. It can be repeated.

    Raises `SettlementError` if the fee is too high or cannot be paid, or if the chain refuses or
    fails.
    """
    chain = desk.ledger.chain  # raises if the server is of another chain
    with desk.journal.only_here():
        groups = desk.journal.groups()
        with one_line("cancel"):
            count = desk.ledger.web3.eth.get_transaction_count
            used = int(count(desk.account.address, "latest"))
            for group in groups.values():
                if group[-1].number >= used:
                    _replace(desk, group[-1])
        finished = desk.journal.catch_up(desk.ledger.web3, desk.account, desk.ledger.fee)
        # Nobody repeats a command for an empty transaction.
        desk.journal.told(each for each in finished if not each.function)
    counted = {each.number: each for each in finished if each.function}
    lines = [
        f"{group[0].text}: " + ("a block has taken it" if number in counted else "dropped")
        for number, group in groups.items()
    ]
    return lines or [f"no transaction of {desk.account.address} on chain {chain} is open here"]


def _replace(desk: Desk, stuck: Signed) -> None:
    """Sign and keep an empty transaction in place of another one; `catch_up` sends it."""
    web3, own = desk.ledger.web3, desk.account.address
    gas = int(web3.eth.estimate_gas({"from": own, "to": own, "value": 0}))
    empty = stuck.emptied(desk.account, gas, *fees(web3), desk.ledger.fee)
    if empty is None:
        raise SettlementError(f"{stuck.text}: has the form of an old chain, and is not replaced")
    check_balance(web3, own, empty.most)
    desk.journal.keep(empty.hash, empty.raw)
