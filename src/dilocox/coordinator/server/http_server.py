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

from dilocox.coordinator.client.transport import BUSY
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import custody_messages as cm
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.attestation_messages import TokenAttestRequest
from dilocox.coordinator.protocol.calls import Call, Route, Who
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.protocol.standby_messages import POSITION, SEEN, Position
from dilocox.coordinator.protocol.timeouts import LOOKS
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.background_tasks import repeat
from dilocox.coordinator.server.door import Door, OneLineLog
from dilocox.coordinator.server.enrolment_checks import check_admission
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.request_body import certificate_of, parsed, read_body
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.standby import StandbyLink
from dilocox.coordinator.server.standby_calls import StandbyCalls
from dilocox.errors import TrainingError
from dilocox.utils.storage import is_passing

_STATUS = {
    "malformed": 400, "refused": 403, "join": 403, "taken": 403, "gone": 410, "conflict": 409,
    "over": 409, "ended": 410, "stopped": 410, "busy": BUSY, "quota": 403,
    "stake": 409,
}  # fmt: skip
_LOOK = 0.02
"""Seconds between two checks of the open connections."""
_log = logging.getLogger(__name__)
_DOOR: web.AppKey[Callable[[web.Request], None]] = web.AppKey("door")
_CALLS: web.AppKey[StandbyCalls] = web.AppKey("standby")
Answer = TypeVar("Answer", bound=Message)
Asked = TypeVar("Asked", m.BeginRequest, m.VoteRequest)
Changed = TypeVar("Changed", m.StoreSetRequest, m.StoreAddRequest)


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

    def __init__(self, coordinator: Coordinator, standby: StandbyLink | None = None) -> None:
        """`standby`: copies the run's files to a standby; None: no standby may ask."""
        self.coordinator = coordinator
        self._waiters = Waiters()
        self.standby = StandbyCalls(coordinator, standby, self._waiters.poll)
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
        app[_DOOR], app[_CALLS] = self._asked, self.standby
        # Members' bodies have a format of their own (`body_coding`), which `read_body` unpacks.
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
        core = self.coordinator
        store, departures = core.store, core.departures
        of_members: list[Route[Caller]] = [
            m.ReadyRequest.route(lambda r, c: core.ready(r)),
            m.BeatRequest.route(lambda r, c: core.beat(r)),
            m.LeaveRequest.route(lambda r, c: departures.leave(r)),
            m.RetireRequest.route(departures.retire),
            m.StandingRequest.route(core.standings.change),
            m.DepartRequest.route(lambda r, c: departures.depart(r)),
            m.StopRequest.route(departures.stop),
            m.FailRequest.route(lambda r, c: departures.fail(r)),
            m.FinishRequest.route(lambda r, c: departures.finish(r)),
            m.RoundDoneRequest.route(lambda r, c: core.round_done(r)),
            em.ShowPiecesRequest.route(lambda r, c: core.entries.show(r)),
            em.CheckPiecesRequest.route(lambda r, c: core.entries.check(r)),
            m.BeginRequest.route(self._begin),
            m.VoteRequest.route(self._vote),
            m.CheckpointRequest.route(lambda r, c: core.saves.wrote(r)),
            m.SpoiledRequest.route(lambda r, c: core.saves.spoiled(r)),
            m.StateRequest.route(lambda r, c: core.saves.state(r)),
            cm.CustodyRequest.route(lambda r, c: core.saves.custody(r)),
            m.ReportRequest.route(lambda r, c: core.report(r)),
            am.HandInRequest.route(core.verdicts.take),
            m.StoreSetRequest.route(self._store_change(store.set)),
            m.StoreAddRequest.route(self._store_change(store.add)),
            m.StoreDeleteRequest.route(store.delete),
            m.StoreCheckRequest.route(lambda r, c: store.check(r)),
            m.StoreGetRequest.route(self._store_get),
            *self.standby.routes(),
        ]
        of_strangers: list[Route[None]] = [
            m.EnrolRequest.route(lambda r, _: core.enrol(r)),
            m.ApplyRequest.route(self._apply),
            m.LookRequest.route(self._look),
            am.TokenHandInRequest.route(lambda r, _: core.verdicts.take_by_token(r)),
            TokenAttestRequest.route(lambda r, _: core.machines.take(r)),
        ]
        gets: list[tuple[type[Call[Any]], Callable[[web.Request], Awaitable[web.Response]]]] = [
            (m.PlanQuery, self._plan),
            (m.StatusQuery, self._status),
            (m.CheckpointsQuery, self._view(lambda: replies.checkpoints(core.state))),
            (m.LedgerQuery, self._view(lambda: replies.ledger(core.state))),
        ]
        return [
            *(web.post(f"/v1/{each.request.path}", self._post(each)) for each in of_members),
            *(web.post(f"/v1/{each.request.path}", _open(each)) for each in of_strangers),
            *(web.get(f"/v1/{query.path}", act) for query, act in gets),
        ]

    def _post(self, route: Route[Caller]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            caller = _caller(request)
            body = await read_body(request)
            message = parsed(request, body, route.request)
            rank = getattr(message, "rank", None)
            if isinstance(rank, m.RankId):
                self.coordinator.check(caller, rank)
            else:
                self.coordinator.check_site(caller)
            self._check_seen(request)
            if route.request is not m.BeatRequest:
                self.coordinator.budgets.charge(caller, len(body))
            return _reply(await _answered(route, message, caller))

        return handle

    def _view(
        self, look: Callable[[], Message]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            caller = _caller(request)
            self.coordinator.check_site(caller)
            self._check_seen(request)
            self.coordinator.budgets.charge(caller)
            return _reply(look())

        return handle

    def _check_seen(self, request: web.Request) -> None:
        """Compare what a current caller has seen with this log (`StandbyCalls.check`)."""
        self.standby.check(Position.parse(request.headers.get(SEEN)))

    def _apply(self, request: m.ApplyRequest, _: None) -> m.Done:
        check_admission(self.coordinator.state, self.coordinator.tokens, request)
        return m.Done()

    def _look(self, request: m.LookRequest, _: None) -> m.Status:
        core = self.coordinator
        if core.tokens.holder(request.token, core.state.tokens_in_force) is None:
            raise Refused("join", "token: not a token of this run, or no longer valid")
        return replies.status(core.state, 0)

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
            self._check_seen(request)
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

    def _store_change(
        self, change: Callable[[Changed, Caller], Answer]
    ) -> Callable[[Changed, Caller], Answer]:
        def act(request: Changed, caller: Caller) -> Answer:
            reply = change(request, caller)
            self._waiters.wake(f"store/{request.key}")
            return reply

        return act


def _open(route: Route[None]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of a request that needs no client certificate."""

    async def handle(request: web.Request) -> web.Response:
        message = parsed(request, await read_body(request), route.request)
        return _reply(await _answered(route, message, None))

    return handle


async def _answered(route: Route[Who], message: Message, caller: Who) -> Message:
    reply = route.act(message, caller)
    return await reply if isinstance(reply, Awaitable) else reply


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request.app[_DOOR](request)
    calls = request.app[_CALLS]
    reply = await _answer(request, handler)
    position = calls.position
    if not await calls.may_leave(request.path):
        reply = _not_now(TrainingError("another coordinator takes over"))
    reply.headers[POSITION] = position.text
    if not certificate_of(request):
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


def _caller(request: web.Request) -> Caller:
    certificate = certificate_of(request)
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
