"""What the owner of a run and its sites do on a chain. Every function can be repeated.

Each looks at the chain first, does what is missing, and returns lines that say what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eth_account.signers.local import LocalAccount
from web3 import Web3

from dilocox.config.settlement import names_place
from dilocox.errors import RecordError, SettlementError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import digest_of_entry
from dilocox.record.log.merkle import consistency_proof, root_of, roots_at
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, open_note
from dilocox.record.log.transparency_log import leaves_of
from dilocox.tools.settlement.amounts import (
    amounts,
    by_account,
    countable,
    covered,
    read_beginning,
    read_prefix,
    terms_of,
)
from dilocox.tools.settlement.binding import UNBOUND, check_place
from dilocox.tools.settlement.claims_tree import AuditorsTree, ClaimsTree
from dilocox.tools.settlement.journal import Journal
from dilocox.tools.settlement.ledger import Ledger, coins, deploy, has_code
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, RunOnChain

TERMS = {
    "manifest": "run file", "window": "--window", "minStake": "--stake",
    "auditorsRoot": "list of --auditor", "quorum": "--quorum",
}  # fmt: skip
"""What the contract keeps of `register`, and what the user calls it."""


def deploy_once(
    web3: Web3, account: LocalAccount, journal: Journal, again: bool = False, fee: int = FEE
) -> list[str]:
    """Deploy a contract, or name those that the account has deployed.

    Args:
        web3: Connection to the chain.
        account: Who deploys.
        journal: The account's, for this chain.
        again: Deploy another contract, even if there is one.
        fee: Wei that the fee may reach.

    Raises:
        SettlementError: The chain refuses or fails, or the fee is too high.
    """
    with journal.only_here():
        journal.catch_up(web3, account, fee)
        known = [each for each in journal.contracts() if has_code(web3, each)]
        late = journal.late()
        journal.told(late)
        if known and (late or not again):
            return [*known[::-1], "deployed already; --again deploys another contract"]
        sent = deploy(web3, account, journal.keep, fee)
        journal.done(sent.hash, sent.contract)
    return [f"{sent.contract}", f"deployed RunLedger; {sent.gas} gas"]


def register(
    desk: Desk, folder: Path, rpc: str, window: int, stake: int, auditors: Sequence[str],
    quorum: int, pool: int,
) -> list[str]:  # fmt: skip
    """Register the run in `folder`, and write its `chain.json`.

    Args:
        desk: The owner's.
        folder: The run's folder, with its record.
        rpc: URL of the RPC server, for `chain.json`.
        window: Seconds in which a settlement can be vetoed.
        stake: Least stake, wei.
        auditors: Addresses of the auditors' accounts.
        quorum: Number of auditors that must agree.
        pool: Wei that are paid into the pool.

    Raises:
        SettlementError: The chain refuses or fails, or a value cannot be used.
        RecordError: The record cannot be read.
    """
    accounts = [checked(each) for each in auditors]
    if not 1 <= quorum <= len(set(accounts)):
        raise SettlementError(f"--quorum {quorum}: there are {len(set(accounts))} auditors")
    course = read_beginning(folder)
    _check_accounts(terms_of(course))
    log, ledger = course.run, desk.ledger
    with desk.opened():
        block = ledger.block()
        owner = desk.account.address
        chain = ledger.chain
        found = RunOnChain(rpc, chain, ledger.address, owner, log, block, tuple(accounts))
        check_place(found, terms_of(course))
        state = ledger.state(found.run)
        root = AuditorsTree(accounts).root
        manifest = bytes.fromhex(course.manifest["config_digest"])
        wanted = {"manifest": manifest, "window": window, "minStake": stake,
                  "auditorsRoot": root, "quorum": quorum}  # fmt: skip
        if int(state["owner"], 16):
            other = [TERMS[name] for name, value in wanted.items() if state[name] != value]
            if other:
                raise SettlementError(
                    f"run 0x{found.run.hex()} is registered with another {', '.join(other)}: "
                    "repeat the command as it was, or begin another run"
                )
            return [
                f"run 0x{found.run.hex()}: registered already; pool {coins(state['pool'])}",
                # It may have been registered long before the newest block.
                _written(found, folder, lambda: ledger.registered(found.run)),
            ]
        sent = desk.send("register", bytes.fromhex(log), *wanted.values(), value=pool)
    unbound = [] if names_place(terms_of(course)) else [UNBOUND]
    return [
        f"registered run 0x{found.run.hex()} on chain {chain} with a pool of {coins(pool)}; "
        f"{sent.gas} gas",
        *unbound,
        _written(found, folder, lambda: block),
    ]


def _written(found: RunOnChain, folder: Path, block: Callable[[], int]) -> str:
    """Write `chain.json` unless it is there; `block`: finds the block that it names."""
    try:
        first = RunOnChain.read(folder)
    except SettlementError:
        return f"{replace(found, block=block()).write(folder)}: give it to the sites"
    if (first.contract, first.run) != (found.contract, found.run):
        raise SettlementError(
            f"{folder}/settlement/chain.json is of another contract or owner: move it away first"
        )
    return f"{folder}/settlement/chain.json: give it to the sites"


def anchor(desk: Desk, run: RunOnChain, folder: Path, note: str | None) -> list[str]:
    """Anchor a checkpoint of the run's log, unless the chain has it or a later one.

    Args:
        desk: The owner's.
        run: The run.
        folder: The run's folder.
        note: The signed checkpoint; None: the newest one of the folder.

    Raises:
        SettlementError: The chain refuses or fails, or its head is not a prefix of this log.
        RecordError: The log cannot be read, or `note` is no checkpoint of it.
    """
    content = covered(folder)
    key = NoteKey.parse(content.public)
    checkpoint = LogCheckpoint.parse(open_note(note or content.note, key))
    entries = content.entries[: checkpoint.size]
    leaves = list(leaves_of(entries))
    if len(leaves) != checkpoint.size or root_of(leaves) != checkpoint.root:
        raise RecordError(f"{folder}: the checkpoint is not one of this log")
    with desk.opened():
        head = known_run(desk.ledger, run)
        size = head["size"]
        if size and roots_at(leaves_of(content.entries), [size]).get(size) != head["root"]:
            raise SettlementError(
                f"the chain's head of {size} statements is not a prefix of this log: another log "
                "was anchored for this run"
            )
        if not size and digest_of_entry(entries[0]) != run.log:
            raise SettlementError(f"{folder}: its record is not of the log that was registered")
        if size >= checkpoint.size:
            return [f"anchored already: {size} statements"]
        proof = consistency_proof(leaves, size) if size else []
        _sign_head(desk, run, folder, checkpoint)
        number = _last_round(entries)
        sent = desk.send("anchor", run.run, number, checkpoint.size, checkpoint.root, proof)
    return [f"anchored {checkpoint.size} statements; {sent.gas} gas"]


def _sign_head(desk: Desk, run: RunOnChain, folder: Path, checkpoint: LogCheckpoint) -> None:
    """Add the owner's signed head to `settlement/heads.jsonl`; see `SignedRoots.sign_once`."""
    path, roots = folder / FOLDER / "heads.jsonl", {checkpoint.size: checkpoint.root}
    _, changed = desk.sign_once(run, path, "Head", roots)
    if changed:
        raise SettlementError(
            f"{path}: another root of size {checkpoint.size} was signed; a second one would cost "
            "the stake: anchor the next checkpoint"
        )


