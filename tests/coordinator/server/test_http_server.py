"""The coordinator over real TLS on loopback: identity, refusals, waits, restart."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.cli import main
from dilocox.config.network import NetworkSection
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.client.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    SiteGoneError,
)
from dilocox.coordinator.client.transport import pool_of_stranger
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import body_coding
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server import http_server, request_body
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.run_server import serve
from dilocox.errors import ExchangeError, JoinError, TrainingError
from tests.support.coordinator_driver import VERSIONS, run_config
from tests.support.served_run import Run

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def test_join_gives_an_identity(run: Run, tmp_path: Path) -> None:
    reply = run.enrol("a")
    assert reply.incarnation == 1
    path = tmp_path / "identity.json"
    run.identities["a"].save(path)
    assert path.stat().st_mode & 0o077 == 0
    assert Identity.load(path) == run.identities["a"]
    beat = run.client("a").beat(0, 0, 0)
    assert (beat.phase, beat.role, beat.epoch.id) == ("enrolling", "enrolled", 0)


def test_join_refusals_are_one_line(run: Run) -> None:
    token = run.core.tokens.of("a")
    with pytest.raises(JoinError, match="not a join token"):
        run.enrol("a", token="dilocox1-nonsense")
    wrong = str(token)[:-1] + ("0" if token.secret[-1] != "0" else "1")
    with pytest.raises(JoinError, match="token: not a token of this run"):
        run.enrol("a", token=wrong)
    other = f"dilocox1-{'0' * 64}-{token.secret}"
    with pytest.raises(JoinError, match="its certificate is not the one of this run"):
        run.enrol("a", token=other)
    with pytest.raises(JoinError, match="site 'No Name': site: string should match"):
        run.enrol("No Name")
    with pytest.raises(JoinError, match="not in the run file"):
        run.enrol("zeta")
    run.enrol("a")
    with pytest.raises(JoinError, match="taken, it is enrolled already"):
        run.enrol("a")
    assert run.core.state.live == ["a"]


def test_wrong_secret_never_leaves_for_another_server(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    try:
        with pytest.raises(JoinError, match="certificate is not the one of this run"):
            enrol(
                other.url,
                run.token("a"),
                Applicant("a", run.config.digest(), stages=1, shards=1, versions=VERSIONS),
                timeouts=run.core.timeouts,
            )
    finally:
        other.close()


def test_without_a_certificate_nothing_is_answered(run: Run) -> None:
    pool = pool_of_stranger(run.url, run.core.authority.fingerprint)
    for method, path in [("GET", "/v1/status"), ("POST", "/v1/beat"), ("GET", "/v1/plan/0")]:
        answer = pool.urlopen(method, path, body=b"{}" if method == "POST" else None)
        assert answer.status == 403
        assert "join the run first" in json.loads(answer.data)["error"]
    pool.close()


def test_certificate_of_another_run_is_not_accepted(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    try:
        other.enrol("a")
        theirs = other.identities["a"]
        mixed = Identity(
            "a", 1, theirs.key, theirs.certificate, run.core.authority.pem,
            run.core.authority.fingerprint,
        )  # fmt: skip
        clock = iter(range(0, 10_000, 30))
        client = CoordinatorClient(
            run.url, mixed, run.core.timeouts, m.RankId(site="a", stage=0, shard=0),
            now=lambda: float(next(clock)), sleep=lambda _: None,
        )  # fmt: skip
        with pytest.raises(CoordinatorUnreachableError):
            client.beat(0, 0, 0)
    finally:
        other.close()


def test_a_site_speaks_for_itself_only(run: Run) -> None:
    run.enrol("a")
    run.enrol("b")
    run.identities["b"] = run.identities["a"]
    impostor = run.client("b")
    with pytest.raises(CoordinatorError, match="speaks for a only"):
        impostor.ready()
    with pytest.raises(CoordinatorError, match="only that site sets it"):
        impostor.kv_set("site/b/address", b"10.0.0.1")
    with pytest.raises(CoordinatorError, match="1 stages x 1 shards"):
        run.client("a", shard=5).ready()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("beat", b"not json"),
        ("beat", b'{"rank": {"site": "a", "stage": 0, "shard": 0}}'),
        ("beat", b'{"rank":{"site":"a","stage":0,"shard":0},"tick":-1,"round":0,"slot":0}'),
        ("beat", b'{"rank":{"site":"a","stage":0,"shard":0},"tick":0,"round":0,"slot":0,"x":1}'),
        ("exchange/begin", b'{"key":"outer/1","rank":{"site":"a","stage":0,"shard":0}}'),
        ("kv/set", b'{"key":"elsewhere/x","value":""}'),
        ("report", b"[" * 100_000),
        ("report", b" " * (m.MAX_BODY + 1)),
        ("nonsense", b"{}"),
    ],
)
def test_malformed_requests_get_400_with_a_reason(run: Run, path: str, body: bytes) -> None:
    run.enrol("a")
    pool = run.client("a")._transport._pool
    answer = pool.urlopen("POST", f"/v1/{path}", body=body)
    assert answer.status == 400
    refusal = m.Refusal.model_validate_json(answer.data)
    assert refusal.kind == "malformed"
    assert path.split("/")[0] in refusal.error or "bytes" in refusal.error
    answer = pool.urlopen("GET", "/v1/status?since=-1")
    assert answer.status == 400


def test_bodies_of_members_are_compressed_and_bounded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.enrol("a")
    client = run.client("a")
    pool, sent = client._transport._pool, dict[str, Any]()
    urlopen = type(pool).urlopen

    def noted(self: Any, method: str, path: str, **given: Any) -> Any:
        sent.update(given)
        return urlopen(self, method, path, **given)

    monkeypatch.setattr(type(pool), "urlopen", noted)
    assert client.beat(0, 0, 0).role == "enrolled"
    coding = {"Content-Encoding": sent["headers"]["Content-Encoding"]}
    assert coding == {"Content-Encoding": body_coding.ENCODING}
    beat = body_coding.decompressed(sent["body"], m.MAX_BODY)
    assert json.loads(beat)["rank"]["site"] == "a"

    charged = []
    monkeypatch.setattr(
        run.core.budgets, "charge", lambda caller, size=0: charged.append((caller.site, size))
    )
    asked = m.StoreSetRequest(key="site/a/x", value="A" * 40_000).model_dump_json().encode()
    body = body_coding.compressed(asked)
    assert pool.urlopen("POST", "/v1/kv/set", body=body, headers=coding).status == 200
    assert charged == [("a", len(asked))]  # not the few bytes that travelled
    bomb = body_coding.compressed(b" " * (m.MAX_BODY + 1))
    for headers, body, reason in [
        (coding, bomb, "above 1048576 bytes"),
        (coding, beat, "run the same dilocox version on both sides"),
        ({"Content-Encoding": "gzip"}, beat, "Content-Encoding gzip is not taken"),
    ]:
        answer = pool.urlopen("POST", "/v1/beat", body=body, headers=headers)
        refusal = m.Refusal.model_validate_json(answer.data)
        assert (answer.status, refusal.kind) == (400, "malformed")
        assert reason in refusal.error
    stranger = pool_of_stranger(run.url, run.core.authority.fingerprint)
    body = body_coding.compressed(b"{}")
    answer = stranger.urlopen("POST", "/v1/enrol", body=body, headers=coding)
    assert (answer.status, b"is not taken" in answer.data) == (400, True)
    stranger.close()


def test_a_caller_that_dies_in_its_request_is_no_error(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, read = threading.Event(), threading.Event(), request_body.read_body

    async def watched(request: Any) -> bytes:
        begun.set()
        try:
            return await read(request)
        finally:
            ended.set()

    monkeypatch.setattr(http_server, "read_body", watched)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(("127.0.0.1", run.port))) as caller:
        caller.sendall(b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert begun.wait(10)
    assert ended.wait(10)
    run.enrol("a")  # the server lives, and has said nothing
    assert not caplog.records


def test_exchange_with_waiting_voters_and_a_death(tmp_path: Path) -> None:
    run = Run(tmp_path, "abc", shards=2)
    try:
        for site in "abc":
            run.enrol(site)
        clients = {(s, k): run.client(s, k) for s in "abc" for k in (0, 1)}
        for client in clients.values():
            client.ready()
        key = OUTER(0, 0, 0)

        def exchange(client: CoordinatorClient) -> m.VoteReply:
            client.plan(0)
            client.begin(key)
            return client.vote(key, 1, RankVote(held=["a", "b", "c"]), limit=20)

        with ThreadPoolExecutor(6) as pool:
            voters = [client for (site, _), client in clients.items() if site != "b"]
            futures = [pool.submit(exchange, client) for client in voters]
            # b has voted with one of its two ranks, then it leaves.
            clients["b", 1].attempt(key)
            futures.append(pool.submit(exchange, clients["b", 0]))
            while len(run.core.state.exchanges.get(key.text, Empty).votes) < 5:
                assert run.core.state.phase == "running"
                threading.Event().wait(0.001)
            clients["b", 1].leave("power cut", failed=True)
            replies = [future.result(20) for future in futures[:-1]]
            assert {reply.decision for reply in replies} == {"repeat"}
            assert {reply.attempt for reply in replies} == {2}
            with pytest.raises(SiteGoneError, match="power cut"):
                futures[-1].result(20)
            again = [
                pool.submit(client.vote, key, 2, RankVote(held=["a", "c"])) for client in voters
            ]
            assert {tuple(future.result(20).set) for future in again} == {("a", "c")}
    finally:
        run.close()


class Empty:
    votes: tuple[()] = ()


def test_a_wait_ends_with_the_name_of_who_was_waited_for(run: Run) -> None:
    clients = run.start()
    clients["a"].plan(0)
    key = OUTER(0, 0, 0)
    clients["a"].attempt(key)
    with pytest.raises(ExchangeError, match=r"no decision after 0\.05 s; waited for b stage 0"):
        clients["a"].vote(key, 1, RankVote(held=["a"]), limit=0.05)
    with pytest.raises(CoordinatorError, match="waited for the plan of round 1"):
        clients["a"].plan(2, limit=0.0)
    with pytest.raises(ExchangeError, match=f"epoch/{run.core.state.epoch}/x not set after 0.05"):
        clients["a"].kv_get([f"epoch/{run.core.state.epoch}/x"], 0.05)


def test_too_few_sites_are_waited_for_without_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, outer={"min_sites": 2})
    try:
        clients = run.start()
        clients["a"].plan(0)
        key = OUTER(0, 0, 0)
        clients["a"].attempt(key)
        clients["b"].leave("power cut", failed=True)
        with ThreadPoolExecutor(1) as pool:
            vote = pool.submit(clients["a"].vote, key, 2, RankVote(held=["a"]), limit=0.01)
            # Longer than the limit, and than it takes to ask again.
            with pytest.raises(TimeoutError):
                vote.result(0.3)
            run.enrol("b")
            run.client("b").beat(0, 0, 0)
            assert vote.result(20).set == ["a"]
    finally:
        run.close()


def test_store_waits_adds_once_and_forgets_old_epochs(run: Run) -> None:
    clients = run.start()
    prefix = f"epoch/{run.core.state.epoch}"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients["a"].kv_get, [f"{prefix}/x", f"{prefix}/y"], 20)
        clients["b"].kv_set(f"{prefix}/x", b"\x00\xff")
        clients["b"].kv_set(f"{prefix}/y", b"2")
        assert waiting.result(20) == {f"{prefix}/x": b"\x00\xff", f"{prefix}/y": b"2"}
    assert [clients["a"].kv_add(f"{prefix}/n", 2) for _ in range(2)] == [2, 4]
    request = m.StoreAddRequest(key=f"{prefix}/n", amount=5, nonce="0" * 16)
    replies = [clients["a"].send(request).value for _ in range(2)]
    assert replies == [9, 9]
    assert clients["b"].kv_check([f"{prefix}/x"])
    assert clients["b"].kv_delete(f"{prefix}/x")
    assert not clients["b"].kv_check([f"{prefix}/x"])
    with pytest.raises(ValueError, match="value"):
        clients["a"].kv_set("run/big", b"x" * (m.MAX_VALUE + 3))
    clients["b"].leave("bye")
    with pytest.raises(CoordinatorError, match="its epoch is over"):
        clients["a"].kv_set(f"{prefix}/x", b"")


def test_restart_while_a_rank_waits(run: Run) -> None:
    clients = run.start()
    clients["a"].plan(0)
    key = OUTER(0, 0, 0)
    clients["a"].attempt(key)
    clients["a"].kv_set("site/a/address", b"10.0.0.1:5")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients["a"].vote, key, 1, RankVote(held=["a", "b"]))
        while not run.core.state.exchanges[key.text].votes:
            threading.Event().wait(0.001)
        before = run.core.state
        run.down()
        run.up()
        assert run.core.state == before
        assert clients["b"].kv_get(["site/a/address"], 5) == {"site/a/address": b"10.0.0.1:5"}
        assert clients["b"].vote(key, 1, RankVote(held=["a", "b"])).set == ["a", "b"]
        assert waiting.result(20).set == ["a", "b"]


def test_a_full_disk_holds_the_run_up_and_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.enrol("a")
    run.enrol("b")
    tried = threading.Event()
    append = run.core.log.append

    def full(event: Any) -> None:
        tried.set()
        raise TrainingError("disk full")

    monkeypatch.setattr(run.core.log, "append", full)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.client("a").ready)
        assert tried.wait(20)
        assert run.core.state.sites["a"].ready == set()
        monkeypatch.setattr(run.core.log, "append", append)
        waiting.result(20)
    assert run.core.state.sites["a"].ready == {(0, 0)}


def test_silence_then_rejoin_with_a_new_incarnation(run: Run) -> None:
    clients = run.start()
    for client in clients.values():
        client.beat(0, 0, 0)
    run.clock.time += 2
    for _ in range(3):
        clients["a"].beat(0, 0, 0)
        run.expire()
        run.clock.time += 2
    with pytest.raises(SiteGoneError, match="no beat from stage 0 shard 0"):
        clients["b"].status()
    assert run.enrol("b").incarnation == 2
    again = run.client("b")
    reply = again.beat(0, 0, 0)
    assert (reply.role, reply.donor) == ("entering", "a")
    with pytest.raises(SiteGoneError, match="replaced by a newer one"):
        clients["b"].ready()
    again.ready()
    assert again.beat(0, 0, 0).role == "active"
    assert list(clients["a"].plan(0).members) == ["a", "b"]


def test_status_feed_and_operator(run: Run) -> None:
    operator = CoordinatorClient(
        run.url, Identity.load(run.core.authority.operator_path), run.core.timeouts
    )
    run.clients.append(operator)
    first = operator.status()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(operator.status, max(1, first.sequence), 10.0)
        clients = run.start()
        news = waiting.result(20)
    assert news.sequence > first.sequence
    clients["a"].report(0, {"loss": 2.5}, "round")
    status = operator.status()
    assert status.sites[0].metrics == {"round": {"loss": 2.5, "round": 0}}
    assert [item.text for item in status.messages][:2] == ["a enrolled", "b enrolled"]
    clients["a"].plan(0)
    assert operator.plan(0).round == 0
    assert operator.stop("operator") == 2
    assert clients["b"].beat(0, 0, 0).stop_tick == 2
    assert len(operator.ledger().entries) == 2
    with pytest.raises(CoordinatorError, match="made without a rank"):
        operator.ready()


def test_who_holds_a_sites_token_may_look(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dilocox status HOST:PORT --token-file token`: nothing of the run changes."""
    clients = run.start()
    clients["a"].report(0, {"loss": 2.5, "step": 8, "tokens_per_second": 100.0}, "round")
    before = clients["a"].status().sequence
    token = tmp_path / "token"

    def typed(text: str) -> tuple[int, str]:
        token.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main.main(["status", f"127.0.0.1:{run.port}", "--token-file", str(token)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    own = run.core.tokens.of("b", run.core.state.token_issues["b"])
    code, out = typed(f"{own}\n")
    assert code == 0
    assert f"run {run.config.run.name}: training" in out
    assert "round 0 is done, step 8 of " in out
    assert "site a  active  round 0  100 tokens/s" in out
    assert clients["a"].status().sequence == before
    other = JoinToken(own.fingerprint, "0" * 32)
    code, out = typed(str(other))
    assert (code, "token: not a token of this run, or no longer valid" in out) == (1, True)
    assert "training" not in out
    code, out = typed(str(JoinToken("0" * 64, own.secret)))
    assert (code, "its certificate is not the one of this run" in out) == (1, True)

    async def ban() -> None:
        run.core.standings._ban("b")

    run.call(ban())
    code, out = typed(f"{own}\n")
    assert (code, "no longer valid" in out) == (1, True), "a banned site's token is void"


def test_port_taken_is_one_line(run: Run, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=f"cannot listen on 127.0.0.1:{run.port} .*port"):
        serve(run.config, tmp_path / "second", port=run.port)


def test_serve_until_the_run_is_over_and_resume(tmp_path: Path) -> None:
    config = run_config("a", network={"heartbeat": 0.2})
    ready = threading.Event()
    reports: list[tuple[Any, ...]] = []
    ends: list[m.Status] = []
    endpoint: list[Endpoint] = []

    def announce(where: Endpoint) -> None:
        endpoint.append(where)
        ready.set()

    def written(*report: Any) -> bool:
        reports.append(report)
        return True

    def target(resume: bool) -> None:
        file, listener = tmp_path / "ready.json", RunListener(written, on_ready=announce)
        ends.append(serve(config, tmp_path, listener=listener, resume=resume, ready_file=file))

    own = RecordKey.new()
    for resume in (False, True):
        ready.clear()
        thread = threading.Thread(target=target, args=(resume,))
        thread.start()
        assert ready.wait(20)
        assert Endpoint.load(tmp_path / "ready.json") == endpoint[-1]
        identity, _ = enrol(
            endpoint[-1].url,
            endpoint[-1].tokens["a"],
            Applicant("a", config.digest(), stages=1, shards=1, versions=VERSIONS),
            timeouts=Timeouts.derive(config.network),
            record_key=own,
        )
        timeouts = Timeouts.derive(config.network)
        client = CoordinatorClient(
            endpoint[-1].url, identity, timeouts, m.RankId(site="a", stage=0, shard=0)
        )
        client.ready()
        assert client.plan(0).round == 0
        if not resume:
            tick = client.stop("SIGINT")
            client.checkpoint(tick, 0, tick, {})
        assert client.report(0, {"loss": 1.0})
        client.finish(complete=resume)
        client.close()
        thread.join(20)
    assert [end.phase for end in ends] == ["stopped", "finished"]
    with pytest.raises(TrainingError, match="its run is finished; add --resume"):
        serve(config, tmp_path)
    assert reports == [("a", 0, "round", {"loss": 1.0})] * 2


def test_the_end_waits_for_callers_to_hang_up(run: Run) -> None:
    run.enrol("a")
    client = run.client("a")
    client.beat(0, 0, 0)
    run.call(run.server.hung_up(0.05))  # its limit, with the connection open
    hung_up = asyncio.run_coroutine_threadsafe(run.server.hung_up(20.0), run.loop)
    client.beat(0, 0, 0)
    assert not hung_up.done()
    client.close()
    hung_up.result(10)


def test_no_torch_and_a_quick_import() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import dilocox.coordinator.server.run_server, "
        "dilocox.coordinator.client.client, dilocox.coordinator.client.enrolment; "
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_no_listener_is_reported_with_the_mend() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(JoinError, match="is it running"):
            enrol(
                f"127.0.0.1:{port}",
                f"dilocox1-{'0' * 64}-{'0' * 32}",
                Applicant("a", "0" * 64, stages=1, shards=1, versions=VERSIONS),
                timeouts=replace(Timeouts.derive(NetworkSection()), link=0.1, request=0.1),
            )
    with pytest.raises(JoinError, match="write it as HOST:PORT"):
        pool_of_stranger("nowhere", "0" * 64)
