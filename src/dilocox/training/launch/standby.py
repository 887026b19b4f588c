"""The process of a standby: copies a coordinator's log while the run goes on, and takes over.

A standby never takes over by itself: of two machines without a third, neither can tell a dead peer
from a dead link. The operator tells it to, and ends the first coordinator or makes sure that it has
ended. docs/standby.md has the reasons.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.errors import CoordinatorError, CoordinatorUnreachableError
from dilocox.coordinator.client.transport import addresses_of
from dilocox.coordinator.identity import Identity, write_private
from dilocox.coordinator.protocol.standby_messages import (
    Copied,
    FenceRequest,
    FollowReply,
    FollowRequest,
)
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.event_log import NAME as EVENTS
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.generations import MARKER, Generations
from dilocox.coordinator.server.standby import METRICS, RECORD, RUN_FILE
from dilocox.coordinator.server.tokens import SECRET
from dilocox.errors import ConfigError, DilocoxError, TrainingError
from dilocox.record.writer.notary import KEY_FILE
from dilocox.record.writer.one_writer import held
from dilocox.training.launch.run_folder import check_reachable
from dilocox.utils.append_file import AppendFile
from dilocox.utils.storage import keep_file, sync_folder

WAIT = 1.0
"""Seconds for which the coordinator holds a request of a standby that lacks nothing."""
FENCE_EVERY = 10.0
"""Seconds between two tries to end a first coordinator that was not reached."""
TRIES = 5
"""Tries to end a first coordinator that writes more than one reply holds in the meantime."""
Say = Callable[[str], None]


class StandbyCopy:
    """The files of a standby. Everything in `copied` would survive a power cut."""

    def __init__(self, folder: Path) -> None:
        """Open the copy in the run's folder. Raises `TrainingError` and `OSError`."""
        self._folder = folder
        self.name = str(_marked(folder).get("name") or secrets.token_hex(8))
        """Tells this copy from that of another standby, also after a restart."""
        (folder / RECORD).parent.mkdir(parents=True, exist_ok=True)
        _cut(folder / RECORD)
        _cut(folder / METRICS)
        self.log = EventLog(folder / "coordinator")
        self._record = AppendFile(folder / RECORD, durable=True)
        self._metrics = AppendFile(folder / METRICS, durable=True)
        self._statements, self._last = _lines(folder / RECORD)

    @property
    def copied(self) -> Copied:
        """How much of the files is here."""
        return Copied(
            events=self.log.last,
            event_digest=self.log.row_digest(self.log.last),
            record=self._record.length,
            statements=self._statements,
            record_digest=hashlib.sha256(self._last).hexdigest() if self._statements else "",
            metrics=self._metrics.length,
        )

    def take(self, reply: FollowReply) -> None:
        """Write what the coordinator has sent. Raises `TrainingError` and `OSError`."""
        # The record first, as at the coordinator: a decision is never without its statements.
        for file, text in ((self._record, reply.record), (self._metrics, reply.metrics)):
            if text:
                file.append(text.encode())
                file.sync()
        if reply.record:
            lines = reply.record.encode().split(b"\n")[:-1]
            self._statements, self._last = self._statements + len(lines), lines[-1]
        if reply.events:
            self.log.copy(reply.events)
        if reply.run_file:
            keep_file(self._folder / RUN_FILE, reply.run_file.encode())

    def close(self) -> None:
        """Close the files."""
        for file in (self._record, self._metrics):
            file.close()
        self.log.close()


