"""The server that clients talk to: OpenAI's endpoints for one model, passed on to the engine.

Web pages cannot use the model through a visitor's browser. The `Host` header must name the server
(DNS rebinding), `Origin` too if it is there, and a body must be declared as JSON, which a page may
not send elsewhere unasked. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dilocox.tools.serving.answer import Answer, piece_in
from dilocox.tools.serving.asked import PATHS, RefusedError, Served, checked, unknown_model
from dilocox.utils.host_header import names_server

LARGEST = 16 * 2**20
"""Largest request, in bytes."""
SILENT = 60.0
"""Seconds within which a client must have sent its request."""
_GONE = "the model's process does not answer"


class Front:
    """The endpoints of one model."""

    def __init__(self, served: Served, engine: Path, host: str) -> None:
        """Create the endpoints.

        Args:
            served: the model.
            engine: socket of the engine.
            host: name or address that this server listens at.
        """
        self._served = served
        self._engine = engine
        self._host = host
        self._model = {
            "id": served.name, "object": "model", "created": served.created, "owned_by": "dilocox",
        }  # fmt: skip
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """Return the application. Its runner must cancel handlers of clients that have left."""
        made = web.Application(client_max_size=LARGEST, middlewares=[self._guard])
        made.router.add_get("/health", self._health)
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/v1/models/{name}", self._models)
        for path in PATHS:
            made.router.add_post(path, self._pass_on)
        made.cleanup_ctx.append(self._connected)
        return made

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        # An answer may take longer than any limit that fits all models.
        patient = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        way = aiohttp.UnixConnector(path=str(self._engine))
        async with aiohttp.ClientSession(
            "http://engine", connector=way, timeout=patient
        ) as session:
            self._session = session
            yield

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not names_server(request.headers.get("Host", ""), self._host):
            return refusal(
                403,
                "the Host header does not name this server; ask by its address, or start it with "
                "the name as --host",
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.headers["Host"]:
            return refusal(403, "web pages of other servers may not ask")
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except RefusedError as error:
            return refusal(error.status, str(error))
        except aiohttp.ClientError:
            return refusal(503, _GONE)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"the request is larger than {LARGEST:,} bytes")
        except web.HTTPException as error:
            return refusal(error.status, error.reason)

    async def _health(self, _: web.Request) -> web.Response:
        assert self._session is not None
        async with self._session.get("/health") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def _models(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        if name is None:
            return web.json_response({"object": "list", "data": [self._model]})
        if name != self._served.name:
            raise unknown_model(name, self._served)
        return web.json_response(self._model)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            raise RefusedError(415, "send the request as content-type: application/json")
        asked = await _body(request)
        body = checked(request.path, asked, self._served)
        async with self._asked(request.path, body) as answer:
            if asked.get("stream"):
                return await _streamed(request, answer)
            made = Answer(request.path)
            async for line in answer.content:
                if (piece := piece_in(line)) is not None:
                    made.take(piece)
            if made.error is not None:
                raise RefusedError(500, made.error[:500])
            return web.json_response(made.whole())

    @asynccontextmanager
    async def _asked(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the engine for a stream. It stops to compute when the stream is closed."""
        assert self._session is not None
        async with self._session.post(path, json=body) as answer:
            if answer.status >= 400:
                raise RefusedError(answer.status, said(await answer.read()))
            yield answer


async def _body(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(SILENT):
            return json.loads(await request.read())
    except TimeoutError:
        raise RefusedError(408, f"the request took longer than {SILENT:g} s to arrive") from None
    except (ValueError, RecursionError):
        raise RefusedError(400, "the request is no JSON") from None


async def _streamed(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = answer.content_type
    await response.prepare(request)
    try:
        async for block in answer.content.iter_any():
            await response.write(block)
    except aiohttp.ClientError:
        # An error cannot be written into an answer that has begun. A stream that is cut is one.
        if request.transport is not None:
            request.transport.close()
        return response
    await response.write_eof()
    return response


def said(body: bytes) -> str:
    """Return the reason in an answer of the engine."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text[:500] or "the model's process gave no reason"
    reason = found.get("detail", found.get("error")) if isinstance(found, dict) else None
    return (reason if isinstance(reason, str) else text)[:500]


def refusal(status: int, reason: str) -> web.Response:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": reason, "type": kind, "param": None, "code": None}
    return web.json_response({"error": error}, status=status)
