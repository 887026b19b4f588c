"""`dilocox verify`: judge the claims about a run by its record, and print the verdicts."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dilocox.errors import ConfigError, RecordError
from dilocox.tools.settlement.web3_package import load_web3
from dilocox.utils.plain_text import plain

if TYPE_CHECKING:
    from dilocox.record.bundles.fetch import Fetched
    from dilocox.record.verify.chain_anchors import ChainHeads
    from dilocox.record.verify.claims import Finding
    from dilocox.record.verify.machine_claims import MachineJudge
    from dilocox.record.verify.places import Places
    from dilocox.record.verify.verify import Progress as ShownProgress
    from dilocox.record.verify.verify import Report

HELP = "check from a run's record alone how its model was made"
PATIENCE = 20.0
"""Seconds for which a failing call to a storage with bundles is repeated."""
COLOURS = {"PASS": "green", "FAIL": "bold red", "NOT_RUN": "yellow", "SIMULATED": "yellow"}
NOBODY_PROVES = (
    "No claim covers what happened inside a site: whether its inner steps were honest, on what "
    "text, by what code."
)

AUDITS_PROVE = (
    "Only the claim audits covers what happened inside a site, and only of the rounds that were "
    "repeated."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox verify` to `parser`."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its URL (as in fsspec)")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    _add_parts(parser)
    _add_facts(parser)
    _add_outside(parser)
    parser.set_defaults(call=run)


def _add_parts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where parts of the run are."""
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="a further store of payloads, folder or URL; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model's folder (default: RUN/model)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="folder of token files that are checked, too; it makes the claim data required",
    )  # fmt: skip
    parser.add_argument(
        "--start", type=Path, metavar="FOLDER",
        help="the model that the run started from (default: model.path of the run file); it makes "
        "the claim start required, or base if the run trains adapters",
    )  # fmt: skip
    parser.add_argument(
        "--adapters", type=Path, metavar="FOLDER",
        help="the folder that the run's adapters started from (default: adapter.path or "
        "adapter.handover); it makes the claim start required",
    )  # fmt: skip


