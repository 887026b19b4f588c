"""The front, as a client sees it, before a server that stands for the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dilocox.tools.serving.front import LARGEST, Front

Asked = list[dict[str, Any]]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


async def at_the_front(
    ask: Callable[[aiohttp.ClientSession, Asked], Awaitable[None]],
    *,
    chats: bool = True,
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
) -> None:
    """Let `ask` talk to a front. Requests that reach the engine are in its second argument."""
    asked: Asked = []

    async def engine(request: web.Request) -> web.StreamResponse:
        asked.append({"path": request.path, **await request.json()})
        if answer is not None:
            return await answer(request)
        return web.json_response({"choices": [], "model": "ours"})

    behind = web.Application()
    behind.router.add_post("/{path:.*}", engine)
    inner = await started(behind)
    front = Front("ours", inner, "127.0.0.1", 7, chats)
    outer = await started(front.application())
    try:
        async with aiohttp.ClientSession(outer.base) as session:
            await ask(session, asked)
    finally:
        await outer.runner.cleanup()
        await inner.runner.cleanup()


class Started(str):
    """The address of a server, with its runner."""

    base: str
    runner: web.AppRunner


async def started(application: web.Application) -> Started:
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = Started(f"http://127.0.0.1:{runner.addresses[0][1]}")
    made.base, made.runner = str(made), runner
    return made


def run(ask: Callable[[aiohttp.ClientSession, Asked], Awaitable[None]], **how: Any) -> None:
    asyncio.run(at_the_front(ask, **how))


async def reason(answer: aiohttp.ClientResponse) -> tuple[int, str]:
    return answer.status, (await answer.json())["error"]["message"]


def test_the_model_is_listed_under_its_name() -> None:
    async def ask(session: aiohttp.ClientSession, _: Asked) -> None:
        listed = await (await session.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["ours"]
        assert (await (await session.get("/v1/models/ours")).json())["created"] == 7
        assert (await session.get("/v1/models/other")).status == 404

    run(ask)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_request_reaches_the_engine_with_the_model_s_name(path: str) -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        answer = await session.post(path, json={**CHAT, "temperature": 0})
        assert (await answer.json())["model"] == "ours"
        assert asked == [{"path": path, **CHAT, "temperature": 0, "model": "ours"}]

    run(ask)


def test_pieces_of_an_answer_arrive_as_they_are_made() -> None:
    seen, more = asyncio.Event(), b"data: two\n\n"

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        stream.content_type = "text/event-stream"
        await stream.prepare(request)
        await stream.write(b"data: one\n\n")
        # The second piece is made only after the client has the first one.
        await asyncio.wait_for(seen.wait(), 30.0)
        await stream.write(more)
        return stream

    async def ask(session: aiohttp.ClientSession, _: Asked) -> None:
        response = await session.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.content_type == "text/event-stream"
        assert await response.content.readany() == b"data: one\n\n"
        seen.set()
        assert await response.content.read() == more

    run(ask, answer=answer)


def test_requests_of_web_sites_are_refused() -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        strange = {"Host": "attacker.example"}
        answer = await session.post("/v1/chat/completions", json=CHAT, headers=strange)
        assert (await reason(answer))[0] == 403
        for host in ("localhost:9", "[::1]", "10.0.0.7:80"):
            assert (await session.get("/v1/models", headers={"Host": host})).status == 200
        assert asked == []

    run(ask)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "is no JSON"),
        (b"[" * 100_000, 400, "is no JSON"),
        (b"[]", 400, "no JSON object"),
        (b'{"model": "other"}', 404, "this server has 'ours'"),
        (b'{"model": null}', 404, "no model None here"),
        (b'{"messages": 3}', 400, "messages: give a list"),
        (b'{"messages": []}', 400, "messages: give a list"),
        (b'{"messages": [{"role": "user"}, "hi"]}', 400, "messages[1]: give an object"),
        (b"x" * (LARGEST + 1), 413, "larger than 16,777,216 bytes"),
    ],
)
def test_a_bad_request_is_refused_before_the_engine(body: bytes, status: int, said: str) -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        found, message = await reason(await session.post("/v1/chat/completions", data=body))
        assert found == status
        assert said in message
        assert asked == []

    run(ask)


def test_a_model_without_a_template_continues_texts_alone() -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        status, message = await reason(await session.post("/v1/chat/completions", json=CHAT))
        assert (status, "no chat template" in message) == (400, True)
        assert (await session.post("/v1/completions", json={"prompt": "a"})).status == 200
        assert [each["path"] for each in asked] == ["/v1/completions"]

    run(ask, chats=False)


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/systemone", "/docs"])
def test_other_endpoints_of_the_engine_are_not_there(path: str) -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        assert (await reason(await session.post(path, json={"model": "org/huge"})))[0] == 404
        assert asked == []

    run(ask)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (json.dumps({"detail": "prompt must be a string."}), "prompt must be a string."),
        (json.dumps({"error": "worker dead"}), "worker dead"),
        (json.dumps({"detail": [1]}), '{"detail": [1]}'),
        ("Internal Server Error", "Internal Server Error"),
        ("", "the model's process gave no reason"),
    ],
)
def test_the_engine_s_reason_is_passed_on(body: str, said: str) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=422, text=body)

    async def ask(session: aiohttp.ClientSession, _: Asked) -> None:
        assert await reason(await session.post("/v1/completions", json={})) == (422, said)

    run(ask, answer=answer)


def test_a_dead_engine_is_said() -> None:
    async def ask() -> None:
        front = await started(
            Front("ours", "http://127.0.0.1:9", "127.0.0.1", 7, True).application()
        )
        try:
            async with aiohttp.ClientSession(front.base) as session:
                expected = (503, "the model's process does not answer")
                assert await reason(await session.post("/v1/completions", json={})) == expected
                assert await reason(await session.get("/health")) == expected
        finally:
            await front.runner.cleanup()

    asyncio.run(ask())
