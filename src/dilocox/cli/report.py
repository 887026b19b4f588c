"""`dilocox report`: write a run's page to a file, or serve it while the run goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.errors import ConfigError

HELP = "write a run's page: one HTML file that needs no network"
PORT = 8642


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox report` to `parser`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="file of the page (default: RUN/report.html, or RUN/compliance.md)",
    )  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true",
        help="judge the claims of `dilocox verify`, and show the verdicts on the page",
    )  # fmt: skip
    parser.add_argument(
        "--compliance", action="store_true",
        help="write compliance.md instead: what the record can fill of the documents that rules "
        "ask for, and what it cannot",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model's folder (default: RUN/model)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="folder of the token files (default: as the run file says)",
    )  # fmt: skip
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="with --verify: a further store of payloads, folder or URL; may be given several "
        "times",
    )  # fmt: skip
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve the page until Ctrl-C; the page refreshes itself",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"with --live: port to listen on (default: {PORT}; 0: any free port)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="with --live: address to listen on (default: 127.0.0.1, only this machine)",
    )  # fmt: skip
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path, or serve it. Returns the exit code 0.

    Raises `ConfigError` if options contradict each other, or if the page cannot be written.
    """
    if options.live and (options.out or options.verify or options.compliance):
        raise ConfigError(
            "--live serves the page: --out, --verify and --compliance cannot be given with it"
        )
    if options.live and (options.model or options.data):
        raise ConfigError("--live shows the run as it goes on: omit --model and --data")
    if options.store and not options.verify:
        raise ConfigError("--store needs --verify: add --verify, or omit --store")
    if options.live:
        from dilocox.tools.report.live import serve

        serve(options.run, options.host, options.port)
        return 0
    from dilocox.tools.report.compliance import compliance_text
    from dilocox.tools.report.folder import read_run
    from dilocox.tools.report.page import build
    from dilocox.tools.report.render import render
    from dilocox.utils.storage import overwrite

    files = read_run(options.run, options.model, options.data)
    claims = _claims(options) if options.verify else None
    if options.compliance:
        text, name = compliance_text(files, time.time(), claims), "compliance.md"
    else:
        text, name = render(build(files, time.time(), claims)), "report.html"
    target = options.out or options.run / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        overwrite(target, text)
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); name another file with --out"
        ) from None
    for line in files.missing:
        print(f"not shown: {line}")
    print(target)
    return 0


def _claims(options: argparse.Namespace) -> Mapping[str, Any]:
    from dilocox.cli.verify import judged

    return judged(options.run, options.store, options.model, options.data)