def _last_round(entries: Sequence[str]) -> int:
    """Return the round of the last outer step of the log; 0 without one."""
    found = 0
    for entry in entries:
        statement, _ = s.opened(entry)
        if statement.kind == s.STEP:
            found = int(statement.predicate["round"])
    return found


def settle(desk: Desk, run: RunOnChain, folder: Path) -> list[str]:
    """Settle the amounts of the newest anchored head, unless that is done.

    Raises `SettlementError` if the chain refuses or fails, or its head is not one of this log, and
    `RecordError` if the log cannot be read.
    """
    with desk.opened():
        ledger = desk.ledger
        state = known_run(ledger, run)
        tree, owed = claims_at(run, folder, state["size"], state["root"])
        if tree.root in (state["pending"], state["accepted"]):
            return [f"settled already: {state['size']} statements, {coins(sum(owed.values()))}"]
        left = state["pendingSince"] + state["window"] - ledger.now()
        if int.from_bytes(state["pending"]) and left > 0:
            return [f"settlement {state['settlements']} waits {left} seconds for vetoes; then run "
                    "this again"]  # fmt: skip
        sent = desk.send("settle", run.run, state["size"], tree.root)
        lines = [f"settled {coins(sum(owed.values()))} to {len(owed)} accounts by "
                 f"{state['size']} statements; {sent.gas} gas"]  # fmt: skip
        claimed = sum(ledger.call("claimed", run.run, checked(each)) for each in owed)
        missing = sum(owed.values()) - claimed - state["pool"]
        if missing > 0:
            lines.append(f"the pool lacks {coins(missing)}: dilocox chain fund")
    return lines


