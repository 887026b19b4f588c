"""`dilocox publish`: gather a run in one folder, for a web server."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "gather page, record, model and how to check them in one folder, without keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dilocox publish`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the coordinator's run folder")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="a new folder, or an empty one"
    )
    parser.add_argument(
        "--from", dest="sites", action="append", default=[], type=Path, metavar="SITE_FOLDER",
        help="a site's run folder, or a copy of it; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="a further store of payloads, folder or URL; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="store_true", help="hard links in place of copies of payloads"
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Publish and say what; exit code."""
    # Not above: other commands need none of it.
    from dilocox.tools.release.publish import find, publish
    from dilocox.utils.formatting import size

    sources = find(options.run, options.sites, options.store)
    made = publish(sources, options.to, link=options.link)
    print(f"{made.objects} payloads and states, {size(made.size)} in all; verified")
    print(f"how to check it: {made.folder / 'CHECK.md'}; its page: {made.folder / 'report.html'}")
    print(made.folder)
    return 0
