"""A site stakes and enrols by the terms of a run, before it joins. It can be repeated."""

from __future__ import annotations

import json
import time
from pathlib import Path

from eth_account.signers.local import LocalAccount

from dilocox.config.run_config import RunConfig
from dilocox.config.terms import Terms
from dilocox.coordinator.client.stake_file import stake_file
from dilocox.coordinator.record_keys import RecordKey
from dilocox.errors import DilocoxError, SettlementError
from dilocox.tools.settlement.claims_tree import AuditorsTree
from dilocox.tools.settlement.contract_code import check_code
from dilocox.tools.settlement.enrolling import DAY, enrol, enrol_signer
from dilocox.tools.settlement.ledger import ServerFailedError, coins
from dilocox.tools.settlement.messages import Domain
from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, RunOnChain
from dilocox.tools.settlement.settling import known_run
from dilocox.tools.settlement.staking import check_run_file, stake

GWEI = 10**9
"""Wei."""
DAYS = 90
"""Days for which a site enrols."""
MILLION = 10**6


def stake_and_enrol(
    account: LocalAccount, place: Path, config: RunConfig, terms: Terms, site: str, key_file: Path
) -> list[str]:
    """Stake what the terms say, unless it is staked, and sign the site's key.

    A site that has enrolled before joins even if the chain's server is dead. The coordinator looks
    at the stake itself.

    Args:
        account: The site's account.
        place: `chain.json` of the run, or the folder of the run that has it.
        config: The run file, which has been compared with the terms.
        terms: The terms.
        site: Name of the site.
        key_file: File of the key with which the site signs in the record.

    Returns:
        Lines that say what was done.

    Raises:
        SettlementError: The account is not the site's, or the contract has other terms, or the
            site's stake is gone, or the chain refuses or fails.
    """
    run = RunOnChain.read(place)
    check_account(account, config, site)
    folder = place / FOLDER if place.is_dir() else place.parent
    desk = Desk(run.ledger(account), folder)
    try:
        lines = [*check_run_file(desk.ledger, run, config), *check_contract(desk, run, terms)]
        _check_stake(desk, run)
        lines += stake(desk, run, terms.deposit.stake * GWEI)
        days = days_left(run, account.address, key_file)
        if days > 1:
            return [*lines, f"{site} is enrolled for {days:.0f} more days"]
        return [*lines, *enrol(desk, run, site, key_file, DAYS)]
    except ServerFailedError as error:
        if days_left(run, account.address, key_file) <= 0:
            raise
        return [f"{error}; {site} has enrolled before, and joins without a look at the chain"]


def check_account(account: LocalAccount, config: RunConfig, site: str) -> None:
    """Raise `SettlementError` unless the run file names this account for the site."""
    named = "" if config.settlement is None else config.settlement.accounts.get(site, "")
    if named.lower() != account.address.lower():
        raise SettlementError(
            f"settlement.accounts: the run file names {named or 'no account'} for {site}, and not "
            f"{account.address}: tell the sponsor your account before the run starts"
        )


def check_contract(desk: Desk, run: RunOnChain, terms: Terms) -> list[str]:
    """Compare the contract with the terms; return lines about its pool and its auditors.

    Raises `SettlementError` if the contract has other terms or the run has ended.
    """
    # The desk stays closed: opened, it would send what a crash has left, perhaps into a closed run.
    check_code(desk.ledger)
    state = known_run(desk.ledger, run)
    wanted = {"stake": terms.deposit.stake * GWEI, "window": terms.deposit.window}
    found = {"stake": state["minStake"], "window": state["window"]}
    for name, value in wanted.items():
        if found[name] != value:
            shown = coins if name == "stake" else "{} s".format
            raise SettlementError(
                f"contract {run.contract} has the {name} {shown(found[name])}, the terms say "
                f"{shown(value)}: nothing was staked; ask the sponsor"
            )
    if AuditorsTree(list(run.auditors)).root != state["auditorsRoot"]:
        raise SettlementError(
            f"chain.json names other auditors than contract {run.contract}: nothing was staked; "
            "ask the sponsor for the right file"
        )
    if state["forked"] or state["closedAt"]:
        why = "its owner has forked the log" if state["forked"] else "its owner has closed it"
        raise SettlementError(f"run 0x{run.run.hex()} has ended: {why}; nothing was staked")
    # Tokens are those of the whole run, so the pool may hold less once claims are paid.
    whole = terms.offer.tokens * terms.offer.price * GWEI // MILLION
    lines = [
        f"the pool holds {coins(state['pool'])}; the whole run is worth {coins(whole)}",
        f"{state['quorum']} of {len(run.auditors)} auditors can take a stake",
    ]
    if state["pool"] < whole and not state["settlements"]:
        lines.append(f"the pool lacks {coins(whole - state['pool'])} of it so far")
    return lines


def _check_stake(desk: Desk, run: RunOnChain) -> None:
    """Raise `SettlementError` if the account's stake is leaving or gone.

    Otherwise, a site that is started again and again would lose one stake after another.
    """
    who = desk.account.address
    with desk.opened():
        amount, leaving = desk.ledger.call("stakes", run.run, who)
        if leaving:
            raise SettlementError(
                f"{who}: has said that it leaves; to stay in the run: dilocox chain stake"
            )
        staked = desk.ledger.events("Staked", run.run, run.block) if not amount else []
        if any(each["who"].lower() == who.lower() for each in staked):
            raise SettlementError(
                f"{who}: its stake was taken or given back, and is not replaced by itself; look "
                "with dilocox chain status, then dilocox chain stake"
            )


def days_left(run: RunOnChain, account: str, key_file: Path) -> float:
    """Return the days for which the account still vouches for the site's key; 0: it does not."""
    try:
        said = json.loads(stake_file(key_file).read_text(encoding="utf-8"))
        key = RecordKey.kept(key_file).public
        expiry = int(said["expiry"])
        domain = Domain(run.chain, run.ledger().address)
        signer = enrol_signer(domain, run.run, key, expiry, str(said["signature"]))
    except (OSError, ValueError, KeyError, TypeError, DilocoxError):
        return 0.0
    return max(0.0, expiry - time.time()) / DAY if signer == account else 0.0
