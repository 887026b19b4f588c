"""Runs a coordinator in this process until its run has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.door import raise_open_files
from dilocox.coordinator.server.http_server import CoordinatorServer
from dilocox.coordinator.server.notary import RecordSink
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.startup import RunStart
from dilocox.errors import TrainingError
from dilocox.utils.processes import Requests
from dilocox.utils.storage import ROOM_PAUSE

_log = logging.getLogger(__name__)
LINGER = 2.0
"""Longest time in seconds that the server stays up after all ranks have reported that they are
done. The server ends earlier if all ranks have closed their connections."""


def serve(
    config: RunConfig,
    folder: str | Path,
    start: RunStart | None = None,
    listener: RunListener | None = None,
    *,
    port: int | None = None,
    resume: bool | int = False,
    notary: RecordSink | None = None,
    ready_file: str | Path | None = None,
) -> m.Status:
    """Serve the run of `config` until it has ended, and return its final status.

    If `folder` holds a log, the run continues where the log ends. The first SIGINT or SIGTERM
    stops the run at a slot end; a second one, at least 2 s later, ends the server at once.

    Args:
        config: The run file.
        folder: Folder of the event log and the keys.
        start: The facts that a new run needs beside the run file.
        listener: Callbacks that tell this process of the run.
        port: Port to listen on; by default that of `[network]`.
        resume: True: resume from the latest complete checkpoint. A number: from that tick.
        notary: Writer of the run's record.
        ready_file: File for the endpoint as JSON (mode 0600), written when the server listens.

    Raises `TrainingError` (port taken, folder in use, log damaged), `CheckpointError`, and
    `SupersededError` if a standby takes over.
    """
    raise_open_files()
    listener = listener or RunListener()
    coordinator = Coordinator(config, folder, start, listener, notary=notary)
    try:
        if resume is not False:
            coordinator.resume(None if resume is True else resume)
        elif coordinator.state.over:
            why = f" ({coordinator.state.reason})" if coordinator.state.reason else ""
            raise TrainingError(
                f"{folder}: its run is {coordinator.state.phase}{why}; add --resume to go back to "
                "its last checkpoint, or start a new one in another folder"
            )
        elif coordinator.state.sequence:
            _go_on(coordinator, listener.on_message)
        if ready_file is not None:
            # A file from an earlier start would be taken for this server's endpoint.
            Path(ready_file).unlink(missing_ok=True)
        where = (config.network.host, config.network.port if port is None else port)

        def ready(bound: int) -> None:
            name = config.network.advertise or reachable_name(where[0])
            if ":" in name:
                name = f"[{name}]"
            endpoint = Endpoint(
                f"https://{name}:{bound}",
                coordinator.hand_out(),
                str(coordinator.authority.operator_path),
            )
            if ready_file is not None:
                write_private(Path(ready_file), json.dumps(endpoint.to_json()).encode())
            if listener.on_ready is not None:
                listener.on_ready(endpoint)

        standby = None if start is None else start.standby
        asyncio.run(_serve(CoordinatorServer(coordinator, standby), *where, ready))
        if listener.on_ledger is not None:
            listener.on_ledger(coordinator.state.ledger)
        return replies.status(coordinator.state, 0)
    finally:
        coordinator.close()


def _go_on(coordinator: Coordinator, on_message: Callable[[str], None] | None) -> None:
    """Hand on reports that the previous process may only have logged; show the run's position."""
    state = coordinator.state
    coordinator.reports.again()
    if on_message is not None:
        live = ", ".join(state.live) or "no site"
        on_message(
            f"coordinator restarted: the run is {state.phase}, next plan is round "
            f"{state.next_round}, epoch {state.epoch}; {live} expected within "
            f"{coordinator.timeouts.reconnect:g} s"
        )


def reachable_name(host: str) -> str:
    """Return `host`, or for a wildcard address this machine's address on its default route.

    No packet is sent: connecting a datagram socket only looks up the route.
    """
    probes = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}  # noqa: S104
    if host not in probes:
        return host
    family, far = probes[host]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


async def _serve(
    server: CoordinatorServer, host: str, port: int, ready: Callable[[int], None]
) -> None:
    coordinator, halted = server.coordinator, server.standby.halted
    bound = await server.start(host, port)
    quit_now = asyncio.Event()
    requests = Requests()

    def interrupted() -> None:
        if not requests.heard():
            return
        if requests.times > 1:
            quit_now.set()
        else:
            stop()

    def stop() -> None:
        try:
            coordinator.departures.stop(m.StopRequest(reason="interrupted at the coordinator"))
        except TrainingError as error:
            _log.error("%s; the stop is tried again until it is logged", error)
            if not quit_now.is_set():
                loop.call_later(ROOM_PAUSE, stop)

    loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # If a parent process handles the terminal's Ctrl-C, it has set the signal to ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, interrupted)
    try:
        ready(bound)
        ends = [asyncio.create_task(event.wait()) for event in (server.over, quit_now, halted)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not quit_now.is_set() and not halted.is_set():
            # Ranks learn of the end by their next call, so the server stays for a while. If all
            # ranks are done and no site was entering, it stays only until they have disconnected.
            state = coordinator.state
            if state.phase != "failed" and not state.with_role("enrolled", "entering", "active"):
                await server.hung_up(LINGER)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(quit_now.wait(), 2 * coordinator.timeouts.beat)
    finally:
        await server.stop()
    if server.standby.error is not None:
        raise server.standby.error
