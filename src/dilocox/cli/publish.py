"""`dilocox publish`: collect a run in one folder for a web server, or put it into storage."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.cli.chain import add_password
from dilocox.cli.coins import coin
from dilocox.config.outer import RATE, rate_of
from dilocox.errors import ConfigError, RecordError
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.web3_package import load_web3

if TYPE_CHECKING:
    from dilocox.tools.storage.destination import Destination

HELP = "collect page, record and model in one folder, or put them into storage, without keys"
EVERY = 10
"""Rounds of a bundle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox publish` to `parser`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the coordinator's run folder")
    parser.add_argument(
        "--to", required=True, metavar="PLACE",
        help="a new or empty folder, or a URL as in fsspec (s3://…, file:///…), or a node of 0G "
        "Storage (zerog://HOST:PORT): at a URL the run is put in bundles",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="sites", action="append", default=[], type=Path, metavar="SITE_FOLDER",
        help="a site's run folder, or a copy of it; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="a further store of payloads, folder or URL; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="store_true", help="make hard links to payloads instead of copies"
    )
    parser.add_argument(
        "--every", type=_rounds, metavar="N",
        help=f"with a URL: rounds of a bundle (default: {EVERY})",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true",
        help="with a URL: publish while the run goes on, until it has ended",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=_rate, metavar="RATE",
        help="with a URL: upload at most this much, such as 10mbit (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--rpc",
        metavar="URL",
        help="with zerog://: server of the chain that sells the storage; or a file of mode 600 "
        "with its URL, if that holds a key",
    )
    parser.add_argument(
        "--contract", metavar="ADDRESS", help="with zerog://: the Flow contract of the storage"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="with zerog://: file of the key that pays"
    )
    add_password(parser)
    parser.add_argument(
        "--most-fee", type=coin, metavar="COINS",
        help="with zerog://: most that one transaction may cost, with the storage that it pays for "
        "(default: 0.1)",
    )  # fmt: skip
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Publish the run and print what was written. Returns the exit code 0."""
    if "://" in options.to:
        return _to_storage(options)
    _refuse_zerog(options)
    for name in ("every", "follow", "limit"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name}: is for bundles; give --to a URL, such as file:///srv/run, or leave it "
                "out"
            )
    # Imported here, because no other command needs these modules.
    from dilocox.tools.release.local_paths import told_paths
    from dilocox.tools.release.publish import find, publish
    from dilocox.utils.formatting import size

    sources = find(options.run, options.sites, options.store)
    made = publish(sources, Path(options.to), link=options.link)
    print(f"{made.objects} payloads and states, {size(made.size)} in all; verified")
    for line in told_paths(made.folder):
        print(line, file=sys.stderr)
    print(f"how to check it: {made.folder / 'CHECK.md'}; its page: {made.folder / 'report.html'}")
    print(made.folder)
    return 0


def _to_storage(options: argparse.Namespace) -> int:
    from dilocox.record.bundles.zerog_node import is_zerog
    from dilocox.tools.storage.follow import publish_once, publish_to_the_end
    from dilocox.tools.storage.publisher import Publisher
    from dilocox.tools.storage.run_source import RunSource
    from dilocox.tools.storage.uplink import Uplink
    from dilocox.utils.formatting import size

    if options.link:
        raise ConfigError("--link: is for a folder; leave it out, as bundles hold copies")
    place = _zerog(options) if is_zerog(options.to) else _files(options)
    source = RunSource(options.run, tuple(options.sites), tuple(options.store))
    publisher = Publisher(source, place, options.every or EVERY, Uplink(options.limit))
    publish: Callable[[Publisher], None] = publish_to_the_end if options.follow else publish_once
    publish(publisher)
    print(f"{publisher.bundles} new bundles, {size(publisher.size)}; uploaded to {place.url}")
    print(f"published: {publisher.newest}")
    if not publisher.ended:
        print(
            f"the run goes on: {publisher.unpublished} statements are not published yet; publish "
            "again later, or with --follow"
        )
    print(f"how to check it: dilocox verify {shlex.quote(place.published)}")
    return 0


def _files(options: argparse.Namespace) -> Destination:
    from dilocox.record.bundles.place import Place
    from dilocox.tools.storage.destination import FilesDestination
    from dilocox.tools.storage.follow import PATIENCE

    _refuse_zerog(options)
    return FilesDestination(Place.to_publish(options.to, PATIENCE))


def _refuse_zerog(options: argparse.Namespace) -> None:
    """Raise `ConfigError` if an option is given that only 0G Storage has."""
    for name in ("rpc", "contract", "key", "password_file", "most_fee"):
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: is for --to zerog://HOST:PORT; leave it out")


def _zerog(options: argparse.Namespace) -> Destination:
    """Open 0G Storage. Nothing is asked of its node, nor of the chain."""
    missing = [each for each in ("sha3", "web3") if importlib.util.find_spec(each) is None]
    if missing:
        raise RecordError("packages for 0G Storage are missing: pip install 'dilocox[zerog]'")
    load_web3()
    from dilocox.record.bundles.zerog_node import ZerogUrl
    from dilocox.tools.settlement.keystore import load_key, read_password
    from dilocox.tools.settlement.run_on_chain import read_rpc
    from dilocox.tools.storage.follow import PATIENCE
    from dilocox.tools.storage.zerog_destination import ZerogAccess, ZerogDestination

    url = ZerogUrl.parse(options.to)
    if url.root:
        raise ConfigError(f"--to: leave the root out: {url.text}")
    for name in ("rpc", "contract", "key"):
        if getattr(options, name) is None:
            raise ConfigError(
                f"--{name}: is missing; 0G Storage is paid for on a chain, so give --rpc, "
                "--contract and --key"
            )
    account = load_key(options.key, read_password(options.password_file, options.key))
    fee = FEE if options.most_fee is None else options.most_fee
    access = ZerogAccess(url, read_rpc(options.rpc), options.contract, account, fee)
    return ZerogDestination(
        access, options.run / "coordinator", PATIENCE, tell=lambda line: print(line, flush=True)
    )


def _rounds(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of rounds, 1 or more")
    return int(text)


def _rate(text: str) -> int:
    """Parse a rate; return bytes per second."""
    if not re.fullmatch(RATE, text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate such as 10mbit or 1.5gbit")
    try:
        return rate_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
