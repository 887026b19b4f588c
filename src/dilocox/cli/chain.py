"""`dilocox chain`: anchor a run's log on a chain, stake, settle, claim, dispute."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.cli.coins import coin
from dilocox.cli.standard_input import given_text
from dilocox.errors import ConfigError, SettlementError
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.web3_package import load_web3
from dilocox.utils.plain_text import plain

if TYPE_CHECKING:
    from eth_account.signers.local import LocalAccount

    from dilocox.tools.settlement.amounts import SiteAmount
    from dilocox.tools.settlement.run_on_chain import Desk, RunOnChain

HELP = "anchor a run on a chain, and settle what it owes its sites"
HOOK_NICE = 10
"""How far the hook `record.anchor` steps back behind the run that waits for the same cores."""
DAY = 86_400
"""Seconds."""


def add_arguments(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the actions of `dilocox chain` to `parser`. `common`: arguments of every command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(
        name: str, call: Callable[[argparse.Namespace], list[str]], help_: str, *places: str
    ) -> argparse.ArgumentParser:
        found = actions.add_parser(name, parents=[common], help=help_)
        for each in places:
            found.add_argument(each.lower(), metavar=each, type=Path)
        found.set_defaults(call=lambda options: _run(options, call))
        return found

    making = action("key", _key, "make an account, and write its key to a file", "FILE")
    add_password(making)
    deploying = action("deploy", _deploy, "deploy the contract; print its address")
    _add_key(deploying, rpc=True)
    deploying.add_argument(
        "--again", action="store_true", help="deploy another contract, even if there is one"
    )
    _add_register(action("register", _register, "register a run with its pool", "RUN"))
    staking = action("stake", _stake, "stake at least what the run asks for", "RUN")
    _add_key(staking)
    staking.add_argument(
        "--amount", type=coin, metavar="COINS",
        help="stake that the account shall have (default: the contract's least one, after a "
        "question)",
    )  # fmt: skip
    staking.add_argument(
        "--run-file", type=Path, metavar="FILE",
        help="compare with this run file what the contract has of the run",
    )  # fmt: skip
    _add_enrol(action("enrol", _enrol, "sign a site's key with its account, to join by stake",
                      "RUN"))  # fmt: skip
    action("staked", _staked, "judge a file of enrol, on standard input; the coordinator does",
           "RUN")  # fmt: skip
    _add_key(action("leave", _leave, "end a stake, and take it back once it is free", "RUN"))
    funding = action("fund", _fund, "add to the pool; every call adds", "RUN")
    _add_key(funding)
    funding.add_argument("--amount", type=coin, required=True, metavar="COINS")
    _add_key(action("anchor", _anchor, "anchor a checkpoint: of standard input, or the newest",
                    "RUN"))  # fmt: skip
    accounting = action("account", _account, "print what the run owes, by its log alone", "RUN")
    accounting.add_argument(
        "--size", type=int, metavar="N",
        help="by the log's first N statements (default: all that its checkpoint covers)",
    )  # fmt: skip
    accounting.add_argument("--json", action="store_true", help="print the amounts as JSON")
    _add_key(action("settle", _settle, "settle what the anchored log says", "RUN"))
    _add_key(action("claim", _claim, "claim what is settled, and withdraw it", "RUN"))
    closing = action("close", _close, "announce the end of a run, by its owner", "RUN")
    _add_key(closing)
    closing.add_argument(
        "--unsettled", action="store_true",
        help="close also if what the newest anchored head owes is not settled and accepted",
    )  # fmt: skip
    _add_key(action("reclaim", _reclaim, "take back what is left of a closed run's pool", "RUN"))
    _add_key(action("cancel", _cancel, "drop the account's transactions that no block takes",
                    "RUN"))  # fmt: skip
    committing = action("commit", _commit, "sign a site's commitments of finished rounds", "RUN")
    committing.add_argument("--site", required=True, metavar="NAME")
    _add_key(committing)
    _add_dispute(action("dispute", _dispute, "slash, or vote as an auditor", "RUN"))
    showing = action("status", _status, "print pool, terms, head, settlement and stakes", "RUN")
    showing.add_argument(
        "--account", action="append", default=[], metavar="ADDRESS", help="show this account, too"
    )


def _add_enrol(parser: argparse.ArgumentParser) -> None:
    _add_key(parser)
    parser.add_argument("--site", required=True, metavar="NAME")
    parser.add_argument(
        "--site-key", type=Path, metavar="FILE",
        help="file of the key with which the site signs (default: RUN/private/NAME.key)",
    )  # fmt: skip
    parser.add_argument(
        "--days", type=int, default=90, metavar="N",
        help="days for which the site may join with the signature (default: 90)",
    )  # fmt: skip


def _add_dispute(parser: argparse.ArgumentParser) -> None:
    _add_key(parser)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--signed", type=Path, nargs=2, metavar="FILE",
        help="two files of signed heads or commits that contradict each other: slashes the signer",
    )  # fmt: skip
    kinds.add_argument(
        "--veto", action="store_true", help="vote against the pending settlement, if it is wrong"
    )
    kinds.add_argument(
        "--site", metavar="NAME", help="vote to slash this site for --round, by its verdicts"
    )
    parser.add_argument(
        "--withheld", action="store_true",
        help="with --veto: vote also if this copy of the log is too short to tell",
    )  # fmt: skip
    parser.add_argument("--round", type=int, metavar="N")
    parser.add_argument(
        "--votes", type=Path, metavar="FILE",
        help="file that the auditors hand on; each adds a vote, and the last one sends them",
    )  # fmt: skip


def _add_register(parser: argparse.ArgumentParser) -> None:
    _add_key(parser, rpc=True)
    parser.add_argument("--contract", required=True, metavar="ADDRESS")
    parser.add_argument(
        "--window", type=int, metavar="SECONDS",
        help="time in which auditors may veto a settlement (default: a day)",
    )  # fmt: skip
    parser.add_argument("--stake", type=coin, metavar="COINS", help="least stake")
    parser.add_argument(
        "--terms", metavar="FILE|URL",
        help="take stake and window from the terms that the run file names",
    )  # fmt: skip
    parser.add_argument("--pool", type=coin, required=True, metavar="COINS")
    parser.add_argument(
        "--auditor", action="append", required=True, metavar="ADDRESS",
        help="account of an auditor; give it once for each",
    )  # fmt: skip
    parser.add_argument(
        "--quorum", type=int, required=True, metavar="N", help="auditors that must agree"
    )


def _add_key(parser: argparse.ArgumentParser, rpc: bool = False) -> None:
    parser.add_argument(
        "--key", type=Path, required=True, metavar="FILE", help="file of the account's key"
    )
    add_password(parser)
    parser.add_argument(
        "--most-fee", type=coin, default=FEE, metavar="COINS",
        help="most that the fee of one transaction may reach (default: 0.1)",
    )  # fmt: skip
    if rpc:
        parser.add_argument(
            "--rpc", required=True, metavar="URL",
            help="server of the chain; or a file of mode 600 with its URL, if that holds a key",
        )  # fmt: skip


def add_password(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the file of a key's password."""
    parser.add_argument(
        "--password-file", type=Path, metavar="FILE",
        help="file of mode 600 whose first line is the key's password (default: a prompt)",
    )  # fmt: skip


