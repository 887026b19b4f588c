"""A site may say anything: it gets an answer or a refusal, and the run's log stays readable.

Behind the coordinator are a recorder and a notary, as in every run: what they make of it is read
again as well.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import custody_messages as cm
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol import standby_messages as sm
from dilocox.coordinator.protocol.attestation_messages import TokenAttestRequest
from dilocox.coordinator.protocol.site_reports import KINDS
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.record.log import statements as s
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import check_log, read_log
from dilocox.record.log.verdict_statements import HandedIn
from dilocox.record.verify.run_history import read_history
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.coordinator_driver import Driver, open_coordinator, replayed, run_config
from tests.support.served_run import Run

pytestmark = pytest.mark.waits

REQUESTS: dict[str, type[m.Message]] = {
    "ready": m.ReadyRequest,
    "beat": m.BeatRequest,
    "retire": m.RetireRequest,
    "round_done": m.RoundDoneRequest,
    "pieces/show": em.ShowPiecesRequest,
    "pieces/check": em.CheckPiecesRequest,
    "exchange/begin": m.BeginRequest,
    "exchange/vote": m.VoteRequest,
    "checkpoint": m.CheckpointRequest,
    "spoiled": m.SpoiledRequest,
    "state": m.StateRequest,
    "custody": cm.CustodyRequest,
    "report": m.ReportRequest,
    "kv/set": m.StoreSetRequest,
    "kv/add": m.StoreAddRequest,
    "kv/delete": m.StoreDeleteRequest,
    "kv/check": m.StoreCheckRequest,
    "kv/get": m.StoreGetRequest,
    "enrol": m.EnrolRequest,
    "apply": m.ApplyRequest,
    "look": m.LookRequest,
    "standing": m.StandingRequest,
    "verdict": am.HandInRequest,
    "verdict_by_token": am.TokenHandInRequest,
    "attest_by_token": TokenAttestRequest,
    "follow": sm.FollowRequest,
    "fence": sm.FenceRequest,
}
"""All that changes something, but what ends the run or the site's part in it, as it may."""
ENDS: dict[str, type[m.Message]] = {
    "leave": m.LeaveRequest,
    "retire": m.RetireRequest,
    "depart": m.DepartRequest,
    "finish": m.FinishRequest,
    "stop": m.StopRequest,
    "fail": m.FailRequest,
}
"""The rest."""
KEPT = {"states_every": 1}
"""States for audits: there may be verdicts on the rounds."""
AUDITOR = s.Signer.from_hex("0a" * 32)
ALWAYS = ("wait", "now")
"""Fields with a `likely` value only: a long poll would hold the test up, and a site that retires
now is gone."""

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
plain: st.SearchStrategy[Any] = st.integers(0, 9) | st.sampled_from(
    ["a", "b", "0" * 64, [], ["a"], {}, 0.5, True, None]
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.just({"site": "a", "stage": 0, "shard": 0}),
    "key": st.sampled_from(["outer/0/0/0", "outer/1/0/0", "grad/0/1/0", "site/a/x", "run/x"]),
    "keys": st.just(["run/x"]),
    "round": st.integers(0, 3),
    "tick": st.integers(0, 40),
    "slot": st.integers(0, 4),
    "attempt": st.integers(0, 3),
    "phase": st.sampled_from(["held", "fetched", "done"]),
    "held": st.just(["a", "b"]),
    "digests": st.just({"a": "0" * 64}),
    "wait": st.just(0.0),
    "now": st.just(False),
    "value": st.just("AAAA"),
    "kind": st.sampled_from(KINDS),
    "metrics": st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(["loss", "val_loss", "mfu"], st.floats()),
            **dict.fromkeys(
                [
                    "step",
                    "tokens",
                    "seconds",
                    "tokens_per_second",
                    "wait_share",
                    "payload_bytes",
                    "allreduce_bytes",
                    "ratio_per_transfer",
                    "members",
                    "peak_flops",
                ],
                st.just(1) | st.integers(0, 3) | anything,
            ),
            "anchor_digest": st.sampled_from(["0" * 64, "1" * 64, None]) | anything,
            "after_round": st.integers(-1, 3) | anything,
            "kind": st.sampled_from(["evaluation", "round", "resumed", "message", "plan"]),
            "site": st.sampled_from(["a", "b", "", None]),
            "round": st.integers(-1, 5) | anything,
            "text": st.text(st.characters(codec="utf-8")) | anything,
            "waited_for": anything,
            "ends": anything,
        },
    ),
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


