"""The front, as a client sees it, before a server that stands for the engine."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dilocox.tools.serving.asked import Served
from dilocox.tools.serving.front import LARGEST, Front

Asked = list[dict[str, Any]]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def piece(text: str, **more: Any) -> dict[str, Any]:
    """A piece of an answer, for both kinds of requests."""
    choice = {"index": 0, "text": text, "delta": {"content": text}, **more}
    return {"id": "1", "created": 2, "model": "ours", "choices": [choice]}


def stream(*pieces: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in pieces)


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
        return web.Response(text=stream(piece("four")), content_type="text/event-stream")

    behind = web.Application()
    behind.router.add_post("/{path:.*}", engine)
    with tempfile.TemporaryDirectory() as folder:
        await _between(behind, Path(folder) / "engine", served(chats), asked, ask)


def served(chats: bool = True) -> Served:
    return Served("ours", tokens=100, chats=chats, created=7)


async def _between(
    behind: web.Application,
    place: Path,
    model: Served,
    asked: Asked,
    ask: Callable[[aiohttp.ClientSession, Asked], Awaitable[None]],
) -> None:
    inner = web.AppRunner(behind, handler_cancellation=True)
    await inner.setup()
    await web.UnixSite(inner, str(place)).start()
    outer = await started(Front(model, place, "127.0.0.1").application())
    try:
        async with aiohttp.ClientSession(outer.base) as session:
            await ask(session, asked)
    finally:
        await outer.runner.cleanup()
        await inner.cleanup()


class Started(str):
    """The address of a server, with its runner."""

    base: str
    runner: web.AppRunner


async def started(application: web.Application) -> Started:
    runner = web.AppRunner(application, handler_cancellation=True)
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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"message": {"role": "assistant", "content": "four"}}),
        ("/v1/completions", {"text": "four"}),
    ],
)
def test_a_request_reaches_the_engine_as_one_for_a_stream(path: str, said: dict[str, Any]) -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        made = await (await session.post(path, json={**CHAT, "temperature": 0})).json()
        assert made["choices"] == [{"index": 0, **said, "finish_reason": None}]
        expected = {**CHAT, "temperature": 0, "model": "ours", "stream": True, "max_tokens": 100}
        assert asked == [{"path": path, **expected}]

    run(ask)


def test_what_the_client_leaves_the_engine_leaves() -> None:
    left, began = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        began.set()
        stream = web.StreamResponse()
        await stream.prepare(request)
        try:
            while True:
                await stream.write(b": nothing yet\n\n")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async def ask(session: aiohttp.ClientSession, _: Asked) -> None:
        request = asyncio.create_task(session.post("/v1/chat/completions", json=CHAT).__aenter__())
        await asyncio.wait_for(began.wait(), 30.0)
        request.cancel()
        await asyncio.wait_for(left.wait(), 30.0)

    run(ask, answer=answer)


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
        for host in ("[", "", "LOCALHOST.example"):
            assert (await session.get("/v1/models", headers={"Host": host})).status == 403
        for host in ("localhost:9", "[::1]", "10.0.0.7:80"):
            assert (await session.get("/v1/models", headers={"Host": host})).status == 200
        page = {"Origin": "https://attacker.example"}
        answer = await session.post("/v1/chat/completions", json=CHAT, headers=page)
        assert (await reason(answer))[0] == 403
        # What a page may send without asking: no Origin can be trusted to be there.
        text = {"content-type": "text/plain"}
        answer = await session.post("/v1/completions", data=json.dumps({}), headers=text)
        assert (await reason(answer))[0] == 415
        assert asked == []
        own = {"Origin": str(session._base_url).rstrip("/")}
        assert (await session.post("/v1/completions", json={}, headers=own)).status == 200

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
        (b'{"messages": [{"role": "user"}], "max_tokens": 101}', 400, "a number from 1 to 100"),
        (b'{"messages": [{"role": "user"}], "max_tokens": true}', 400, "a number from 1 to 100"),
        (b'{"generation_config": "{}"}', 400, "generation_config: give temperature"),
        (
            b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"chat_template": "x"}}',
            400,
            "only enable_thinking can be set",
        ),
        (b"x" * (LARGEST + 1), 413, "larger than 16,777,216 bytes"),
    ],
)
def test_a_bad_request_is_refused_before_the_engine(body: bytes, status: int, said: str) -> None:
    async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
        kind = {"content-type": "application/json"}
        found, message = await reason(
            await session.post("/v1/chat/completions", data=body, headers=kind)
        )
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


@pytest.mark.parametrize(
    "path", ["/load_model", "/reset", "/v1/systemone", "/v1/responses", "/docs"]
)
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
        front = await started(Front(served(), Path("/nowhere/engine"), "127.0.0.1").application())
        try:
            async with aiohttp.ClientSession(front.base) as session:
                expected = (503, "the model's process does not answer")
                assert await reason(await session.post("/v1/completions", json={})) == expected
                assert await reason(await session.get("/health")) == expected
        finally:
            await front.runner.cleanup()

    asyncio.run(ask())
