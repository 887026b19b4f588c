"""The server that clients talk to: OpenAI's endpoints for one model, passed on to the engine.

The server answers only requests whose `Host` header names it, so that no web site can use the model
through a visitor's browser (DNS rebinding). Errors have OpenAI's form.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

_CHAT = "/v1/chat/completions"
_OF_CHATS = (_CHAT, "/v1/responses")
_PATHS = (*_OF_CHATS, "/v1/completions")
LARGEST = 16 * 2**20
"""Largest request, in bytes."""
_BLOCK = 2**16


class Front:
    """The endpoints of one model."""

    def __init__(self, name: str, engine: str, host: str, created: int, chats: bool) -> None:
        """Create the endpoints.

        Args:
            name: name of the model.
            engine: address of the engine, such as `http://127.0.0.1:8123`.
            host: name or address that this server listens at.
            created: Unix time of the model, in seconds.
            chats: whether the model has a chat template.
        """
        self._name = name
        self._engine = engine
        self._host = host
        self._model = {"id": name, "object": "model", "created": created, "owned_by": "dilocox"}
        self._chats = chats
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """Return the application, for a runner of aiohttp."""
        made = web.Application(client_max_size=LARGEST, middlewares=[self._guard])
        made.router.add_get("/health", self._health)
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/v1/models/{name}", self._models)
        for path in _PATHS:
            made.router.add_post(path, self._pass_on)
        made.cleanup_ctx.append(self._connected)
        return made

    async def _connected(self, _: web.Application) -> Any:
        # An answer may take longer than any limit that fits all models.
        patient = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(timeout=patient) as session:
            self._session = session
            yield

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not known(request.headers.get("Host", ""), self._host):
            return refusal(403, "the Host header does not name this server")
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"the request is larger than {LARGEST:,} bytes")
        except web.HTTPException as error:
            return refusal(error.status, error.reason)

    async def _health(self, _: web.Request) -> web.Response:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._engine}/health") as answer:
                return web.json_response(await answer.json(), status=answer.status)
        except aiohttp.ClientError:
            return refusal(503, "the model's process does not answer")

    async def _models(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        if name is None:
            return web.json_response({"object": "list", "data": [self._model]})
        if name != self._name:
            return self._unknown(name)
        return web.json_response(self._model)

    def _unknown(self, name: object) -> web.Response:
        return refusal(404, f"no model {name!r} here; this server has {self._name!r}")

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = json.loads(await request.read())
        except (ValueError, RecursionError):
            return refusal(400, "the request is no JSON")
        if not isinstance(asked, dict):
            return refusal(400, "the request is no JSON object")
        if asked.get("model", self._name) != self._name:
            return self._unknown(asked["model"])
        if request.path in _OF_CHATS and not self._chats:
            return refusal(
                400, "the model has no chat template; ask /v1/completions to continue a text"
            )
        if request.path == _CHAT and (reason := wrong_messages(asked.get("messages"))):
            return refusal(400, reason)
        assert self._session is not None
        try:
            return await self._answer(self._session, request, {**asked, "model": self._name})
        except aiohttp.ClientError:
            return refusal(503, "the model's process does not answer")

    async def _answer(
        self, session: aiohttp.ClientSession, request: web.Request, body: Mapping[str, Any]
    ) -> web.StreamResponse:
        async with session.post(f"{self._engine}{request.path}", json=body) as answer:
            if answer.status >= 400:
                return refusal(answer.status, said(await answer.read()))
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for block in answer.content.iter_chunked(_BLOCK):
                await response.write(block)
            await response.write_eof()
            return response


def known(host: str, listening: str) -> bool:
    """Return whether the `Host` header `host` names a server: by its name, or by any address."""
    name = urlsplit(f"//{host}").hostname or ""
    if name in ("localhost", listening):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def wrong_messages(messages: object) -> str | None:
    """Return why a chat cannot have these messages. None: it can.

    The engine itself fails without a reason for anything but a list of objects with a role.
    """
    if not isinstance(messages, list) or not messages:
        return "messages: give a list of one message or more"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{number}]: give an object with a role, such as user"
    return None


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
