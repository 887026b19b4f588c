"""`dilocox lab`: train a run on shaped links, change the links of a running lab, clean up."""

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
    """A parser that inserts the first of its actions if the user names none."""

    actions: tuple[str, ...] = ()
    """Names of the actions. If the first argument is none of them, `actions[0]` is inserted."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as `argparse` does, with the missing action inserted."""
        words = list(sys.argv[1:] if args is None else args)
        if self.actions and words and words[0] not in (*self.actions, "-h", "--help"):
            words.insert(0, self.actions[0])
        return super().parse_known_args(words, namespace)


def add_to(
    commands: Any,
    common: argparse.ArgumentParser,
    run_file: argparse.ArgumentParser,
) -> None:
    """Add the command `lab` to the sub-parsers `commands`, whose class is `Parser`.

    `common` and `run_file` hold options that several commands share.
    """
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
        help="exceptions: the line of one site, or the rate between two sites",
    )
    run.add_argument(
        "--sites", type=int, metavar="N", help="number of sites (default: as in the run file)"
    )
    run.add_argument(
        "--delay",
        type=_delay,
        default=0.0,
        metavar="30ms",
        help="delay of every packet in each direction: it adds twice as much to a round trip",
    )
    run.add_argument(
        "--quota", type=float, metavar="CORES",
        help="processor cores per site (default: all sites share 90%% of all cores)",
    )  # fmt: skip
    run.add_argument(
        "--alone",
        action="store_true",
        help="before the run, train all sites at the same time without exchanges, to measure the "
        "speed without any exchange",
    )
    run.add_argument("--warm-up", type=int, default=2, metavar="N", help="rounds not measured (2)")
    run.add_argument("--trace", action="store_true", help="write trace.json, a Chrome trace")
    run.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    run.add_argument("--overwrite", action="store_true", help="replace an earlier run of the lab")
    run.set_defaults(call=_run)
    change = actions.add_parser("set", parents=[common], help="change links of a running lab")
    change.add_argument("settings", nargs="*", metavar="SITE[-SITE]=RATE")
    change.add_argument("--all", dest="line", metavar="LINE", help="the line of every site")
    change.add_argument(
        "--lab",
        type=int,
        metavar="PROCESS",
        help="process number of the lab, if several are running",
    )
    change.set_defaults(call=_set)
    clean = actions.add_parser(
        "clean", parents=[common], help="remove processes and networks that ended labs have left"
    )
    clean.set_defaults(call=_clean)


def _delay(text: str) -> float:
    """Return the seconds of a text such as `30ms` or `0.1s`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as 30ms or 0.1s")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def _run(options: argparse.Namespace) -> int:
    reason = unsupported_reason()
    if reason is not None:
        raise LabError(f"a lab cannot be made here: {reason}")
    # Imported here, because importing torch takes seconds and the other actions do not need it.
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
    """Return the process number of a running lab: `asked`, or if None that of the only lab.

    Raises `LabError` if `asked` is not running, or if it is None and several or no labs run.
    """
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