def _run(options: argparse.Namespace, call: Callable[[argparse.Namespace], list[str]]) -> int:
    """Run an action and print its lines. Amounts alone need no chain, and no package for it."""
    if call is not _account:
        load_web3()
    for line in call(options):
        print(plain(line))
    return 0


def _account_of(options: argparse.Namespace) -> LocalAccount:
    from dilocox.tools.settlement.keystore import load_key, read_password

    return load_key(options.key, read_password(options.password_file, options.key))


def _opened(options: argparse.Namespace) -> tuple[Desk, RunOnChain]:
    """The desk of the account, and the run of RUN: its folder, or the file `chain.json`."""
    from dilocox.tools.settlement.binding import check_folder
    from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, RunOnChain

    run = RunOnChain.read(options.run)
    folder = options.run / FOLDER if options.run.is_dir() else options.run.parent
    if options.run.is_dir():
        check_folder(run, options.run)
    signed = options.key.with_name(f"{options.key.name}.signed-{run.chain}.jsonl")
    return Desk(run.ledger(_account_of(options), options.most_fee), folder, signed), run


def _key(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement.keystore import create_key, read_password

    password = read_password(options.password_file, options.file, new=True)
    return [create_key(options.file, password)]


def _deploy(options: argparse.Namespace) -> list[str]:
    account = _account_of(options)
    from dilocox.tools.settlement.journal import Journal
    from dilocox.tools.settlement.ledger import chain_of, connect
    from dilocox.tools.settlement.run_on_chain import read_rpc
    from dilocox.tools.settlement.settling import deploy_once

    web3 = connect(read_rpc(options.rpc))
    name = f"{options.key.name}.deploy-{chain_of(web3)}.jsonl"
    journal = Journal(options.key.with_name(name))
    return deploy_once(web3, account, journal, options.again, options.most_fee)


def _register(options: argparse.Namespace) -> list[str]:
    account = _account_of(options)
    from dilocox.tools.settlement.ledger import Ledger, connect
    from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, read_rpc
    from dilocox.tools.settlement.settling import register

    if not options.run.is_dir():
        raise ConfigError(f"{options.run}: not a run's folder")
    rpc = read_rpc(options.rpc)
    web3 = connect(rpc)
    ledger = Ledger(web3, options.contract, account, fee=options.most_fee)
    stake, window = _deposit(options)
    return register(
        Desk(ledger, options.run / FOLDER), options.run, rpc, window, stake,
        options.auditor, options.quorum, options.pool,
    )  # fmt: skip


def _deposit(options: argparse.Namespace) -> tuple[int, int]:
    """Return the least stake, wei, and the window, seconds, that a run is registered with."""
    if options.terms is None:
        if options.stake is None:
            raise ConfigError("--stake: name the least stake, or give --terms")
        return options.stake, DAY if options.window is None else options.window
    if options.stake is not None or options.window is not None:
        raise ConfigError("--terms: have stake and window, so leave out --stake and --window")
    from dilocox.config.terms import read_terms
    from dilocox.tools.settlement.binding import folder_terms

    file = read_terms(options.terms)
    named = (folder_terms(options.run) or {}).get("terms")
    if named != file.digest:
        raise SettlementError(
            f"settlement.terms: the run file names {named or 'no terms'}, these are {file.digest}: "
            "no site could join by them"
        )
    return file.terms.deposit.stake * 10**9, file.terms.deposit.window


def _stake(options: argparse.Namespace) -> list[str]:
    from dilocox.config.run_config import load_run
    from dilocox.tools.settlement import staking
    from dilocox.tools.settlement.ledger import coins

    desk, run = _opened(options)
    lines: list[str] = []
    if options.run_file is not None:
        lines = staking.check_run_file(desk.ledger, run, load_run(options.run_file))
    amount = options.amount
    if amount is None:
        amount = staking.least_stake(desk.ledger, run)
        what = f"contract {run.contract} on chain {run.chain} asks for a stake of {coins(amount)}"
        if sys.stdin is None or not sys.stdin.isatty():
            raise SettlementError(f"{what}: give it with --amount, as there is nobody to ask")
        if input(f"{what}; stake it? [y/N] ").strip().lower() not in ("y", "yes"):
            return [*lines, "nothing was staked"]
    return [*lines, *staking.stake(desk, run, amount)]


def _enrol(options: argparse.Namespace) -> list[str]:
    from dilocox.coordinator.record_keys import key_file
    from dilocox.tools.settlement import enrolling

    own = options.site_key
    if own is None and not options.run.is_dir():
        raise ConfigError("--site-key: name the file of the site's key, or give the run's folder")
    own = own or key_file(options.run, options.site)
    return enrolling.enrol(*_opened(options), options.site, own, options.days)


def _staked(options: argparse.Namespace) -> list[str]:
    import time

    from dilocox.tools.settlement.binding import folder_terms
    from dilocox.tools.settlement.enrolling import staked
    from dilocox.tools.settlement.run_on_chain import RunOnChain

    run = RunOnChain.read(options.run)
    terms = folder_terms(options.run)
    if terms is None:
        raise SettlementError(f"{options.run}: no record whose run file has [settlement]")
    question = "" if sys.stdin is None else sys.stdin.read()
    return [json.dumps(staked(run.ledger(), run, terms, question, time.time()))]


def _leave(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import staking

    return staking.leave(*_opened(options))


def _fund(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import settling

    return settling.fund(*_opened(options), options.amount)


def _close(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import closing

    return closing.close(*_opened(options), options.run, options.unsettled)


def _reclaim(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import closing

    return closing.reclaim(*_opened(options))


def _cancel(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import cancelling

    return cancelling.cancel(_opened(options)[0])


def _anchor(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import settling

    note = given_text()
    if note:
        os.nice(HOOK_NICE)
    return settling.anchor(*_opened(options), options.run, note)


def _settle(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import settling

    return settling.settle(*_opened(options), options.run)


def _claim(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import settling

    return settling.claim(*_opened(options), options.run)


def _commit(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import disputes

    return disputes.commit(*_opened(options), options.run, options.site)


def _dispute(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement import disputes

    if options.withheld and not options.veto:
        raise ConfigError("--withheld: is about a settlement, so give --veto, too")
    if options.signed:
        return disputes.slash_by_signatures(*_opened(options), *options.signed)
    if options.votes is None:
        raise ConfigError("--votes: name the file that the auditors hand on")
    if options.veto:
        return disputes.veto(*_opened(options), options.run, options.votes, options.withheld)
    if options.round is None:
        raise ConfigError("--site: name the round, too, with --round")
    return disputes.mismatch(
        *_opened(options), options.run, options.site, options.round, options.votes
    )


def _status(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement.run_on_chain import RunOnChain
    from dilocox.tools.settlement.settling import status

    run = RunOnChain.read(options.run)
    return status(run.ledger(), run, options.account)


def _account(options: argparse.Namespace) -> list[str]:
    from dilocox.tools.settlement.amounts import amounts, read_prefix

    prefix = read_prefix(options.run, options.size)
    found = amounts(prefix.course)
    if options.json:
        said: dict[str, Any] = {
            "run": prefix.course.run, "size": prefix.size, "root": prefix.root.hex(),
            "sites": [{**vars(each), "tokens": str(each.tokens), "wei": str(each.wei)}
                      for each in found],
        }  # fmt: skip
        return [json.dumps(said)]
    head = f"by the first {prefix.size} statements of the log, root {prefix.root.hex()}"
    return [head, *map(_line, found)] if found else [head, "no outer step counts yet"]


def _line(each: SiteAmount) -> str:
    where = each.account or "no account: not paid"
    bad = ", ".join(map(str, each.withheld))
    withheld = f"; not paid by an auditor's verdict: round {bad}" if bad else ""
    return (
        f"{each.site:<12} {int(each.tokens):>14,} tokens in {each.rounds} rounds  "
        f"{each.wei / 10**18:.9f} coins  {where}{withheld}"
    )
