"""Hands audit verdicts to the log of their run.

While the run goes on, verdicts are sent to its coordinator. After that, verdicts are appended to
the log with the key in the coordinator's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dilocox.config.network import NetworkSection
from dilocox.config.run_config import RunConfig, load_written
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import hand_in
from dilocox.coordinator.client.errors import CoordinatorUnreachableError
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.audit_messages import HandInReply
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.event_log import LOCK
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import ConfigError, DilocoxError, RecordError
from dilocox.record.log.audit_verdicts import digest_of, paths_of
from dilocox.record.log.statements import Signer
from dilocox.record.log.verdict_statements import of_file, read_file
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.notary import KEY_FILE, TransparencyLogSink
from dilocox.record.writer.one_writer import LOCK as LOG_LOCK
from dilocox.record.writer.one_writer import held
from dilocox.training.launch.join_token import read_token

PATIENCE = 2.0
"""Seconds within which a coordinator on this machine must answer; after that its folder is tried
again."""
_ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}")
Call = Callable[[str | None], HandInReply]
"""Hands a statement to the log. None hands in nothing: the reply only says in whose name a
statement would be handed in."""


@dataclass
class HandIn:
    """Hands in the verdicts of one auditor."""

    call: Call
    signer: Signer
    run: str
    by: str
    """Name of the site that hands them in. Empty for the operator."""
    done: int = 0
    """Number of verdicts that were handed in."""
    failed: list[str] = field(default_factory=list)
    """Reasons why verdicts are not in the log. Their files exist in any case."""
    named: set[str] = field(default_factory=set)
    """Digests (`digest_of`) of the verdicts that were handed in."""

    @classmethod
    def open(cls, call: Call, signer: Signer, run: str) -> HandIn:
        """Check that verdicts on the run `run` can be handed in, and return the `HandIn`.

        Raises `DilocoxError` if they cannot.
        """
        reply = call(None)
        if reply.run != run:
            raise RecordError(
                f"--hand-in: this coordinator's run is {reply.run[:12]}…, but the audited run is "
                f"{run[:12]}…; give the address of that run's coordinator"
            )
        return cls(call, signer, run, reply.by)

    def file(self, path: Path) -> None:
        """Hand in the verdict in the file `path`. An error is added to `failed`."""
        try:
            file = read_file(path, self.run)
            said = of_file(file.signed, file.line, self.by).statement(self.run)
            self.call(self.signer.sign(said))
        except DilocoxError as error:
            self.failed.append(f"{path.name}: {error}")
        else:
            self.done += 1
            self.named.add(digest_of(file.line))

    def earlier(self, folder: Path, course: RunHistory) -> None:
        """Hand in earlier verdicts of this auditor's key that the log does not name."""
        named = {each.file for each in course.verdicts}
        for path in paths_of(folder):
            file = read_file(path, self.run)
            if file.signed.auditor == self.signer.public and file.name not in named:
                self.file(path)


def opened(
    options: argparse.Namespace, folder: Path, course: RunHistory, signer: Signer
) -> HandIn | None:
    """Return the `HandIn` that a command's options ask for, for the run in `folder`.

    None if no verdict is to be handed in. Also hands in earlier verdicts of `signer`. Raises
    `ConfigError` if options contradict each other, and `DilocoxError` if handing in fails.
    """
    if not options.hand_in:
        given = "--coordinator" if options.coordinator else "--token-file"
        if options.coordinator or options.token_file:
            raise ConfigError(f"{given} needs --hand-in: add that option, or leave this one out")
        return None
    run = course.run
    if options.coordinator is None:
        if options.token_file is not None:
            raise ConfigError("--token-file needs --coordinator HOST:PORT: add that option")
        found = HandIn.open(_own(folder), signer, run)
    else:
        token = read_token(options.token_file)
        found = HandIn.open(_by_token(options.coordinator, token), signer, run)
    found.earlier(folder, course)
    return found


def _by_token(address: str, token: str) -> Call:
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"--coordinator {address}: not an address; give HOST:PORT")
    usual = Timeouts.derive(NetworkSection())
    patience = replace(usual, coordinator=usual.heartbeat)
    return lambda statement: hand_in(f"https://{address}", token, patience, statement)


def _own(run: Path) -> Call:
    """Return a call for the operator, who can read the coordinator's folder in `run`."""
    place = run / "coordinator"
    try:
        config = load_written(run / "run.toml")
        (place / KEY_FILE).read_bytes()
    except (OSError, ConfigError) as error:
        raise RecordError(
            f"--hand-in: {run} is not the folder of the run's coordinator ({error}); give its "
            "address with --coordinator HOST:PORT, and a token with --token-file"
        ) from None
    # The folder may have been moved since the run.
    section = config.run.model_copy(update={"folder": str(run)})
    here = config.model_copy(update={"run": section})

    def call(statement: str | None) -> HandInReply:
        end = time.monotonic() + Timeouts.derive(config.network).heartbeat
        while True:
            try:
                with contextlib.ExitStack() as locks:
                    # A coordinator of an older dilocox only takes the second lock. A newer
                    # coordinator first takes the first lock: while it starts with that lock,
                    # this code does not touch the second.
                    names = (LOG_LOCK, LOCK)
                    if all(locks.enter_context(held(place, name=name)) for name in names):
                        return _appended(here, place, statement)
                return _asked(here, place, statement)
            except OSError as error:
                raise RecordError(f"{place}: cannot be written ({error.strerror})") from None
            except CoordinatorUnreachableError:
                # The coordinator may be about to end, and the log is free after that.
                if time.monotonic() >= end:
                    raise

    return call


def _asked(config: RunConfig, place: Path, statement: str | None) -> HandInReply:
    """Hand the statement to the running coordinator."""
    try:
        endpoint = Endpoint.load(place / "endpoint.json")
        identity = Identity.load(endpoint.operator)
    except (OSError, ValueError, TypeError) as error:
        raise RecordError(f"{place}: its coordinator cannot be asked ({error})") from None
    timeouts = Timeouts.derive(config.network)
    patience = replace(timeouts, coordinator=PATIENCE)
    with contextlib.closing(CoordinatorClient(endpoint.url, identity, patience)) as client:
        return client.hand_in(statement)


def _appended(config: RunConfig, place: Path, statement: str | None) -> HandInReply:
    """Append the statement with the log's own key, because no coordinator runs."""
    notary = TransparencyLogSink.open(config, place, lambda text: None)
    try:
        if statement is not None:
            notary.verdict("", statement)
    except Refused as refused:
        raise RecordError(str(refused)) from None
    finally:
        notary.close()
    return HandInReply(run=notary.run, by="")