verdicts = st.fixed_dictionaries(
    {},
    optional={
        "site": st.sampled_from(["a", "b", "c", ""]) | anything,
        "round": st.integers(-1, 3) | anything,
        "verdict": st.sampled_from(["EXACT", "MISMATCH", "NOT_RUN", "PASS"]) | anything,
        "auditor": st.just("0" * 64) | anything,
        "by": st.sampled_from(["a", "b", ""]) | anything,
        "seen": st.integers(0, 10**6) | anything,
        "run": st.just("1" * 32) | anything,
        "reason": anything,
    },
)
"""What of a whole verdict is another."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    metrics: list[RunMetrics] = []
    record: list[TransparencyLogSink] = []
    sections = {"folder": str(folder / "runs"), "name": "said"}
    config = run_config("ab", run=sections, record=KEPT)
    config.folder.mkdir(parents=True)
    record.append(TransparencyLogSink.open(config, folder, print))
    metrics.append(RunMetrics(config, config.folder, lambda record: None))
    made = Run(
        folder,
        run=sections,
        record=KEPT,
        on_report=metrics[0].report,
        on_plan=lambda plan: metrics[0].plan(plan.model_dump(mode="json")),
        on_message=metrics[0].happened,
        notary=record[0],
    )
    try:
        made.start()["a"].plan(0)
    except BaseException:
        made.close()
        raise
    yield made
    made.close()
    record[0].close()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(requests())
def test_every_request_is_answered_or_refused(run: Run, request_: tuple[str, bytes]) -> None:
    answered(run, *request_)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(verdicts, st.binary(min_size=32, max_size=32), st.booleans())
def test_every_signed_verdict_is_answered_or_refused(
    run: Run, changes: dict[str, Any], digest: bytes, by_token: bool
) -> None:
    whole = HandedIn("b", 0, "EXACT", AUDITOR.public, "a", digest.hex(), 1, 1)
    said = whole.statement(run.core.witness.run)
    try:
        text = AUDITOR.sign(s.Statement(said.kind, said.subjects, {**said.predicate, **changes}))
    except ValueError:
        assume(False)  # no canonical form: nobody can sign it
    body = {"statement": text, **({"token": run.token("a")} if by_token else {})}
    name = "verdict_by_token" if by_token else "verdict"
    answered(run, name, json.dumps(body).encode())


def answered(run: Run, path: str, body: bytes) -> None:
    pool = run.clients[0]._transport._pool
    answer = pool.urlopen("POST", f"/v1/{path}", body=body)
    content = json.loads(answer.data)
    if answer.status != 200:
        assert answer.status in (400, 403, 409, 410), (answer.status, content)
        assert content["error"]
        assert "\n" not in content["error"]


def test_what_was_made_of_it_is_read_again(run: Run, tmp_path: Path) -> None:
    """Runs after the tests above: the log of all that is replayed to the same state, and recorder
    and notary begin again."""
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
    folder = run.config.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} <= {*KINDS, "message", "plan"}
    # Whatever it says, a speaks for itself.
    assert {line["site"] for line in lines if "site" in line} <= {"a"}
    shutil.copytree(folder, tmp_path / "runs")
    recorder = RunMetrics(run.config, tmp_path / "runs", lambda record: None)
    recorder.finish("stopped", "")
    json.loads((tmp_path / "runs" / "summary.json").read_text())
    run.options["notary"].writer.cover()
    content = read_log(folder / "record")
    key = NoteKey.parse(content.public)
    check_log(content, key)
    course = read_history(content.entries, key)
    assert {(each.site, each.round) for each in course.verdicts} <= {("a", 0), ("b", 0)}


def test_all_that_may_be_said_is_said_here(run: Run) -> None:
    """By the server's routes, so that a new one is not forgotten."""
    posts = {
        route.path.removeprefix("/v1/")
        for route in run.server._routes()
        if isinstance(route, web.RouteDef) and route.method == "POST"
    }
    assert posts == REQUESTS.keys() | ENDS.keys()


@pytest.mark.parametrize("seed", range(6))
def test_what_ends_a_run_is_read_again(tmp_path: Path, seed: int) -> None:
    """Sites leave, finish, stop and fail in any order, for reasons with whatever in them."""
    rng = random.Random(seed)
    config = run_config("abc", run={"folder": str(tmp_path / "runs"), "name": "ends"})
    config.folder.mkdir(parents=True)
    recorder = RunMetrics(config, config.folder, lambda record: None)
    notary = TransparencyLogSink.open(config, tmp_path, print)
    driver = Driver(tmp_path, config, notary=notary, on_message=recorder.happened)
    for site in "abc":
        driver.enrol(site, RecordKey.new())
    for site in "abc":
        driver.ready(site)
    driver.plan(0, "a")
    departures = driver.core.departures
    for _ in range(20):
        path, site = rng.choice(sorted(ENDS)[: rng.choice([3, 4, 6])]), rng.choice("abc")
        said = {
            "rank": {"site": site, "stage": 0, "shard": 0}, "site": rng.choice("abcd"),
            "reason": rng.choice(["", "x" * 500, "\x1b[2J", "a\nb", "\u202e"]),
            "failed": rng.random() < 0.5, "complete": rng.random() < 0.5, "now": rng.random() < 0.3,
        }  # fmt: skip
        model = ENDS[path]
        request = model.model_validate({name: said[name] for name in model.model_fields})
        caller = Caller(site, driver.incarnations[site])
        with contextlib.suppress(Refused):
            driver.check(m.RankId(site=site, stage=0, shard=0))
            act = getattr(departures, path)
            act(request, caller) if path in ("retire", "stop") else act(request)
    state = driver.core.state
    assert replayed(driver) == state
    driver.core.close()
    notary.close()
    recorder.finish(state.phase, state.reason)
    again = TransparencyLogSink.open(config, tmp_path, print)
    driver.options["notary"] = again
    driver.core = open_coordinator(config, tmp_path, **driver.options)
    assert driver.core.state == state
    driver.core.close()
    again.close()
    text = (config.folder / "metrics.jsonl").read_text() + state.reason
    assert not set(text) & set("\x1b\u202e")
    RunMetrics(config, config.folder, lambda record: None).finish(state.phase, state.reason)