def follow(config: RunConfig, address: str, say: Say) -> int:
    """`dilocox coordinator --standby-of`: copy the coordinator's log until the run has ended.

    Args:
        config: The run file, with this machine's address and port.
        address: HOST:PORT of the coordinator.
        say: Called with one line when following begins, stops and goes on.

    Returns the exit code 0. Raises `ConfigError` if this machine could not take over, and
    `TrainingError` if the folder holds another run, or a part that the coordinator does not have.
    """
    folder = config.folder
    _check(config)
    addresses_of(address)
    with _only_one(folder), _opened(folder) as copy, _client(config, address) as client:
        there: bool | None = None
        while True:
            request = FollowRequest(name=copy.name, copied=copy.copied, wait=WAIT)
            try:
                reply = client.send(request)
            except CoordinatorUnreachableError as error:
                if there is not False:
                    say(
                        f"standby: {error}; trying again. If it has ended for good, end this "
                        "command and run it with --take-over --gone in place of --standby-of"
                    )
                there = False
                continue
            except CoordinatorError as error:
                raise TrainingError(f"standby: {error}") from None
            _mark(folder, {"of": address, "generation": reply.generation, "name": copy.name})
            copy.take(reply)
            if there is not True:
                say(f"standby: follows {address}, {reply.last} events")
            there = True
            if reply.over and copy.log.last == reply.last and not reply.content:
                say("standby: the run has ended")
                return 0


def take_over(config: RunConfig, gone: bool, say: Say) -> Callable[[], None]:
    """`dilocox coordinator --take-over`: make the standby's folder that of the run's coordinator.

    A first coordinator that answers is asked for all that is missing here, and ends. The caller
    then starts a coordinator on the folder.

    Args:
        config: The run file.
        gone: The operator has made sure that a first coordinator which does not answer has ended.
        say: Called with one line about the first coordinator.

    Returns:
        A function that goes on ending the first coordinator in the background, if it was not
        reached. Call it when the new one serves.

    Raises:
        ConfigError: `network.port` is not set.
        TrainingError: The folder is no standby's, a standby still follows, the run has ended, or
            the first coordinator does not answer and `gone` is false or nothing was copied.
    """
    _check_port(config)
    folder = config.folder
    marker = folder / "coordinator" / MARKER
    said = _marked(folder)
    try:
        address, generation = str(said["of"]), int(said["generation"]) + 1
    except (ValueError, KeyError, TypeError):
        raise TrainingError(
            f"{folder}: is not the folder of a standby that has followed a run; start one with "
            "--standby-of HOST:PORT"
        ) from None
    with _only_one(folder), _opened(folder) as copy, _client(config, address) as client:
        reached = True
        try:
            _end_first(client, copy, generation)
            say(f"the first coordinator at {address} has ended; this one goes on from its log")
        except CoordinatorUnreachableError as error:
            if not gone:
                raise TrainingError(
                    f"{error} Nobody but you can tell whether it has ended: if you are sure that "
                    "it has, and that nothing starts it again, add --gone"
                ) from None
            if not copy.log.last:
                raise TrainingError(
                    f"{folder}: this standby has no event of the run yet, so it cannot go on with "
                    "it; start the first coordinator again"
                ) from None
            reached = False
            say(f"the first coordinator at {address} does not answer; you say that it has ended")
        except CoordinatorError as error:
            raise TrainingError(f"the first coordinator refuses: {error}") from None
        Generations(folder / "coordinator").begin(generation, copy.log.last)
        marker.unlink()
        sync_folder(marker.parent)
    if 2 * config.outer.min_sites <= len(config.sites) and not reached:
        say(
            f"outer.min_sites is {config.outer.min_sites} of {len(config.sites)} sites: if the "
            "first coordinator runs after all, both could train until a site has met both"
        )
    return (lambda: None) if reached else lambda: _end_later(config, address, generation)


def _end_first(client: CoordinatorClient, copy: StandbyCopy, generation: int) -> None:
    """Copy all that the first coordinator has, and end it.

    Raises `CoordinatorError` if it refuses, and `CoordinatorUnreachableError`.
    """
    for tries_left in reversed(range(TRIES)):
        last = copy.log.last + 1
        while copy.log.last < last:
            reply = client.send(FollowRequest(name=copy.name, copied=copy.copied))
            copy.take(reply)
            last = reply.last
            if reply.over:
                raise TrainingError("the run has ended: there is nothing to take over")
        # Sites go on meanwhile. The last reply has what came since.
        request = FenceRequest(name=copy.name, copied=copy.copied, generation=generation)
        try:
            copy.take(client.send(request))
            return
        except CoordinatorError:
            if not tries_left:
                raise


