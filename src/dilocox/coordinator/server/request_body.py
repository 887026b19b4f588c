"""Reads the bodies of requests to the coordinator: time limits, compression, form."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from dilocox.coordinator.protocol import body_coding
from dilocox.coordinator.protocol.messages import MAX_BODY
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.server.refusals import Refused

STRANGER_BODY_SECONDS = 15.0
"""Time limit for the body of a request without a client certificate."""
MEMBER_BODY_SECONDS = 60.0
"""Time limit for a member's body of up to a mebibyte: the member's link may be slow."""
Model = TypeVar("Model", bound=Message)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request, unpacked if a member has compressed it.

    Raises `Refused` for a body that is late, cut short, compressed in another way, or larger than
    `MAX_BODY` when it is unpacked.
    """
    limit = MEMBER_BODY_SECONDS if certificate_of(request) else STRANGER_BODY_SECONDS
    try:
        async with asyncio.timeout(limit):
            body = await request.read()
    except TimeoutError:
        raise Refused("malformed", f"{request.path}: no whole body within {limit:g} s") from None
    except ConnectionResetError:
        # The caller died in the middle of its request, so the answer reaches no caller.
        raise Refused("malformed", f"{request.path}: cut short") from None
    coding = request.headers.get("Content-Encoding")
    if coding is None:
        return body
    if coding != body_coding.ENCODING or not certificate_of(request):
        raise Refused("malformed", f"{request.path}: Content-Encoding {coding[:40]} is not taken")
    try:
        return body_coding.decompressed(body, MAX_BODY)
    except ValueError as error:
        raise Refused(
            "malformed", f"{request.path}: {error}; run the same dilocox version on both sides"
        ) from None


def parsed(request: web.Request, body: bytes, model: type[Model]) -> Model:
    """Return the message in `body`. Raises `Refused` if it is not a message of this class."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        raise Refused("malformed", f"{request.path}: {where}: {problem['msg']}"[:500]) from None


def certificate_of(request: web.Request) -> Any:
    """Return the caller's certificate as `ssl` gives it; None or empty without a certificate."""
    transport = request.transport
    return transport.get_extra_info("peercert") if transport is not None else None
