"""`dilocox lab`: train a run on shaped links, change links while it goes on, clean up."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilocox.tools.testbed import cleanup, registry
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Links, parse_line, show_rate
from dilocox.tools.testbed.testbed import unsupported_reason

EPILOG = """\
RATE is 200kbit, 1.5mbit, 1gbit or none; LINE is a RATE, or UP/DOWN.

examples:
  dilocox lab run.toml --link 1gbit
  dilocox lab run.toml --sites 4 --link 20mbit/100mbit --links paris-lyon=5mbit --delay 30ms
  dilocox lab set paris-lyon=1mbit paris=10mbit
  dilocox lab clean
"""


class Parser(argparse.ArgumentParser):
    """A parser for which a missing action can be filled in."""

    actions: tuple[str, ...] = ()
    """If there are any, the first is put before words that begin with none of them."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As of any parser."""
        words = list(sys.argv[1:] if args is None else args)
        if self.actions and words and words[0] not in (*self.actions, "-h", "--help"):
            words.insert(0, self.actions[0])
        return super().parse_known_args(words, namespace)


def add_to(
    commands: Any,
    common: argparse.ArgumentParser,
    run_file: argparse.ArgumentParser,
) -> None:
    """Add `lab` to the sub-parsers `commands`, which are of class `Parser`; the other two hold
    options that commands share."""
    lab: Parser = commands.add_parser(
        "lab",
        help="train a run on shaped links on this machine, and measure",
        usage="dilocox lab RUN.toml --link LINE ... | lab set ... | lab clean",
        description="Train a run's sites on shaped links on this machine, and measure.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lab.actions = ("run", "set", "clean")
    actions = lab.add_subparsers(
        prog="dilocox lab",
        title="actions",
        metavar="ACTION",
        required=True,
        parser_class=argparse.ArgumentParser,
    )
    run = actions.add_parser(
        "run",
        parents=[common, run_file],
        help="train RUN.toml (the word `run` may be left out)",
    )
    run.add_argument(
        "--link", required=True, metavar="LINE", help="every site's access line: RATE or UP/DOWN"
    )
    run.add_argument(
        "--links",
        nargs="+",
        action="extend",
        default=[],
        metavar="SITE[-SITE]=RATE",
        help="what differs: a site's line, or the rate between two sites",
    )
    run.add_argument("--sites", type=int, metavar="N", help="so many sites instead of the file's")
    run.add_argument(
        "--delay",
        type=_delay,
        default=0.0,
        metavar="30ms",
        help="added to every packet each way: a round trip takes twice as long",
    )
    run.add_argument(
        "--quota", type=float, metavar="CORES", help="per site (default: 90%% of all, shared)"
    )
    run.add_argument(
        "--alone",
        action="store_true",
        help="also train every site by itself before, at the same time as the others: the speed "
        "without any exchange",
    )
    run.add_argument("--warm-up", type=int, default=2, metavar="N", help="rounds not measured (2)")
    run.add_argument("--trace", action="store_true", help="write trace.json, a Chrome trace")
    run.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    run.add_argument("--overwrite", action="store_true", help="replace an earlier run of the lab")
    run.set_defaults(call=_run)
    change = actions.add_parser(
        "set", parents=[common], help="change links of the lab that is going on"
    )
    change.add_argument("settings", nargs="*", metavar="SITE[-SITE]=RATE")
    change.add_argument("--all", dest="line", metavar="LINE", help="the line of every site")
    change.add_argument(
        "--lab", type=int, metavar="PROCESS", help="which one, if several are going on"
    )
    change.set_defaults(call=_set)
    clean = actions.add_parser(
        "clean", parents=[common], help="remove what labs have left that are no more"
    )
    clean.set_defaults(call=_clean)


def _delay(text: str) -> float:
    """Seconds of `30ms` or `0.1s`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as 30ms or 0.1s")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def _run(options: argparse.Namespace) -> int:
    reason = unsupported_reason()
    if reason is not None:
        raise LabError(f"a lab cannot be made here: {reason}")
    # Imported here: torch costs seconds, which the other actions need not wait for.
    from dilocox.config.run_config import load_run
    from dilocox.tools.testbed.session import Session

    Session(
        load_run(options.run, options.overrides),
        options.sites,
        overwrite=options.overwrite,
        warm_up=options.warm_up,
        trace=options.trace,
        alone=options.alone,
    ).hold(options.link, options.links, options.quota, options.delay, options.json)
    return 0


def _set(options: argparse.Namespace) -> int:
    if not options.settings and options.line is None:
        raise LabError("nothing to set: give SITE=RATE, SITE-SITE=RATE or --all LINE")
    owner = _going_on(options.lab)
    sites, words = registry.read(owner).sites, list(options.settings)
    if options.line is not None:
        words.insert(0, f"every site {options.line}")

    def changed(links: Links) -> Links:
        if options.line is not None:
            links = links.with_all(parse_line(options.line), sites)
        return links.changed(options.settings, sites)

    links = registry.change_links(owner, changed, " ".join(words)).links
    for site in sites:
        print(f"{site:<18}{links.line(site)}")
    for pair, rate in links.pairs.items():
        print(f"{'-'.join(pair):<18}{show_rate(rate)}")
    return 0


def _going_on(asked: int | None) -> int:
    """Process number of the lab that is meant. Raises `LabError`."""
    _need_root()
    alive = [owner for owner in registry.owners() if registry.is_alive(owner)]
    if asked is not None and asked not in alive:
        raise LabError(f"process {asked} has no lab; there are: {_listed(alive)}")
    if asked is None and len(alive) != 1:
        more = "; choose one with --lab PROCESS" if alive else ""
        raise LabError(f"labs that are going on: {_listed(alive)}{more}")
    return alive[0] if asked is None else asked


def _listed(owners: Sequence[int]) -> str:
    return ", ".join(f"{n} ({', '.join(registry.read(n).sites)})" for n in owners) or "none"


def _clean(_: argparse.Namespace) -> int:
    _need_root()
    removed = cleanup.remove_left_over()
    for name in removed:
        print(f"removed {name}")
    if not removed:
        print("nothing was left behind")
    alive = [owner for owner in registry.owners() if registry.is_alive(owner)]
    if alive:
        print(f"going on, left alone: {_listed(alive)}")
    return 0


def _need_root() -> None:
    if os.geteuid() != 0:
        raise LabError("labs belong to root: run this as root")
