"""`dilocox report`: a run's page, written to a file or served while the run goes on."""

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
    """Arguments of `dilocox report`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (default: RUN/report.html)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="judge the claims of `dilocox verify` and show them"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the model, if not RUN/model")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="the token files, if not where the run file says",
    )
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="with --verify: a further store of payloads, as `dilocox verify` takes it",
    )  # fmt: skip
    parser.add_argument(
        "--live", action="store_true", help="serve the page, which renews itself, until Ctrl-C"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"with --live (default: {PORT}; 0: any free one)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="with --live: address to listen on (default: this machine only)",
    )  # fmt: skip
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and say where, or serve it; exit code."""
    if options.live and (options.out or options.verify):
        raise ConfigError("--live serves the page: leave --out and --verify out")
    if options.live and (options.model or options.data):
        raise ConfigError("--live shows a run that goes on: leave --model and --data out")
    if options.store and not options.verify:
        raise ConfigError("--store: is for --verify; add that, or leave this out")
    if options.live:
        from dilocox.tools.report.live import serve

        serve(options.run, options.host, options.port)
        return 0
    from dilocox.tools.report.folder import read_run
    from dilocox.tools.report.page import build
    from dilocox.tools.report.render import render

    files = read_run(options.run, options.model, options.data)
    claims = _claims(options) if options.verify else None
    text = render(build(files, time.time(), claims))
    target = options.out or options.run / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
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
