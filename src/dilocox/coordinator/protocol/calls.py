"""Declares calls to the coordinator: a path, a request, and the class of the reply.

The class of the request holds all three, for client and server. So a call is declared in one place:
a `Message` with a path, and one line in the server's table of routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

from dilocox.coordinator.protocol.round_plan import Message

Reply = TypeVar("Reply", bound=Message)
Who = TypeVar("Who")


class Call(Generic[Reply]):
    """Base of all requests; `Reply` is the class of the coordinator's reply.

    A request that is a `Message` is the body of a POST. Requests that the server may hold before
    it replies have a field `wait`, in seconds.
    """

    method: ClassVar[Literal["GET", "POST"]] = "POST"
    path: ClassVar[str]
    """Path after `/v1/`, with patterns for its variable parts."""

    @property
    def target(self) -> str:
        """Path of this request after `/v1/`, with its arguments."""
        return self.path

    @property
    def server_wait(self) -> float:
        """Seconds that the server may hold this request before it replies."""
        return float(getattr(self, "wait", 0.0))

    @classmethod
    def reply(cls) -> type[Reply]:
        """Return the class of the reply."""
        for each in cls.__mro__:
            for base in each.__dict__.get("__orig_bases__", ()):
                if isinstance(origin := get_origin(base), type) and issubclass(origin, Call):
                    found: type[Reply] = get_args(base)[0]
                    return found
        raise TypeError(f"{cls.__name__}: names no class of a reply")

    @classmethod
    def route(cls, act: Callable[[Self, Who], Reply | Awaitable[Reply]]) -> Route[Who]:
        """Return the route on which the server answers such requests by `act(request, caller)`."""
        return Route(cls, act)


class Query(Call[Reply]):
    """Base of all requests without a body: a GET."""

    method: ClassVar[Literal["GET", "POST"]] = "GET"


@dataclass(frozen=True)
class Route(Generic[Who]):
    """How the server answers one kind of request."""

    request: type[Any]
    """Class of the request, a `Message` that is a `Call`."""
    act: Callable[[Any, Who], Message | Awaitable[Message]]
    """Returns the reply to a request of a caller."""
