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
_log = logging.getLogger(__name__)


def application(witness: Witness, say: Callable[[str], None]) -> web.Application:
    """Return the web application of a witness. `say`: called with one line per new event."""

    async def add(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
            old, proof, note = parse_request(body)
            line = await asyncio.to_thread(witness.add, old, proof, note)
        except TimeoutError:
            return web.Response(status=408, text=f"no whole body within {BODY_SECONDS:g} s\n")
        except RefusedError as refused:
            if refused.forked:
                say(str(refused))
            if refused.size is not None:
                told = web.Response(status=409, body=f"{refused.size}\n".encode())
                told.headers["Content-Type"] = SIZE_TYPE
                return told
            return web.Response(status=refused.status, text=f"{refused}\n")
        except (RecordError, OSError) as error:
            # Without memory there is no cosignature: the log asks again.
            say(f"not cosigned: {error}")
            return web.Response(status=500, text="the witness cannot read or keep what it signs\n")
        say(f"cosigned {note.split(chr(10))[1]} statements of log {note.split(chr(10))[0]}")
        return web.Response(text=line)

    made = web.Application(client_max_size=MOST_BYTES)
    made.router.add_post("/add-checkpoint", add)
    return made


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
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
