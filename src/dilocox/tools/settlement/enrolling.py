"""How a site's account vouches for the site's key, and how the coordinator looks at its stake."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.coordinator.client.stake_file import stake_file
from dilocox.coordinator.record_keys import RecordKey
from dilocox.errors import JoinError, SettlementError
from dilocox.tools.settlement.contract_code import check_code
from dilocox.tools.settlement.ledger import Ledger
from dilocox.tools.settlement.messages import Domain
from dilocox.tools.settlement.run_on_chain import Desk, RunOnChain
from dilocox.tools.settlement.settling import known_run
from dilocox.utils.storage import overwrite

DAY = 86_400
"""Seconds."""


def enrol(desk: Desk, run: RunOnChain, site: str, key_file: Path, days: int) -> list[str]:
    """Sign a site's key with its account, and write the signature beside the key.

    Nothing is sent. The site's key is made if it is missing.

    Args:
        desk: The site's account.
        run: The run.
        site: Name of the site.
        key_file: File of the key with which the site signs in the record.
        days: Days for which the site may join with the signature.

    Raises:
        SettlementError: The contract is another one, or the chain's server fails, or a file
            cannot be used.
    """
    if not 1 <= days <= 3650:
        raise SettlementError(f"--days {days}: give 1 to 3650")
    check_code(desk.ledger)
    try:
        key = RecordKey.kept(key_file).public
    except JoinError as error:
        raise SettlementError(str(error)) from None
    expiry = int(time.time()) + days * DAY
    said = {"run": run.run, "ed25519Key": bytes.fromhex(key), "expiry": expiry}
    signature = desk.ledger.domain.sign(desk.account, "Enrol", **said).hex()
    path = stake_file(key_file)
    text = json.dumps({"site": site, "key": key, "expiry": expiry, "signature": signature})
    try:
        overwrite(path, text + "\n")
    except OSError as error:
        raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
    lines = [f"{path}: {desk.account.address} vouches for the key of {site} for {days} days"]
    if not desk.ledger.call("isStaked", run.run, desk.account.address):
        lines.append(f"{desk.account.address} has no stake yet: dilocox chain stake")
    return lines


def enrol_signer(domain: Domain, run: bytes, key: str, expiry: int, signature: str) -> str:
    """Return the address that vouches for a site's key. Pure.

    Raises `SettlementError` if the signature is malformed.
    """
    try:
        said = {"run": run, "ed25519Key": bytes.fromhex(key), "expiry": int(expiry)}
        return domain.signer(bytes.fromhex(signature), "Enrol", **said)
    except (ValueError, TypeError) as error:
        raise SettlementError(f"Enrol: not a signature of an account ({error})") from None


def staked(
    ledger: Ledger, run: RunOnChain, terms: Mapping[str, Any], question: str, now: float
) -> dict[str, Any]:
    """Judge an enrolment: is its key signed by the site's account, and has that one staked?

    Args:
        ledger: The contract.
        run: The run.
        terms: `[settlement]` of the run file.
        question: JSON with `site`, `key`, `expiry` and `signature`.
        now: Unix time, seconds.

    Returns:
        `staked`, True or False, and the `reason`.

    Raises:
        SettlementError: The question is malformed, or the chain's server fails.
    """
    try:
        asked = json.loads(question)
        site, key = str(asked["site"]), str(asked["key"])
        expiry, signature = int(asked["expiry"]), str(asked["signature"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SettlementError("standard input: not a file of dilocox chain enrol") from None
    account = str(terms.get("accounts", {}).get(site, ""))
    # Outside of the next try: a dead server is no reason to refuse a site.
    domain = ledger.domain
    try:
        signer = enrol_signer(domain, run.run, key, expiry, signature)
    except SettlementError as error:
        return {"staked": False, "reason": str(error)}
    if not account or signer.lower() != account.lower():
        return {
            "staked": False,
            "reason": f"its key is signed by {signer} for this run, and not by its account "
            f"{account or 'in the run file, which names none'}",
        }
    if expiry <= now:
        return {"staked": False, "reason": "its signature has expired: dilocox chain enrol again"}
    check_code(ledger)
    known_run(ledger, run)
    if not ledger.call("isStaked", run.run, signer):
        return {"staked": False, "reason": f"{signer} has no stake in this run, or is leaving it"}
    return {"staked": True, "reason": f"{signer} has staked"}
