"""`dilocox witness`: cosign checkpoints of runs' logs, and have a run's log cosigned."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.cli.standard_input import given_text
from dilocox.errors import ConfigError, RecordError
from dilocox.utils.plain_text import plain
from dilocox.utils.secret_text import secret_problem

if TYPE_CHECKING:
    from dilocox.tools.witness.asking import WitnessAddress

HELP = "cosign checkpoints of logs as a witness, and have a run's log cosigned"
HOST, PORT = "127.0.0.1", 8643
EVERY = 60.0
"""Seconds between two looks of `watch`."""
MOST_EVERY = 1e6
"""Most seconds between two looks or questions."""
LAST_TRIES = 5
"""Most questions of `ask --every` after the run's end, if a witness does not cosign or the log
still grows."""


def add_arguments(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the actions of `dilocox witness` to `parser`. `common`: arguments of every command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(
        name: str, call: Callable[[argparse.Namespace], int], help_: str
    ) -> argparse.ArgumentParser:
        found = actions.add_parser(name, parents=[common], help=help_)
        found.set_defaults(call=call)
        return found

    making = action("create", _create, "make a witness's key and folder; print its public key")
    _add_folder(making)
    making.add_argument(
        "--name", required=True, metavar="NAME",
        help="name in its cosignatures, such as witness.example.org/w1",
    )  # fmt: skip
    trusting = action("trust", _trust, "add a log that the witness may cosign")
    _add_folder(trusting)
    trusting.add_argument("key", metavar="KEY", help="the log's public key, NAME+HASH+KEY")
    serving = action("serve", _serve, "answer logs that ask (add-checkpoint of C2SP)")
    _add_folder(serving)
    serving.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST})")
    serving.add_argument(
        "--port", type=int, default=PORT,
        help=f"port to listen on (default: {PORT}; 0: any free port)",
    )  # fmt: skip
    watching = action("watch", _watch, "look at logs where they are published, and cosign them")
    _add_folder(watching)
    watching.add_argument(
        "places", metavar="RUN", nargs="+", help="a run's folder, or its URL (as in fsspec)"
    )
    watching.add_argument(
        "--every", type=float, default=EVERY, metavar="SECONDS",
        help=f"time between two looks (default: {EVERY:g}); 0: look once",
    )  # fmt: skip
    watching.add_argument(
        "--beside", action="store_true",
        help="write the cosignature beside the log, too; each RUN is a folder",
    )  # fmt: skip
    asking = action("ask", _ask, "ask witnesses to cosign a run's log")
    asking.add_argument("run", metavar="RUN", type=Path, help="the coordinator's run folder")
    asking.add_argument(
        "--witness", required=True, action="append", nargs=2, metavar=("KEY", "URL"),
        help="a witness's public key, and the address where it serves; may be given several times",
    )  # fmt: skip
    asking.add_argument(
        "--every", type=float, default=0.0, metavar="SECONDS",
        help="ask again and again beside the run, until it has ended (default: once, about the "
        "checkpoint on standard input if there is one)",
    )  # fmt: skip


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the witness's own folder")


def _create(options: argparse.Namespace) -> int:
    from dilocox.tools.witness.folder import create

    print(create(options.folder, options.name).key)
    return 0


def _trust(options: argparse.Namespace) -> int:
    from dilocox.record.log.signed_note import NoteKey
    from dilocox.tools.witness.folder import WitnessFolder

    key = NoteKey.parse(options.key)
    added = WitnessFolder(options.folder).trust(key)
    print(f"log {key.name}: {'added' if added else 'was there already'}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from dilocox.tools.witness.folder import WitnessFolder
    from dilocox.tools.witness.server import serve
    from dilocox.tools.witness.witness import Witness

    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: give 1 to 65535, or 0 for any free port")
    with WitnessFolder.opened(options.folder) as folder:

        def ready(url: str) -> None:
            _say(f"witness {folder.key} at {url}")

        asyncio.run(serve(Witness(folder), options.host, options.port, _say, ready))
    return 0


def _watch(options: argparse.Namespace) -> int:
    """Return 0 if every log was cosigned at the last look, else 1."""
    from dilocox.tools.witness.folder import WitnessFolder
    from dilocox.tools.witness.watching import look
    from dilocox.tools.witness.witness import Witness

    _check_every(options.every)
    if options.beside and any("://" in place for place in options.places):
        raise ConfigError("--beside: needs folders, since it writes into them; leave it out")
    for problem in filter(None, map(secret_problem, options.places)):
        raise ConfigError(problem)
    troubles = _Troubles()
    with WitnessFolder.opened(options.folder) as folder:
        witness = Witness(folder)
        while True:
            for place in options.places:
                try:
                    seen = look(witness, place, options.beside)
                except (RecordError, OSError) as error:
                    troubles.tell(place, str(error))
                    continue
                troubles.over(place)
                if seen.fresh:
                    _say(f"cosigned {seen.size} statements of log {seen.origin}: {seen.file}")
            if not options.every:
                return 1 if troubles.left else 0
            time.sleep(options.every)


def _ask(options: argparse.Namespace) -> int:
    """Return 0 if every witness has cosigned the newest checkpoint, else 1."""
    from dilocox.record.log.run_end import has_summary
    from dilocox.tools.witness.asking import ask

    _check_every(options.every)
    # As the hook of a run it gets a checkpoint, which may be older than the newest one: newer ones
    # wait for a standby.
    note = None if options.every else given_text()
    witnesses, troubles = _addresses(options.witness), _Troubles()
    known: dict[str, int] = {}
    tries, size = LAST_TRIES, -1
    while True:
        ended = has_summary(options.run)
        try:
            answers = ask(options.run, witnesses, note=note)
        except RecordError as error:
            if not options.every:
                raise
            answers = []
            troubles.tell(str(options.run), str(error))
        else:
            troubles.over(str(options.run))
        for answer in answers:
            name = answer.witness.key.name
            if answer.trouble:
                troubles.tell(name, answer.trouble)
                continue
            troubles.over(name)
            if known.get(name) != answer.size:
                known[name] = answer.size
                _say(f"{name}: has cosigned {answer.size} statements")
        tries -= ended
        # After the end, too, statements are added: evidence of machines, and late reports.
        grown, size = size, answers[0].size if ended and answers else -1
        settled = grown == size and not troubles.left
        if not options.every or (ended and (settled or tries <= 0)):
            return 1 if troubles.left else 0
        time.sleep(options.every)


def _check_every(seconds: float) -> None:
    if not 0 <= seconds <= MOST_EVERY:
        raise ConfigError(f"--every {seconds:g}: give a number of seconds from 0 to {MOST_EVERY:g}")


def _addresses(given: list[list[str]]) -> list[WitnessAddress]:
    from dilocox.record.log.signed_note import WitnessKey
    from dilocox.tools.witness.asking import WitnessAddress

    found = []
    for key, url in given:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--witness KEY {url}: the address begins with http:// or https://")
        problem = secret_problem(url)
        if problem is not None:
            raise ConfigError(f"--witness {key}: {problem}")
        found.append(WitnessAddress(WitnessKey.parse(key), url))
    return found


class _Troubles:
    """Tells each trouble once, until it is over or another one."""

    def __init__(self) -> None:
        self.left: dict[str, str] = {}

    def tell(self, what: str, trouble: str) -> None:
        if self.left.get(what) != trouble:
            print(
                f"dilocox: {plain(what)}: not cosigned: {plain(trouble)}",
                file=sys.stderr,
                flush=True,
            )
        self.left[what] = trouble

    def over(self, what: str) -> None:
        if self.left.pop(what, None) is not None:
            _say(f"{what}: cosigns again")


def _say(line: str) -> None:
    print(plain(line), flush=True)