def claims_at(
    run: RunOnChain, folder: Path, size: int, root: bytes
) -> tuple[ClaimsTree, dict[str, int]]:
    """Return the claims after the log's first `size` statements, and wei by account.

    Raises `SettlementError` like `owed_at`, and if nothing is owed.
    """
    owed = owed_at(folder, size, root)
    if not owed:
        raise SettlementError(f"nothing is owed to any account after {size} statements")
    return ClaimsTree(run.run, owed), owed


def owed_at(folder: Path, size: int, root: bytes) -> dict[str, int]:
    """Return wei by account after the log's first `size` statements.

    Raises `SettlementError` if the log's root there is not `root`, or if its run file is malformed,
    and `RecordError` if the log cannot be read.
    """
    if not size:
        raise SettlementError("nothing is anchored yet: dilocox chain anchor first")
    prefix = read_prefix(folder, size)
    if prefix.root != root:
        raise SettlementError(f"the chain's head of {size} statements is not a prefix of this log")
    _check_accounts(terms_of(prefix.course))
    owed = by_account(amounts(prefix.course))
    if max(owed.values(), default=0) >= 2**256:
        raise SettlementError("the log owes an account more than a contract can count")
    return owed


def claim(desk: Desk, run: RunOnChain, folder: Path) -> list[str]:
    """Claim what the accepted settlement owes the account, and withdraw all its credit.

    Raises `SettlementError` if the chain refuses or fails, or if the settlement is not what this
    log gives, and `RecordError` if the log cannot be read.
    """
    with desk.opened():
        state = known_run(desk.ledger, run)
        accepted = accepted_root(state, desk.ledger.now())
        if not int.from_bytes(accepted):
            return ["no settlement is accepted yet", *withdraw(desk)]
        tree, owed = settlement_of(desk.ledger, run, folder, accepted)
        account = desk.account.address.lower()
        amount = owed.get(account, 0)
        before = desk.ledger.call("claimed", run.run, desk.account.address)
        if amount <= before:
            return [f"{coins(before)} claimed already, no more is owed", *withdraw(desk)]
        if not state["pool"]:
            return [f"{coins(amount - before)} are owed, and the pool is empty", *withdraw(desk)]
        proof = tree.proof(account)
        desk.send("claim", run.run, desk.account.address, amount, proof)
        paid = desk.ledger.call("claimed", run.run, desk.account.address) - before
        return [f"claimed {coins(paid)} of {coins(amount - before)}", *withdraw(desk)]


def accepted_root(state: Mapping[str, Any], now: int) -> bytes:
    """Return the claims root that claims count against now; zeros: none."""
    pending: bytes = state["pending"]
    if int.from_bytes(pending) and now >= state["pendingSince"] + state["window"]:
        return pending
    accepted: bytes = state["accepted"]
    return accepted


def settlement_of(
    ledger: Ledger, run: RunOnChain, folder: Path, claims_root: bytes
) -> tuple[ClaimsTree, dict[str, int]]:
    """Return the claims of the settlement with this root, as this log gives them."""
    size, root = settled_at(ledger, run, claims_root)
    tree, owed = claims_at(run, folder, size, root)
    if tree.root != claims_root:
        raise SettlementError(
            f"the settlement by {size} statements is not what this log gives: show it to the "
            "auditors (dilocox chain dispute)"
        )
    return tree, owed


def settled_at(ledger: Ledger, run: RunOnChain, claims_root: bytes) -> tuple[int, bytes]:
    """Return size and root of the head that a settlement was made for.

    Raises `SettlementError` if the RPC server fails, or withholds the events of the run.
    """
    settled = [
        each["size"]
        for each in ledger.events("Settled", run.run, run.block)
        if each["claimsRoot"] == claims_root
    ]
    heads = {e["size"]: e["root"] for e in ledger.events("Anchored", run.run, run.block)}
    if not settled or settled[-1] not in heads:
        raise SettlementError(
            f"settlement 0x{claims_root.hex()}: the chain's server does not give the events of "
            f"it since block {run.block}; name another server in chain.json"
        )
    return settled[-1], heads[settled[-1]]