def _end_later(config: RunConfig, address: str, generation: int) -> None:
    """End the first coordinator as soon as it is reached, in a thread of its own."""
    nothing = Copied(events=0, event_digest="", record=0, statements=0, record_digest="", metrics=0)
    request = FenceRequest(name="", copied=nothing, generation=generation, late=True)

    def run() -> None:
        with _client(config, address) as client:
            while True:
                with contextlib.suppress(DilocoxError):
                    client.send(request)
                    return
                time.sleep(FENCE_EVERY)

    threading.Thread(target=run, name="fence", daemon=True).start()


def _check_port(config: RunConfig) -> None:
    if not config.network.port:
        raise ConfigError(
            "network.port: sites must know where this standby will listen: set it, for example "
            "with --set network.port=7777"
        )


def _check(config: RunConfig) -> None:
    own = config.folder / "coordinator"
    check_reachable(config.folder)
    _check_port(config)
    names = ["authority.pem", "server.pem", "operator.json", SECRET]
    names += [KEY_FILE] if config.record.enabled else []
    lacking = [name for name in names if not (own / name).is_file()]
    if lacking:
        raise ConfigError(
            f"{own}: lacks {', '.join(lacking)} of the coordinator; copy them from its machine in "
            "a way that nobody else can read (docs/standby.md)"
        )


def _refuse_coordinator(folder: Path) -> None:
    """Raise `TrainingError` if the log in a run's folder is that of a coordinator."""
    own, begun = folder / "coordinator", False
    if (own / EVENTS).exists() and not (own / MARKER).exists():
        # A standby that has never been answered has a log, too, and no marker; but no event.
        with contextlib.closing(EventLog(own)) as log:
            begun = log.last > 0
    if begun or Generations(own).over:
        raise TrainingError(
            f"{folder}: holds the log of a coordinator, not of a standby; choose an empty "
            "run.folder with the copied keys"
        )


def _marked(folder: Path) -> dict[str, Any]:
    """Return what the marker says; nothing if there is none that can be read."""
    try:
        said = json.loads((folder / "coordinator" / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _mark(folder: Path, said: dict[str, Any]) -> None:
    path = folder / "coordinator" / MARKER
    text = json.dumps(said) + "\n"
    if not path.exists() or path.read_text("utf-8") != text:
        write_private(path, text.encode())
        sync_folder(path.parent)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with held(folder / "coordinator") as own:
        if not own:
            raise TrainingError(
                f"{folder}: a process uses this folder: end the standby or the coordinator there "
                "first"
            )
        yield


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[StandbyCopy]:
    try:
        _refuse_coordinator(folder)
        copy = StandbyCopy(folder)
        try:
            yield copy
        finally:
            copy.close()
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def _client(config: RunConfig, address: str) -> Iterator[CoordinatorClient]:
    timeouts = Timeouts.derive(config.network)
    patience = replace(timeouts, coordinator=timeouts.heartbeat)
    identity = Identity.load(config.folder / "coordinator" / "operator.json")
    url = ",".join(f"https://{each.strip()}" for each in address.split(","))
    client = CoordinatorClient(url, identity, patience)
    try:
        yield client
    finally:
        client.close()


def _cut(path: Path) -> None:
    """Cut a last line off that a crash has left without its end."""
    if path.exists():
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _lines(path: Path) -> tuple[int, bytes]:
    """Return the number of lines, and the last one."""
    count, last = 0, b""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                count, last = count + 1, line[:-1]
    return count, last
