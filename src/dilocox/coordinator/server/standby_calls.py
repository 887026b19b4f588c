"""The server's answers to a standby, and what ends a coordinator that is no longer the only one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from dilocox.coordinator.protocol.calls import Route
from dilocox.coordinator.protocol.standby_messages import (
    FenceRequest,
    FollowReply,
    FollowRequest,
    Position,
)
from dilocox.coordinator.server.generations import Generations
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.standby import StandbyLink
from dilocox.errors import SupersededError, TrainingError

_OWN = (f"/v1/{FollowRequest.path}", f"/v1/{FenceRequest.path}")
Poll = Callable[..., Awaitable[Any]]
"""`Waiters.poll`."""


class StandbyCalls:
    """Routes of a standby. Nothing leaves the server that the standby must have first."""

    def __init__(self, coordinator: Coordinator, link: StandbyLink | None, poll: Poll) -> None:
        """Read the generation of the coordinator's folder. Raises `TrainingError`."""
        self._core, self._link, self._poll = coordinator, link, poll
        if link is not None:
            link.on_awaited = lambda: coordinator.on_change("log")
        self._generations = Generations(coordinator.log.path.parent)
        self.halted = asyncio.Event()
        """Set when this coordinator must end, whatever the run does."""
        self.error: TrainingError | None = None
        """Why it must end."""

    @property
    def position(self) -> Position:
        """Generation, and last event that no power cut can take from the log."""
        bare = Position(self._generations.current, self._core.log.flushed)
        return replace(bare, seal=self._core.tokens.seal(bare.said))

    def routes(self) -> list[Route[Caller]]:
        """Return the routes of a standby."""
        return [FollowRequest.route(self._follow), FenceRequest.route(self._fence)]

    async def may_leave(self, path: str) -> bool:
        """Wait until a reply may leave; False if this coordinator must send nothing any more.

        `path`: of the request.
        """
        if path in _OWN:
            return True
        if self._link is not None and not self.halted.is_set():
            await self._link.settled(self._core.log)
        return not self.halted.is_set()

    def check(self, seen: Position) -> None:
        """End this coordinator if a caller has seen a newer one, or events that this log lacks.

        Raises `TrainingError` then: the caller asks again, perhaps elsewhere.
        """
        # A member that could make up a position could end the coordinator for good.
        sealed = self._core.tokens.is_sealed(seen.said, seen.seal)
        standing = self._generations.standing(seen, self._core.log.last) if sealed else ""
        if standing == "fenced":
            self._superseded(seen.generation)
        elif standing == "behind":
            self._halt(
                SupersededError(
                    f"{self._core.log.path}: lacks events that a site has seen (event "
                    f"{seen.number} of generation {seen.generation}): it was copied before they "
                    "were written; start the coordinator that has them, or go back to the last "
                    "checkpoint with --resume"
                )
            )
        if self.error is not None:
            raise self.error

    async def _follow(self, request: FollowRequest, caller: Caller) -> FollowReply:
        link = self._of(caller)
        link.took(request.name, request.copied, self._core.log)
        reply: FollowReply = await self._poll(
            ("log",), request.wait, lambda: self._reply(link, request), _is_news
        )
        if reply.over and not reply.content:
            link.let_go()  # The standby ends now, and late statements need not wait for it.
        return reply

    def _fence(self, request: FenceRequest, caller: Caller) -> FollowReply:
        link = self._of(caller)
        if request.generation <= self._generations.current:
            raise Refused(
                "conflict", f"this coordinator is of generation {self._generations.current}"
            )
        if request.late:
            self._superseded(request.generation)
            return self._reply(link, request)
        link.took(request.name, request.copied, self._core.log)
        reply = self._reply(link, request)
        if not link.is_whole(request.copied, reply, self._core.log):
            raise Refused("conflict", "the standby lacks more than one reply holds: follow first")
        self._superseded(request.generation)
        return reply

    def _reply(self, link: StandbyLink, request: FollowRequest | FenceRequest) -> FollowReply:
        core = self._core
        return link.reply(request.copied, core.log, self._generations.current, over=core.state.over)

    def _of(self, caller: Caller) -> StandbyLink:
        if not caller.operator:
            raise Refused("refused", f"site {caller.site}: is not the operator's standby")
        if self._link is None:
            raise Refused("refused", "this coordinator can have no standby")
        return self._link

    def _superseded(self, generation: int) -> None:
        self._generations.end()
        self._halt(
            SupersededError(
                f"a standby has taken over this run (generation {generation}); the run goes on "
                "there, and this folder is out of date"
            )
        )

    def _halt(self, error: TrainingError) -> None:
        if self.error is None:
            self.error = error
            self.halted.set()


def _is_news(reply: FollowReply) -> bool:
    return reply.content or reply.over
