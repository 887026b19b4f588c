"""A site may say anything: it gets an answer or a refusal, and the run's log stays readable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.outer.coordinator import messages as m
from dilocox.outer.coordinator.core import Coordinator
from tests.outer.coordinator.served import Run

REQUESTS: dict[str, type[m.Message]] = {
    "ready": m.ReadyRequest,
    "beat": m.BeatRequest,
    "retire": m.RetireRequest,
    "round_done": m.RoundDoneRequest,
    "exchange/begin": m.BeginRequest,
    "exchange/vote": m.VoteRequest,
    "checkpoint": m.CheckpointRequest,
    "spoiled": m.SpoiledRequest,
    "state": m.StateRequest,
    "report": m.ReportRequest,
    "kv/set": m.StoreSetRequest,
    "kv/add": m.StoreAddRequest,
    "kv/delete": m.StoreDeleteRequest,
    "kv/check": m.StoreCheckRequest,
    "kv/get": m.StoreGetRequest,
    "enrol": m.EnrolRequest,
}
"""All that changes something, but what ends the run or the site's part in it, as it may."""
ALWAYS = ("wait", "now")
"""Fields with a `likely` value only: a long poll would hold the test up, and a site that retires
now is gone."""

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
plain = st.integers(0, 9) | st.sampled_from(["a", "b", "0" * 64, [], ["a"], {}, 0.5, True, None])
likely: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.just({"site": "a", "stage": 0, "shard": 0}),
    "key": st.sampled_from(["outer/0/0/0", "outer/1/0/0", "grad/0/1/0", "site/a/x", "run/x"]),
    "keys": st.just(["run/x"]),
    "round": st.integers(0, 3),
    "tick": st.integers(0, 40),
    "slot": st.integers(0, 4),
    "attempt": st.integers(0, 3),
    "held": st.just(["a", "b"]),
    "digests": st.just({"a": "0" * 64}),
    "wait": st.just(0.0),
    "now": st.just(False),
    "value": st.just("AAAA"),
    "metrics": st.just({"loss": 1.0}),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(REQUESTS)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60))
    body = {}
    for name, field in REQUESTS[path].model_fields.items():
        usual = likely.get(name, plain)
        if name in ALWAYS:
            body[name] = draw(usual)
        elif field.is_required() or draw(st.booleans()):
            body[name] = draw(usual if draw(st.integers(0, 19)) else anything)
    return path, json.dumps(body).encode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = Run(tmp_path_factory.mktemp("run"))
    made.start()
    yield made
    made.close()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(requests())
def test_every_request_is_answered_or_refused(run: Run, request_: tuple[str, bytes]) -> None:
    path, body = request_
    pool = run.clients[0]._transport._pool
    answer = pool.request("POST", f"/v1/{path}", body=body)
    content = json.loads(answer.data)
    if answer.status != 200:
        assert answer.status in (400, 403, 409, 410), (answer.status, content)
        assert content["error"]
        assert "\n" not in content["error"]


def test_what_was_made_of_it_is_read_again(run: Run, tmp_path: Path) -> None:
    """Runs after the test above: the log of all that is replayed to the same state."""
    assert len(run.core.state.live) == 2
    for file in run.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    again = Coordinator(run.config, tmp_path, now=run.clock, wall=run.clock)
    try:
        assert again.state.plans == run.core.state.plans
        assert again.state.checkpoints == run.core.state.checkpoints
        assert again.state.exchanges == run.core.state.exchanges
        assert again.state.ledger.to_json() == run.core.state.ledger.to_json()
    finally:
        again.close()
