"""Asks a chain for the anchored heads of a run, for `dilocox verify --chain`."""

from __future__ import annotations

from pathlib import Path

from dilocox.errors import SettlementError
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.tools.settlement.run_on_chain import RunOnChain


def chain_heads(place: Path) -> ChainHeads:
    """Return what the chain says about a run; if it cannot be asked, the reason.

    `place`: the file of `dilocox chain register`, or a run's folder. Raises `SettlementError` if
    that file cannot be read.
    """
    run = RunOnChain.read(place)
    where = f"run 0x{run.run.hex()[:12]}… of contract {run.contract}"
    try:
        ledger = run.ledger()
        registered = ledger.events("Registered", run.run, run.block)
        heads = ledger.events("Anchored", run.run, run.block)
        forked = bool(ledger.state(run.run)["forked"])
    except SettlementError as error:
        return ChainHeads(where, fault=str(error))
    if not registered:
        return ChainHeads(where, fault=f"{where} is not registered since block {run.block}")
    found = tuple(Prefix(int(each["size"]), each["root"].hex()) for each in heads)
    return ChainHeads(where, registered[0]["log"].hex(), found, forked)
