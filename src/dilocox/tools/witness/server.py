"""The web server of a witness: `POST /add-checkpoint` (c2sp.org/tlog-witness).

Anybody may ask. A request changes something only if a trusted log has signed its checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from dilocox.errors import ConfigError, RecordError
from dilocox.tools.witness.requests import MOST_BYTES, parse_request
from dilocox.tools.witness.witness import SIZE_TYPE, RefusedError, Witness

BODY_SECONDS = 15.0
"""Time limit for the body of a request."""
OPEN_SECONDS = 30.0
"""Time limit of a connection: one request takes milliseconds."""
MOST_OPEN = 256
"""Most connections that stay open; beyond them the oldest are closed."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the connections."""
_log = logging.getLogger(__name__)


def application(witness: Witness, say: Callable[[str], None]) -> web.Application:
    """Return the web application of a witness. `say`: called with one line per new event."""

    last: dict[str, str] = {}
    """The last line about each trusted log; "": about the folder. Anybody can repeat a request, so
    a line is said once."""

    def once(origin: str, line: str) -> None:
        if last.get(origin) != line:
            last[origin] = line
            say(line)

    async def add(request: web.Request) -> web.Response:
        origin = ""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
            old, proof, note = parse_request(body)
            origin = note.partition("\n")[0]
            line = await asyncio.to_thread(witness.add, old, proof, note)
        except TimeoutError:
            return web.Response(status=408, text=f"no whole body within {BODY_SECONDS:g} s\n")
        except RefusedError as refused:
            if (refused.signed and refused.status != 409) or refused.forked:
                once(origin, f"not cosigned, log {origin}: {refused}")
            if refused.size is not None:
                told = web.Response(status=409, body=f"{refused.size}\n".encode())
                told.headers["Content-Type"] = SIZE_TYPE
                return told
            return web.Response(status=refused.status, text=f"{refused}\n")
        except (RecordError, OSError) as error:
            # Without memory there is no cosignature: the log asks again.
            once("", f"not cosigned: {error}")  # the origin may be a stranger's
            return web.Response(status=500, text="the witness cannot read or keep what it signs\n")
        once(origin, f"cosigned {note.split(chr(10))[1]} statements of log {origin}")
        return web.Response(text=line)

    made = web.Application(client_max_size=MOST_BYTES)
    made.router.add_post("/add-checkpoint", add)
    return made


async def _close_idle(runner: web.AppRunner) -> None:
    """Close old connections for ever: a stranger could open so many that nobody else gets one."""
    began: dict[web.RequestHandler, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = clock()
        found = runner.server.connections if runner.server is not None else []
        began = {each: began.get(each, now) for each in found}
        for number, each in enumerate(sorted(began, key=began.__getitem__, reverse=True)):
            if number >= MOST_OPEN or now >= began[each] + OPEN_SECONDS:
                each.force_close()


async def serve(
    witness: Witness, host: str, port: int, say: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until cancelled.

    Args:
        witness: Who cosigns.
        host, port: Address to listen on; port 0: any free port.
        say: Called with one line per event.
        ready: Called with the server's URL when it listens.

    Raises:
        ConfigError: The server cannot listen there.
    """
    runner = web.AppRunner(application(witness, say), access_log=None, logger=_log)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or "
                "--port"
            ) from None
        bound = runner.addresses[0][1]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
        await _close_idle(runner)
    finally:
        await runner.cleanup()
