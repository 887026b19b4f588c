"""The coordinator's HTTPS server: certificates, limits, routes and long polls; no decisions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from dilocox.coordinator.client.transport import BUSY
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.protocol.timeouts import LOOKS
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.background_tasks import repeat
from dilocox.coordinator.server.door import Door, OneLineLog
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.errors import TrainingError
from dilocox.utils.storage import is_passing

_STATUS = {
    "malformed": 400, "refused": 403, "join": 403, "taken": 403, "gone": 410, "conflict": 409,
    "over": 409, "ended": 410, "stopped": 410, "busy": BUSY, "quota": 403,
}  # fmt: skip
_LOOK = 0.02
"""Seconds between two checks of the open connections."""
STRANGER_BODY_SECONDS = 15.0
"""Time limit for the body of a request without a client certificate."""
MEMBER_BODY_SECONDS = 60.0
"""Time limit for a member's body of up to a mebibyte: the member's link may be slow."""
_log = logging.getLogger(__name__)
_DOOR: web.AppKey[Callable[[web.Request], None]] = web.AppKey("door")
Model = TypeVar("Model", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Asked = TypeVar("Asked", m.BeginRequest, m.VoteRequest)


class Waiters:
    """Requests that wait for a change, by topic."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, topic: str) -> None:
        """Make all requests that wait for `topic` check again."""
        for future in self._waiting.get(topic, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """Make all waiting requests check again."""
        for topic in self._waiting:
            self.wake(topic)

    async def poll(
        self,
        topics: tuple[str, ...],
        seconds: float,
        look: Callable[[], Answer],
        enough: Callable[[Answer], bool],
    ) -> Answer:
        """Call `look` at once and after every change of `topics`, until its answer is `enough`.

        Returns the last answer, at the latest after `seconds`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        answer = look()
        while not enough(answer) and (left := end - loop.time()) > 0:
            future: asyncio.Future[None] = loop.create_future()
            for topic in topics:
                self._waiting.setdefault(topic, set()).add(future)
            try:
                await asyncio.wait((future,), timeout=left)
            finally:
                for topic in topics:
                    self._waiting[topic].discard(future)
                    if not self._waiting[topic]:
                        del self._waiting[topic]
            answer = look()
        return answer


class CoordinatorServer:
    """Serves one `Coordinator` on one address."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._waiters = Waiters()
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None
        self._watch: asyncio.Task[None] | None = None
        self.over = asyncio.Event()
        """Set when the run has ended."""

    async def start(self, host: str, port: int) -> int:
        """Listen on `host` and `port`. Returns the port; 0 takes a free one.

        Raises `TrainingError` if the server cannot listen there.
        """
        self.coordinator.on_change = self._changed
        app = web.Application(client_max_size=m.MAX_BODY, middlewares=[_refusals])
        app.add_routes(self._routes())
        app[_DOOR] = self._asked
        # No rank compresses requests, so the server does not decompress any.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            auto_decompress=False,
            lingering_time=1.0,
            logger=OneLineLog(_log, {}),
        )
        await self._runner.setup()
        assert self._runner.server is not None
        ranks = self.coordinator.config.site.exchanging_ranks
        self._door = Door(self._runner.server, _context(self.coordinator), ranks)
        try:
            bound = await self._door.listen(host, port)
        except OSError as error:
            await self._door.close()
            await self._runner.cleanup()
            reason = error.strerror or str(error)
            raise TrainingError(
                f"coordinator: cannot listen on {host}:{port} ({reason}); choose another "
                "network.host or network.port (0 takes a free one)"
            ) from None
        look = LOOKS * self.coordinator.timeouts.beat
        self._watch = asyncio.create_task(
            repeat(self.coordinator.expire, look, "the check for dead ranks")
        )
        self._changed("plan")
        return bound

    async def stop(self) -> None:
        """Answer all waiting requests and close the server."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        self._waiters.wake_all()
        if self._door is not None:
            await self._door.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def hung_up(self, limit: float) -> None:
        """Wait until no member's connection is open, at most `limit` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        while self._door is not None and self._door.members() and loop.time() < end:
            await asyncio.sleep(_LOOK)

    def _asked(self, request: web.Request) -> None:
        if self._door is not None:
            self._door.asked(request.protocol)

    def _changed(self, topic: str) -> None:
        self._waiters.wake(topic)
        if self.coordinator.state.over:
            self.over.set()

    # --- routes -----------------------------------------------------------------------------

    def _routes(self) -> list[web.RouteDef]:
        core, store = self.coordinator, self.coordinator.store
        departures = core.departures
        posts: list[tuple[str, type[Message], Callable[[Any, Caller], Any]]] = [
            ("ready", m.ReadyRequest, lambda r, c: core.ready(r)),
            ("beat", m.BeatRequest, lambda r, c: core.beat(r)),
            ("leave", m.LeaveRequest, lambda r, c: departures.leave(r)),
            ("retire", m.RetireRequest, departures.retire),
            ("standing", m.StandingRequest, core.standings.change),
            ("depart", m.DepartRequest, lambda r, c: departures.depart(r)),
            ("stop", m.StopRequest, departures.stop),
            ("fail", m.FailRequest, lambda r, c: departures.fail(r)),
            ("finish", m.FinishRequest, lambda r, c: departures.finish(r)),
            ("round_done", m.RoundDoneRequest, lambda r, c: core.round_done(r)),
            ("pieces/show", em.ShowPiecesRequest, lambda r, c: core.entries.show(r)),
            ("pieces/check", em.CheckPiecesRequest, lambda r, c: core.entries.check(r)),
            ("exchange/begin", m.BeginRequest, self._begin),
            ("exchange/vote", m.VoteRequest, self._vote),
            ("checkpoint", m.CheckpointRequest, lambda r, c: core.saves.wrote(r)),
            ("spoiled", m.SpoiledRequest, lambda r, c: core.saves.spoiled(r)),
            ("state", m.StateRequest, lambda r, c: core.saves.state(r)),
            ("report", m.ReportRequest, lambda r, c: core.report(r)),
            ("verdict", am.HandInRequest, core.verdicts.take),
            ("kv/set", m.StoreSetRequest, self._store_change(store.set)),
            ("kv/add", m.StoreAddRequest, self._store_change(store.add)),
            ("kv/delete", m.StoreDeleteRequest, store.delete),
            ("kv/check", m.StoreCheckRequest, lambda r, c: store.check(r)),
            ("kv/get", m.StoreGetRequest, self._store_get),
        ]
        routes = [web.post(f"/v1/{name}", self._post(model, act)) for name, model, act in posts]
        return [
            *routes,
            web.post("/v1/enrol", self._enrol),
            web.post("/v1/look", self._look),
            web.post("/v1/verdict_by_token", self._verdict_by_token),
            web.get(r"/v1/plan/{round:[0-9]{1,9}}", self._plan),
            web.get("/v1/status", self._status),
            web.get("/v1/checkpoints", self._view(lambda: replies.checkpoints(core.state))),
            web.get("/v1/ledger", self._view(lambda: replies.ledger(core.state))),
        ]

    def _post(
        self, model: type[Message], act: Callable[[Any, Caller], Any]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            caller = _caller(request)
            message = await _read(request, model)
            rank = getattr(message, "rank", None)
            if isinstance(rank, m.RankId):
                self.coordinator.check(caller, rank)
            else:
                self.coordinator.check_site(caller)
            if model is not m.BeatRequest:
                self.coordinator.budgets.charge(caller, len(await request.read()))
            reply = act(message, caller)
            return _reply(await reply if isinstance(reply, Awaitable) else reply)

        return handle

    def _view(self, look: Callable[[], Message]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            caller = _caller(request)
            self.coordinator.check_site(caller)
            self.coordinator.budgets.charge(caller)
            return _reply(look())

        return handle

    async def _enrol(self, request: web.Request) -> web.Response:
        return _reply(self.coordinator.enrol(await _read(request, m.EnrolRequest)))

    async def _look(self, request: web.Request) -> web.Response:
        asked, core = await _read(request, m.LookRequest), self.coordinator
        if core.tokens.holder(asked.token, core.state.tokens_in_force) is None:
            raise Refused("join", "token: not a token of this run, or no longer valid")
        return _reply(replies.status(core.state, 0))

    async def _verdict_by_token(self, request: web.Request) -> web.Response:
        asked = await _read(request, am.TokenHandInRequest)
        return _reply(self.coordinator.verdicts.take_by_token(asked))

    async def _begin(self, request: m.BeginRequest, caller: Caller) -> m.BeginReply:
        core, first = self.coordinator, self.coordinator.begin(request)
        return await self._settled(
            request, caller, first, core.begun, lambda reply: not reply.waiting_for
        )

    async def _vote(self, request: m.VoteRequest, caller: Caller) -> m.VoteReply:
        core, first = self.coordinator, self.coordinator.vote(request)
        return await self._settled(
            request, caller, first, core.verdict, lambda reply: reply.decision != "wait"
        )

    async def _settled(
        self,
        request: Asked,
        caller: Caller,
        first: Answer,
        again: Callable[[Asked], Answer],
        enough: Callable[[Answer], bool],
    ) -> Answer:
        """Return a reply about an exchange that is `enough`, or the latest one.

        `first` is the first reply. Within the request's wait, `again` makes further replies.
        """
        if enough(first):
            return first

        def look() -> Answer:
            self.coordinator.check(caller, request.rank)
            return again(request)

        return await self._waiters.poll(
            (f"key/{request.key}", "exchange"), request.wait, look, enough
        )

    async def _plan(self, request: web.Request) -> web.Response:
        caller, round_ = _caller(request), int(request.match_info["round"])
        self.coordinator.budgets.charge(caller)

        def look() -> m.PlanReply:
            self.coordinator.check_site(caller)
            return self.coordinator.plan(round_, caller)

        reply = await self._waiters.poll(
            ("plan",), _seconds(request), look, lambda reply: reply.leave or reply.plan is not None
        )
        return _reply(reply)

    async def _status(self, request: web.Request) -> web.Response:
        caller = _caller(request)
        self.coordinator.check_site(caller)
        self.coordinator.budgets.charge(caller)
        since = _integer(request, "since")
        state = self.coordinator.state
        reply = await self._waiters.poll(
            ("status",),
            _seconds(request),
            lambda: replies.status(state, since),
            lambda reply: reply.sequence > since or since == 0,
        )
        return _reply(reply)

    async def _store_get(self, request: m.StoreGetRequest, caller: Caller) -> m.StoreGetReply:
        def look() -> m.StoreGetReply:
            self.coordinator.check_site(caller)
            return self.coordinator.store.get(request, caller)

        topics = ("store", *(f"store/{key}" for key in request.keys))
        return await self._waiters.poll(topics, request.wait, look, lambda reply: not reply.missing)

    def _store_change(self, change: Callable[[Any, Caller], Message]) -> Any:
        def act(request: Any, caller: Caller) -> Message:
            reply = change(request, caller)
            self._waiters.wake(f"store/{request.key}")
            return reply

        return act


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request.app[_DOOR](request)
    reply = await _answer(request, handler)
    if not _certificate(request):
        reply.force_close()
    return reply


async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        refusal = m.Refusal(error=str(refused), kind=refused.kind)
    except web.HTTPRequestEntityTooLarge:
        refusal = m.Refusal(error=f"request: above {m.MAX_BODY} bytes", kind="malformed")
    except web.HTTPException as error:
        refusal = m.Refusal(error=f"{request.path[:200]}: {error.reason}", kind="malformed")
    except TrainingError as error:
        # The log cannot be written: nothing has changed, and the caller retries.
        return _not_now(error)
    except OSError as error:
        if not is_passing(error):
            raise
        return _not_now(error)
    return _reply(refusal, _STATUS[refusal.kind])


def _not_now(error: Exception) -> web.Response:
    _log.error("%s", error)
    return _reply(m.Refusal(error=str(error), kind="conflict"), 503)


def _reply(message: Message, status: int = 200) -> web.Response:
    return web.Response(
        body=message.model_dump_json().encode(), status=status, content_type="application/json"
    )


async def _read(request: web.Request, model: type[Model]) -> Model:
    limit = MEMBER_BODY_SECONDS if _certificate(request) else STRANGER_BODY_SECONDS
    try:
        async with asyncio.timeout(limit):
            body = await request.read()
    except TimeoutError:
        raise Refused("malformed", f"{request.path}: no whole body within {limit:g} s") from None
    except ConnectionResetError:
        # The caller died in the middle of its request, so the answer reaches no caller.
        raise Refused("malformed", f"{request.path}: cut short") from None
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        raise Refused("malformed", f"{request.path}: {where}: {problem['msg']}"[:500]) from None


def _certificate(request: web.Request) -> Any:
    """Return the caller's certificate as `ssl` gives it; None or empty without a certificate."""
    transport = request.transport
    return transport.get_extra_info("peercert") if transport is not None else None


def _caller(request: web.Request) -> Caller:
    certificate = _certificate(request)
    if not certificate:
        raise Refused("refused", f"{request.path}: needs a site's certificate; join the run first")
    names = {key: value for part in certificate["subject"] for key, value in part}
    try:
        return Caller(names["commonName"], int(names["serialNumber"]))
    except (KeyError, ValueError):
        raise Refused("refused", "certificate: does not name a site of this run") from None


def _integer(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refused("malformed", f"{request.path}: {name}: not a number")
    return int(text)


def _seconds(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= m.MAX_POLL:
        raise Refused("malformed", f"{request.path}: wait: give 0 to {m.MAX_POLL:g} seconds")
    return seconds


def _context(coordinator: Coordinator) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate: Path = coordinator.authority.certificate_path
    context.load_cert_chain(certificate)
    context.load_verify_locations(cadata=coordinator.authority.pem)
    # Optional, because an enrolling site has none yet; `_caller` demands one everywhere else.
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
