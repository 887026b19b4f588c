"""`dilocox publish`: collect the files of a run in one folder, for a web server."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "collect page, record, model and instructions to check them in one folder, without keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox publish` to `parser`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the coordinator's run folder")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="a new or empty folder"
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
        "--link", action="store_true", help="make hard links to payloads instead of copies"
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Publish the run and print what was written. Returns the exit code 0."""
    # Imported here, because no other command needs these modules.
    from dilocox.tools.release.publish import find, publish
    from dilocox.utils.formatting import size

    sources = find(options.run, options.sites, options.store)
    made = publish(sources, options.to, link=options.link)
    print(f"{made.objects} payloads and states, {size(made.size)} in all; verified")
    print(f"how to check it: {made.folder / 'CHECK.md'}; its page: {made.folder / 'report.html'}")
    print(made.folder)
    return 0
