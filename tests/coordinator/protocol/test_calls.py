"""A call is declared once: its class has the path and the reply, and the server has a route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.server.http_server import CoordinatorServer

RANK = m.RankId(site="a", stage=1, shard=2)
SAID = {"site": "a", "stage": 1, "shard": 2}
KEY = "outer/3/0/1"


def calls(base: type[Call[Any]] = Call) -> Iterator[type[Call[Any]]]:
    for each in base.__subclasses__():
        if "path" in each.__dict__ and each.__module__.startswith("dilocox."):
            yield each
        yield from calls(each)


def test_every_call_has_one_path_and_one_route(tmp_path: Path) -> None:
    declared = {(each.method, f"/v1/{each.path}") for each in calls()}
    assert len(declared) == len(list(calls())) == 36
    core = MagicMock()
    core.log.path = tmp_path / "coordinator.sqlite"
    routes = CoordinatorServer(core)._routes()
    assert {(each.method, each.path) for each in routes} == declared
    assert len(routes) == len(declared)


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: call.__name__)
def test_the_documented_path_is_the_path(call: type[Call[Any]]) -> None:
    assert issubclass(call.reply(), Message)
    name = (call.__doc__ or "").split("`")[1]
    start = name.split("?")[0].split("/ROUND")[0]
    assert call.path == start or call.path.startswith(f"{start}/{{")
    assert issubclass(call, Message) is (call.method == "POST")


@pytest.mark.parametrize(
    ("call", "target", "body", "wait", "reply"),
    [
        (m.ReadyRequest(rank=RANK), "ready", {"rank": SAID}, 0.0, m.Done),
        (
            m.BeatRequest(rank=RANK, tick=5, round=1, slot=2, slot_seconds=0.5),
            "beat",
            {"rank": SAID, "tick": 5, "round": 1, "slot": 2, "slot_seconds": 0.5,
             "building": False},
            0.0,
            m.BeatReply,
        ),
        (
            m.BeginRequest(key=KEY, rank=RANK, wait=2.5),
            "exchange/begin",
            {"key": KEY, "rank": SAID, "commitment": None, "wait": 2.5},
            2.5,
            m.BeginReply,
        ),
        (m.BeginRequest(key=KEY, rank=RANK), "exchange/begin",
         {"key": KEY, "rank": SAID, "commitment": None, "wait": 0.0}, 0.0, m.BeginReply),
        (
            m.VoteRequest(key=KEY, rank=RANK, attempt=1, held=["a"]),
            "exchange/vote",
            {"key": KEY, "rank": SAID, "attempt": 1, "phase": "held", "held": ["a"],
             "contributes": True, "digests": {}, "statement": None, "opinions": {},
             "broken": False, "failed": [], "observer": False, "wait": 20.0},
            20.0,
            m.VoteReply,
        ),
        (m.StoreGetRequest(keys=["run/x"], wait=1.0), "kv/get", {"keys": ["run/x"], "wait": 1.0},
         1.0, m.StoreGetReply),
        (em.ShowPiecesRequest(rank=RANK, pieces=[]), "pieces/show", {"rank": SAID, "pieces": []},
         0.0, m.Done),
        (am.HandInRequest(), "verdict", {"statement": None}, 0.0, am.HandInReply),
        (am.TokenHandInRequest(token="t"), "verdict_by_token", {"statement": None, "token": "t"},
         0.0, am.HandInReply),
        (m.PlanQuery(3, 1.5), "plan/3?wait=1.500", None, 1.5, m.PlanReply),
        (m.StatusQuery(7, 0.25), "status?since=7&wait=0.250", None, 0.25, m.Status),
        (m.CheckpointsQuery(), "checkpoints", None, 0.0, m.Checkpoints),
        (m.LedgerQuery(), "ledger", None, 0.0, m.Ledger),
    ],
)  # fmt: skip
def test_what_is_sent(
    call: Call[Any], target: str, body: dict[str, Any] | None, wait: float, reply: type[Message]
) -> None:
    """Field by field in this order: other versions read and write the same."""
    assert (call.target, call.server_wait, call.reply()) == (target, wait, reply)
    sent = call.model_dump_json() if isinstance(call, Message) else None
    assert sent == (None if body is None else json.dumps(body, separators=(",", ":")))


def test_a_call_without_a_reply_is_a_mistake() -> None:
    class Nameless(Call):  # type: ignore[type-arg]
        path = "nameless-call"

    with pytest.raises(TypeError, match="Nameless: names no class of a reply"):
        Nameless.reply()
