"""Asks a chain for the anchored heads of a run, for `dilocox verify --chain`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from dilocox.errors import SettlementError
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.tools.settlement.enrolling import enrol_signer
from dilocox.tools.settlement.ledger import host_of
from dilocox.tools.settlement.messages import Domain
from dilocox.tools.settlement.run_on_chain import RunOnChain


def chain_heads(place: Path, rpc: str | None = None) -> ChainHeads:
    """Return what the chain says about a run; if it cannot be asked, the reason.

    Args:
        place: The file of `dilocox chain register`, or a run's folder.
        rpc: URL of the RPC server to ask; None: that of the file, so its writer's choice.

    Raises:
        SettlementError: The file cannot be read.
    """
    run = RunOnChain.read(place)
    run = run if rpc is None else replace(run, rpc=rpc)
    where = (
        f"run 0x{run.run.hex()[:12]}… of contract {run.contract} on chain {run.chain}, by "
        f"{host_of(run.rpc)}"
    )
    try:
        ledger = run.ledger()
        _ = ledger.chain  # raises if the server is of another chain
        state = ledger.state(run.run)
        registered = ledger.events("Registered", run.run, run.block)
        heads = ledger.events("Anchored", run.run, run.block)
        forked = bool(state["forked"])
        staked = {each["who"].lower() for each in ledger.events("Staked", run.run, run.block)}
    except SettlementError as error:
        return ChainHeads(where, fault=str(error))
    if not registered:
        return ChainHeads(where, fault=f"{where} is not registered since block {run.block}")
    if state["size"] and state["size"] not in [each["size"] for each in heads]:
        return ChainHeads(
            where,
            fault=f"{where}: the server does not give all heads since block {run.block}: name "
            "another one with --rpc",
        )
    found = tuple(Prefix(int(each["size"]), each["root"].hex()) for each in heads)
    said, domain = registered[0], Domain(run.chain, ledger.address)
    return ChainHeads(
        where, run.chain, run.contract, said["owner"], said["manifest"].hex(), said["log"].hex(),
        found, frozenset(staked), partial(enrol_signer, domain, run.run), forked,
    )  # fmt: skip
