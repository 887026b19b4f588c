"""Binds a run's log to one place on one chain: `chain`, `contract` and `owner` of `[settlement]`.

A log that names no place can be registered by several owners, in several contracts. Each could
anchor another continuation of it, and none would contradict the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.config.settlement import place_problem
from dilocox.errors import DilocoxError, SettlementError
from dilocox.record.log import statements as s
from dilocox.tools.settlement.run_on_chain import RunOnChain

UNBOUND = (
    "the run file names no contract, so this log can be registered in others, too: "
    "settlement.chain, contract and owner of the next run's file"
)


def check_place(run: RunOnChain, terms: Mapping[str, Any] | None) -> None:
    """Raise `SettlementError` if the run file's `[settlement]` names another place. Pure."""
    problem = place_problem(terms, run.chain, run.contract, run.owner)
    if problem is not None:
        raise SettlementError(f"{problem}: chain.json is not of this run")


def check_log(run: RunOnChain, log: str, folder: Path) -> None:
    """Raise `SettlementError` if `log`, the id of the log in `folder`, is not the run's. Pure."""
    if log != run.log:
        raise SettlementError(f"{folder}: its record is not of the log that was registered")


def check_folder(run: RunOnChain, folder: Path) -> None:
    """Compare a run's place with the run file in the record of `folder`, if there is one.

    Raises `SettlementError` if the run file names another place, or the record cannot be read.
    """
    check_place(run, folder_terms(folder))


def folder_terms(folder: Path) -> Mapping[str, Any] | None:
    """Return `[settlement]` of the run file in the record of `folder`, unchecked; None: none.

    Only the log's first statement is read, which has the run file. Raises `SettlementError` if it
    cannot be read.
    """
    path = folder / "record" / "statements.jsonl"
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline().removesuffix("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettlementError(f"{path}: cannot be read ({error})") from None
    try:
        found: Mapping[str, Any] | None = s.opened(first)[0].predicate["config"].get("settlement")
        return found
    except (DilocoxError, ValueError, KeyError, AttributeError) as error:
        raise SettlementError(f"{path}: its first statement has no run file ({error})") from None