def withdraw(desk: Desk) -> list[str]:
    """Withdraw all credit of the account. Raises `SettlementError`."""
    credit = desk.ledger.call("balanceOf", desk.account.address)
    if not credit:
        return []
    desk.send("withdraw")
    return [f"withdrew {coins(credit)}"]


def fund(desk: Desk, run: RunOnChain, amount: int) -> list[str]:
    """Add `amount` wei to the pool, unless a funding was cut short: then finish that.

    If another command has finished it meanwhile, nothing is sent. Raises `SettlementError` if the
    chain refuses or fails.
    """
    with desk.opened():
        late = [each for each in desk.journal.late() if each.function == "fund"]
        if late:
            desk.journal.told(late)
            return [
                "finished the funding that was cut short, and added nothing else; "
                f"{_pool(desk, run)}"
            ]
        desk.send("fund", run.run, value=amount)
        return [_pool(desk, run)]


def _pool(desk: Desk, run: RunOnChain) -> str:
    """Return the pool's size in words.

    Called after a payment, which has succeeded: so a server that fails is named, and not raised.
    """
    try:
        return f"pool {coins(desk.ledger.state(run.run)['pool'])}"
    except SettlementError as error:
        return f"the funding is in a block, but the pool is not known: {error}"


def status(ledger: Ledger, run: RunOnChain, accounts: Sequence[str] = ()) -> list[str]:
    """Return lines on a run: pool, head, settlement, and `accounts`. Raises `SettlementError`."""
    state, now = known_run(ledger, run), ledger.now()
    end = "; FORKED: the owner has signed two logs" if state["forked"] else ""
    auditors = ", ".join(run.auditors)
    if AuditorsTree(run.auditors).root != state["auditorsRoot"]:
        auditors += "; NOT those that the contract has: this chain.json is wrong"
    end += "; closing" if state["closedAt"] else ""
    lines = [
        f"run         0x{run.run.hex()}{end}",
        f"owner       {state['owner']}",
        f"pool        {coins(state['pool'])}",
        f"terms       window {state['window']} seconds, least stake {coins(state['minStake'])}",
        f"run file    {state['manifest'].hex()}",
        f"auditors    {state['quorum']} must agree of {auditors}",
        f"head        {state['size']} statements, round {state['round']}, {state['root'].hex()}",
    ]
    left = state["pendingSince"] + state["window"] - now
    pending = int.from_bytes(state["pending"])
    said = f"number {state['settlements']}, " + (
        f"can be vetoed for {left} seconds" if pending and left > 0 else "accepted"
    )
    if not int.from_bytes(accepted_root(state, now)) and not (pending and left > 0):
        said = "none"
    lines.append(f"settlement  {said}")
    for each in dict.fromkeys([state["owner"], *map(checked, accounts)]):
        amount, leaving = ledger.call("stakes", run.run, each)
        claimed = ledger.call("claimed", run.run, each)
        going = ", leaving" if leaving else ""
        lines.append(f"account     {each}: stake {coins(amount)}{going}, claimed {coins(claimed)}")
    return lines


def known_run(ledger: Ledger, run: RunOnChain) -> dict[str, Any]:
    state = ledger.state(run.run)
    if not int(state["owner"], 16):
        raise SettlementError(f"run 0x{run.run.hex()} is not registered in {run.contract}")
    return state


def checked(account: str) -> str:
    """Return an address with its checksum. Raises `SettlementError` for a mistyped one."""
    digits = account.removeprefix("0x")
    right = Web3.is_address(account) and (
        digits in (digits.lower(), digits.upper()) or Web3.is_checksum_address(account)
    )
    if not right:
        raise SettlementError(f"{account}: not an account's address; one of its digits is wrong")
    return str(Web3.to_checksum_address(account))


def _check_accounts(terms: Mapping[str, Any]) -> None:
    with countable():
        named = [terms.get("contract"), terms.get("owner"), *terms["accounts"].values()]
    for each in named:
        if each is not None:
            checked(str(each))