def _add_facts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for what the reader knows from elsewhere."""
    parser.add_argument(
        "--key", metavar="NAME+HASH+KEY", help="the log's key, as its owner has told it to you"
    )
    parser.add_argument(
        "--seen", type=Path, metavar="FILE",
        help="a checkpoint of the log that you kept earlier: the log must be a continuation of it",
    )  # fmt: skip
    parser.add_argument(
        "--release-key", type=Path, metavar="FILE",
        help="public key (PEM) by which the model's folder must be signed; it makes the claim "
        "release required (default: the key that lies beside a signed folder)",
    )  # fmt: skip
    parser.add_argument(
        "--auditor", action="append", default=[], metavar="KEY",
        help="count only this auditor's verdicts, and make the claim audits required; may be given "
        "several times",
    )  # fmt: skip
    parser.add_argument(
        "--randomness", type=Path, metavar="FILE",
        help="file with lines `ROUND HEX`: public randomness that you looked up yourself. Audits "
        "must have been selected by it, and the claim beacon of audited runs is required",
    )  # fmt: skip


def _add_outside(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for chain, witnesses, storage and machines."""
    parser.add_argument(
        "--chain", type=Path, metavar="FILE",
        help="file of `dilocox chain register`: the heads that the chain keeps must be prefixes of "
        "this log; it makes the claims anchors and stakes required",
    )  # fmt: skip
    parser.add_argument(
        "--witness", action="append", default=[], metavar="KEY",
        help="key of a witness that you trust to have seen the log; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--quorum", type=int, metavar="N",
        help="with --witness: how many of them must have cosigned the whole log (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--cosigned", action="append", default=[], type=Path, metavar="FILE",
        help="with --witness: a cosigned checkpoint, as a witness keeps it; may be given several "
        "times (beside the log: read by itself)",
    )  # fmt: skip
    parser.add_argument(
        "--rpc", metavar="URL",
        help="with --chain: ask this server, not the one that the file names; or a file of mode "
        "600 with its URL, if that holds a key",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER",
        help="with the URL of a published run: a new folder for what was fetched, in the form of a "
        "run's folder, if all of it is what was published",
    )  # fmt: skip
    parser.add_argument(
        "--tee", type=Path, metavar="POLICY",
        help="policy file by which the evidence of the sites' machines must hold; it makes the "
        "claim attestations required",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Judge the claims and print the verdicts. Returns the exit code.

    The exit code is 0 if all required claims PASS, 1 if a claim is FAIL, and 3 if a required
    claim is NOT_RUN or SIMULATED.
    """
    # Imported here, because no other command needs these modules.
    from dilocox.record.bundles.fetch import fetched as fetched_bundles
    from dilocox.record.bundles.fetch import is_bundled, open_bundles
    from dilocox.record.verify.audit_sampling import read_randomness
    from dilocox.record.verify.places import Places
    from dilocox.record.verify.remote import fetched
    from dilocox.record.verify.witness_claims import Witnesses

    _check_keep(options.keep)
    _check_seen(options.seen)
    witnesses = Witnesses.parse(options.witness, options.quorum, options.cosigned)
    with contextlib.ExitStack() as held:
        folder, stores = Path(options.run), list(options.store)
        bundles = None
        if not (folder / "record").is_dir() and is_bundled(options.run):
            place = open_bundles(options.run, PATIENCE)
            bundles = held.enter_context(fetched_bundles(place, options.key))
            folder = bundles.folder
        elif options.keep is not None:
            raise ConfigError(f"--keep: {options.run} is no run that was published in bundles")
        elif "://" in options.run:
            folder = held.enter_context(fetched(options.run))
            stores.insert(0, f"{options.run.rstrip('/')}/record/store")
        randomness = read_randomness(options.randomness) if options.randomness else {}
        if options.randomness and not randomness:
            raise RecordError(f"{options.randomness}: holds no value of public randomness")
        code = _judge(
            Places(
                folder,
                stores,
                options.model,
                options.data,
                options.start,
                options.key,
                options.seen,
                options.release_key,
                options.auditor,
                randomness,
                options.adapters,
                _heads(options.chain, options.rpc),
                witnesses,
                _machines(options.tee, randomness),
            ),
            options.json,
            bundles,
        )
        if options.keep is not None and bundles is not None:
            _keep(bundles, options.keep)
        return code


def _check_keep(target: Path | None) -> None:
    """Raise `ConfigError` for a folder that has files, before anything is fetched."""
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--keep {target}: is there already; name a new or empty folder")


def _check_seen(kept: Path | None) -> None:
    """Raise `ConfigError` for a file that holds no checkpoint, as it says nothing of the log."""
    from dilocox.record.log.signed_note import split_note

    if kept is None:
        return
    try:
        split_note(kept.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecordError) as error:
        wrong = "not a text" if isinstance(error, UnicodeDecodeError) else error
        reason = getattr(error, "strerror", None) or wrong
        raise ConfigError(
            f"--seen {kept}: is not a checkpoint ({reason}); name a copy of record/checkpoint that "
            "you kept"
        ) from None


def _keep(found: Fetched, target: Path) -> None:
    """Copy what was fetched to `target`. Raises `RecordError` if it is not what was published."""
    if found.fault:
        raise RecordError(f"--keep {target}: nothing is kept, since {found.fault}")
    # Under another name first: after a cut nobody must take a part of a run for the run.
    part = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.part")
    try:
        shutil.copytree(found.folder, part)
        part.replace(target)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        # `copytree` goes on after an error, and raises all of them: (source, target, why) each.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise RecordError(f"--keep {target}: cannot be written ({reason})") from None
    print(f"kept in {target}", file=sys.stderr)


def _heads(chain: Path | None, rpc: str | None) -> ChainHeads | None:
    """Return what the chain says; None if it is not asked."""
    if chain is None:
        if rpc is not None:
            raise ConfigError("--rpc: name the run's chain.json, too, with --chain")
        return None
    load_web3()
    from dilocox.tools.settlement.chain_heads import chain_heads
    from dilocox.tools.settlement.run_on_chain import read_rpc

    return chain_heads(chain, None if rpc is None else read_rpc(rpc))


def _machines(policy: Path | None, randomness: Mapping[int, bytes]) -> MachineJudge | None:
    """Return what judges evidence of machines; None if the reader gives no policy."""
    if policy is None:
        return None
    from dilocox.tools.attestation.policy import PolicyFile
    from dilocox.tools.attestation.run_judge import RunJudge

    return RunJudge(PolicyFile.read(policy), datetime.datetime.now(datetime.UTC), randomness)


def judged(
    folder: Path,
    stores: Sequence[str] = (),
    model: Path | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Judge the run in `folder`, and return the verdicts in the form that `--json` prints.

    Args:
        stores: further stores of payloads, folders or URLs.
        model: the model's folder. None: `model` in `folder`.
        data: folder of token files that are checked, too. None: no token files are checked.

    Raises:
        RecordError: the folder has no record.
    """
    from dilocox.record.verify.places import Places
    from dilocox.record.verify.report_json import as_json

    places = Places(folder, list(stores), model, data)
    return as_json(_verified(places, Console(stderr=True)))


def _verified(
    places: Places, console: Console, quiet: bool = False, bundles: Fetched | None = None
) -> Report:
    from dilocox.record.verify.published_bundles import verify_fetched
    from dilocox.record.verify.verify import verify

    judge = verify if bundles is None else partial(verify_fetched, bundles)
    if quiet or not console.is_terminal:
        return judge(places, lambda what, share: None)
    return _with_bar(judge, places, console)


def _judge(places: Places, as_json_text: bool, bundles: Fetched | None) -> int:
    console = Console(highlight=False, soft_wrap=True)
    report = _verified(places, console, as_json_text, bundles)
    if as_json_text:
        from dilocox.record.verify.report_json import as_json

        print(json.dumps(as_json(report), indent=2))
    else:
        show(report, console)
    return report.exit_code


def _with_bar(
    judge: Callable[[Places, ShownProgress], Report], places: Places, console: Console
) -> Report:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading the log", total=1.0)
        return judge(
            places, lambda what, share: bar.update(task, description=what, completed=share)
        )


def show(report: Report, console: Console) -> None:
    """Print every claim with its verdict, then the conclusion."""
    console.print(
        f"run {escape(plain(report.run or '(unknown)'))}, log key {escape(plain(report.log))}"
    )
    for finding in report.findings:
        _show_claim(finding, console)
    audited = any(each.claim.name == "audits" for each in report.findings)
    console.print(AUDITS_PROVE if audited else NOBODY_PROVES)
    from dilocox.record.verify.claims import HISTORY

    lacking = sorted({
        each.verdict for each in report.findings if each.claim.required and each.verdict != "PASS"
    })  # fmt: skip
    since = any(each.claim == HISTORY and each.verdict != "PASS" for each in report.findings)
    ends = {
        0: "verified: all required claims PASS"
        + (", from a signed state on; what led to it is not verified (claim history)" * since),
        1: "NOT verified: a claim is FAIL",
        3: "not verified: a required claim is " + " or ".join(lacking),
    }
    colour = {0: "green", 1: "bold red", 3: "yellow"}[report.exit_code]
    console.print(f"[{colour}]{ends[report.exit_code]}[/]")


def _show_claim(finding: Finding, console: Console) -> None:
    claim, colour = finding.claim, COLOURS[finding.verdict]
    optional = "" if claim.required else " (not required)"
    reason = escape(plain(finding.reason))
    console.print(f"[{colour}]{finding.verdict:<7}[/]  {claim.name:<11} {reason}{optional}")
    console.print(f"[dim]{'':9}proves: {escape(claim.proves)}[/]")
    console.print(f"[dim]{'':9}not:    {escape(claim.not_proved)}[/]")
