"""`dilocox availability`: ask sites' stores for pieces, or rebuild a record from them."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.errors import ConfigError, RecordError
from dilocox.utils.plain_text import plain

if TYPE_CHECKING:
    from dilocox.tools.availability.restore import Restored
    from dilocox.tools.availability.sampling import Sampled

HELP = "ask the sites' stores for pieces of a run's payloads, or rebuild the payloads from them"
SAMPLES = 30
"""Samples by default. At half rate, pieces that are withheld of all cuts escape with 2^-30."""
SECONDS = 60.0
_FEW = 0.1
"""Share of cuts for which a second chance is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox availability` to `parser`."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its URL (as in fsspec)")
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="a site's store, folder or URL, once for each site; RUN/record/store is asked, too",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"number of random pieces (default: {SAMPLES})"
    )
    parser.add_argument(
        "--round", type=int, metavar="N", help="sample the pieces of this round alone"
    )
    parser.add_argument(
        "--rebuild", type=Path, metavar="DIR",
        help="rebuild all payloads into this store, for `dilocox verify --store DIR`; a further "
        "call goes on where one was stopped",
    )  # fmt: skip
    parser.add_argument(
        "--key", metavar="NAME+HASH+KEY", help="the log's key, as its owner has told it to you"
    )
    parser.add_argument(
        "--timeout", type=float, default=SECONDS, metavar="SECONDS",
        help=f"time for one answer of a store, beside that for its bytes (default: {SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Sample or rebuild, and print the result. Returns 0 if it is PASS, 1 if it is FAIL."""
    # Imported here, because no other command needs these modules.
    from dilocox.record.pieces import erasure
    from dilocox.record.verify.piece_stores import PieceStores
    from dilocox.record.verify.remote import fetched_log
    from dilocox.record.verify.signed_cuts import read_cuts
    from dilocox.tools.availability.restore import restore
    from dilocox.tools.availability.sampling import sample

    _check(options)
    if options.rebuild is not None and not erasure.is_installed():
        raise RecordError(erasure.MISSING)
    with contextlib.ExitStack() as held:
        folder = Path(options.run)
        if "://" in options.run:
            folder = held.enter_context(fetched_log(options.run))
        signed = read_cuts(folder, options.key)
        own = f"{options.run.rstrip('/')}/record/store"
        there = "://" in options.run or Path(own).is_dir()
        stores = PieceStores([*([own] if there else []), *options.store], options.timeout)
        if options.rebuild is not None:
            restored = restore(signed, stores, options.rebuild)
            _print(options, signed.run, *_told_restored(restored, options.rebuild))
            return 0 if restored.passed else 1
        # The system's randomness: no store can know what it will be asked for.
        draw = random.SystemRandom()
        samples = SAMPLES if options.samples is None else options.samples
        sampled = sample(signed, stores, samples, draw, options.round)
        _print(options, signed.run, *_told_sampled(sampled, len(signed.cuts), options.round))
        return 0 if sampled.passed else 1


def _check(options: argparse.Namespace) -> None:
    if options.samples is not None and options.samples < 1:
        raise ConfigError(f"--samples {options.samples}: give at least 1")
    if not 0 < options.timeout < math.inf:  # nor NaN
        raise ConfigError(f"--timeout {options.timeout:g}: give seconds above 0")
    if options.rebuild is not None and (options.samples, options.round) != (None, None):
        raise ConfigError(
            "--rebuild takes all pieces that it needs: leave --samples and --round out"
        )


def _told_sampled(
    found: Sampled, cuts: int, round_: int | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the lines and the JSON of a sample."""
    answered, verdict = sum(found.answered.values()), "PASS" if found.passed else "FAIL"
    by_site = ", ".join(
        f"{site} {found.answered[site]} of {n}" for site, n in sorted(found.asked.items())
    )
    of = f"{found.cuts} cuts" if round_ is None else f"the {found.cuts} cuts of round {round_}"
    lines = [
        f"{verdict}  {answered} of {found.samples} samples of {of} answered ({by_site}); "
        f"{found.needed} of {found.pieces} pieces give a cut back"
    ]
    if found.uncertified:
        lines.append(f"not sampled: {found.uncertified} cuts without a certificate")
    lines += [f"lost: {each}" for each in found.lost]
    lines += _told_stores(found.wrong, found.dead)
    if found.passed:
        lines.append(
            f"If no cut could be rebuilt from these stores, the sample would pass with a chance of "
            f"at most {found.chance():.1e}; if {_FEW:.0%} of the cuts could not, "
            f"{found.chance(_FEW):.1e}."
        )
    return lines, {
        "verdict": verdict, "cuts": cuts, "sampled_cuts": found.cuts,
        "uncertified": found.uncertified, "samples": found.samples,
        "answered": dict(found.answered), "asked": dict(found.asked), "lost": found.lost,
        "wrong": found.wrong, "dead": found.dead, "chance": found.chance(),
    }  # fmt: skip


def _told_restored(found: Restored, target: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the lines and the JSON of a rebuilt record."""
    verdict = "PASS" if found.passed else "FAIL"
    lines = [
        f"{verdict}  payloads of {found.rebuilt} of {found.cuts} cuts are in {target}, "
        f"{found.size / 1e6:.1f} MB"
    ]
    lines += [f"lost: {each}" for each in found.lost]
    lines += _told_stores(found.wrong, found.dead)
    return lines, {
        "verdict": verdict, "cuts": found.cuts, "rebuilt": found.rebuilt, "bytes": found.size,
        "lost": found.lost, "wrong": found.wrong, "dead": found.dead,
    }  # fmt: skip


def _told_stores(wrong: list[str], dead: dict[str, str]) -> list[str]:
    return [
        *(f"wrong: {each}" for each in wrong),
        *(f"not asked any more: {place}: {why}" for place, why in sorted(dead.items())),
    ]


def _print(
    options: argparse.Namespace, run_id: str, lines: list[str], said: dict[str, Any]
) -> None:
    if options.json:
        print(json.dumps({"run": run_id, **said}, indent=2))
        return
    print(f"run {run_id}")
    for line in lines:
        print(plain(line))
    sys.stdout.flush()
