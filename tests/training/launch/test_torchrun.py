"""Ranks that a launcher has started: they wait for each other, and fork before they start more."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import ConfigError, JoinError
from dilocox.training.builder import Hooks
from dilocox.training.launch import local, preflight, torchrun
from dilocox.training.launch import rank as rank_process
from dilocox.training.launch.rank_job import RankJob
from dilocox.training.launch.supervisor import listening
from dilocox.training.launch.torchrun import Seal, agree, meeting_place
from dilocox.training.launch.torchrun_env import RankVariables

pytestmark = pytest.mark.waits

SOON = timedelta(seconds=30)
TOKEN = f"dilocox1-{'a' * 64}-{'5' * 32}"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "LOOK", 0.005)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def variables(rank: int, world: int, port: str = "1") -> RankVariables:
    return RankVariables(rank, world, rank, world, "127.0.0.1", port)


def nothing() -> None:
    return


ENDPOINT = Endpoint.at("localhost:1", "paris", TOKEN)
NOTHING = torchrun.Preparation(check=nothing, fetch=nothing)


def all_agree(
    prepares: list[Callable[[], object]], enrol: Callable[[], str], store: Any = None
) -> list[Any]:
    """What every rank gets, or the error that it raises."""
    store = dist.HashStore() if store is None else store
    seal = Seal(TOKEN, "paris")

    def one(rank: int) -> object:
        try:
            return agree(store, rank, len(prepares), prepares[rank], enrol, seal)
        except JoinError as error:
            return error

    with ThreadPoolExecutor(len(prepares)) as pool:
        return list(pool.map(one, range(len(prepares))))


def test_the_site_enrols_when_every_rank_is_through() -> None:
    order: list[str] = []
    first = threading.Event()

    def check() -> None:
        order.append("checked")
        first.set()

    def fetch() -> None:
        assert first.wait(10.0)
        order.append("fetched")

    def enrol() -> str:
        order.append("enrolled")
        return "identity"

    assert all_agree([check, fetch, fetch], enrol) == ["identity"] * 3
    assert order == ["checked", "fetched", "fetched", "enrolled"]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_what_one_rank_cannot_do_ends_all(culprit: int) -> None:
    def refuse() -> None:
        raise ConfigError("no room: buy some")

    prepares: list[Callable[[], object]] = [nothing] * 3
    prepares[culprit] = refuse

    def enrol() -> str:
        raise AssertionError("enrolled")

    said = all_agree(prepares, enrol)
    assert [str(error) for error in said] == ["no room: buy some"] * 3


class Open:
    """A store as a stranger in the site's network sees it: without a key, and for all its life."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.seen: list[bytes] = []

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)
        self.seen.append(self.store.get(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_stranger_in_the_store_does_not_learn_who_the_site_is() -> None:
    store = Open()
    identity = '{"key": "-----BEGIN PRIVATE KEY-----"}'
    assert all_agree([nothing] * 3, lambda: identity, store) == [identity] * 3
    assert len(store.seen) == 3
    assert not any(b"PRIVATE" in value or TOKEN.encode() in value for value in store.seen)
    assert not store.check(["enrolled"]), "when all have read it, the sealed text goes, too"


@pytest.mark.parametrize("damage", ["token", "site", "bit", "rubbish"])
def test_what_was_not_sealed_with_the_join_token_is_refused(damage: str) -> None:
    sealed = Seal(TOKEN, "paris").close("identity")
    seal = Seal(TOKEN, "paris")
    if damage == "token":
        seal = Seal(TOKEN.replace("5", "6"), "paris")
    elif damage == "site":
        seal = Seal(TOKEN, "lyon")
    elif damage == "bit":
        sealed = sealed[:-1] + ("0" if sealed[-1] != "0" else "1")
    else:
        sealed = "é not hex"
    with pytest.raises(JoinError, match="not sealed with this site's join token") as caught:
        seal.open(sealed)
    assert TOKEN not in str(caught.value)
    assert Seal(TOKEN, "paris").close("identity") != Seal(TOKEN, "paris").close("identity")


def test_a_site_of_one_rank_meets_nobody() -> None:
    with meeting_place(variables(0, 1), SOON) as store:
        assert store is None
        assert agree(store, 0, 1, nothing, lambda: "me", Seal(TOKEN, "paris")) == "me"


@pytest.mark.waits
def test_ranks_meet_in_a_store_that_ends_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    with meeting_place(variables(0, 2, port), SOON) as first:
        assert first is not None
        # Nothing here that a fork would harm: the store's own thread is in another process.
        with meeting_place(variables(1, 2, port), SOON) as second:
            assert second is not None
            first.set("key", "value")
            assert second.get("key") == b"value"
            assert not second.check(["other"])
            # As if the first rank had died.
            torchrun.processes.end(_children("meeting"), grace=0.0)
            with pytest.raises(JoinError, match="the first rank of this site is gone"):
                torchrun._hear(second, "other")


def _children(name: str) -> list[Any]:
    import multiprocessing

    ours: list[Any] = [each for each in multiprocessing.active_children() if each.name == name]
    assert len(ours) == 1
    for each in ours:
        each.kill()
    return ours


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        with (
            pytest.raises(JoinError, match=f"127.0.0.1:{port}: the ranks cannot meet there"),
            meeting_place(variables(0, 2, port), SOON),
        ):
            pass


def test_torchruns_own_store_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with meeting_place(variables(0, 2, str(agent.port)), SOON) as store:
            assert store is not None
            # What an earlier attempt has said is not heard.
            assert not store.check(["enrolled"])
            store.set("enrolled", "+")


def run(tmp_path: Path, **site: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"folder": str(tmp_path)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"batch_size": 4, "micro_batch_size": 2, **site},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path) -> None:
    config = run(tmp_path, stages=2)
    endpoint = Endpoint("https://localhost:1", {"paris": "token"}, "")
    with pytest.raises(JoinError, match="3 ranks were started, but the run file asks for stages x"):
        torchrun.join_as_rank(config, "paris", endpoint, variables(0, 3), NOTHING, debug=False)


def test_all_is_checked_before_a_group_or_cuda_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher as without one: model, weights, data, memory; then enrolment, then more."""
    done: list[str] = []

    def step(name: str, answer: object = None) -> Callable[..., Any]:
        def noted(*_: object, **options: Any) -> Any:
            assert not dist.is_initialized()
            done.append(name)
            if name == "check_run":
                assert options == {"sites_here": 1, "own_dataset": False, "ranks_here": 1}
            return answer

        return noted

    class Files:
        vocabulary_size = 270

    class Identity:
        def to_text(self) -> str:
            return "identity"

    for name in ("check_model", "check_run", "check_data"):
        monkeypatch.setattr(preflight, name, step(name))
    monkeypatch.setattr(preflight, "fetch_weights", step("fetch_weights"))
    monkeypatch.setattr(preflight, "prepare_data", step("prepare_data", Files()))
    monkeypatch.setattr(local, "rank_variables", lambda: variables(0, 1))
    monkeypatch.setattr(torchrun, "enrol_site", step("enrol_site", Identity()))
    monkeypatch.setattr(torchrun.Identity, "from_text", lambda text: text)
    monkeypatch.setattr(torchrun, "run_rank", step("run_rank", 0))
    monkeypatch.setattr(RankVariables, "export", nothing_of)
    monkeypatch.setattr(local, "pay_to_join", lambda *given: given[-1]())
    code = local.join(
        run(tmp_path), site="paris", endpoint=ENDPOINT, debug=False, deposit=step("deposit")
    )
    assert code == 0
    expected = ["check_model", "fetch_weights", "prepare_data", "check_run", "check_data"]
    assert done == [*expected, "deposit", "enrol_site", "run_rank"]


def test_a_process_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU needs a child process for it."""
    done: list[str] = []

    def joined(*given: Any) -> int:
        prepare = next(each for each in given if isinstance(each, torchrun.Preparation))
        prepare.check()
        prepare.fetch()
        return 0

    monkeypatch.setattr(preflight, "check_process", lambda *_: done.append("process"))
    monkeypatch.setattr(preflight, "prepare", lambda *_: done.append("run"))
    monkeypatch.setattr(local, "rank_variables", lambda: variables(0, 1))
    monkeypatch.setattr(local, "join_as_rank", joined)
    local.join(run(tmp_path), site="paris", endpoint=ENDPOINT, debug=False)
    assert done == ["process", "run", "run"]


def nothing_of(_: RankVariables) -> None:
    return


@pytest.mark.parametrize(
    ("places", "found"),
    [
        # torchrun: all ranks of a machine may run on all its cores.
        ([("a", range(8)), ("a", range(8)), ("b", range(8)), ("b", range(8))], [2, 2, 2, 2]),
        # Slurm with bound tasks.
        ([("a", range(4)), ("a", range(4, 8)), ("b", range(4)), ("b", range(4, 8))], [1] * 4),
        # One task per half of a machine has two ranks.
        ([("a", range(4)), ("a", range(4)), ("a", range(4, 8)), ("a", range(3, 8))], [3, 3, 2, 4]),
    ],
)
def test_a_rank_knows_how_many_share_its_cores(
    places: list[tuple[str, range]], found: list[int]
) -> None:
    store = dist.HashStore()

    def asks(rank: int) -> int:
        host, cores = places[rank]
        torchrun.tell_cores(store, rank, cores, host)
        return torchrun.sharing_cores(store, rank, len(places))

    with ThreadPoolExecutor(len(places)) as pool:
        assert list(pool.map(asks, range(len(places)))) == found


def test_a_rank_says_that_it_lives_before_it_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's process listens for links, says that it is alive, and only then builds."""
    done: list[str] = []
    store = dist.HashStore()

    class StopError(Exception):
        pass

    class Control:
        def __init__(self, *_: object) -> None:
            return

        def start(self, *, building: bool) -> None:
            done.append(f"beats, building {building}")

        def touch(self) -> None:
            return

        def close(self) -> None:
            return

    class Links:
        def __init__(self) -> None:
            done.append("links")

        def close(self) -> None:
            done.append("links closed")

    class Client:
        def __init__(self, *_: object) -> None:
            done.append("client")

        def close(self) -> None:
            done.append("closed")

    def build(_config: object, _model: object, _place: object, _hooks: object, *more: Any) -> None:
        assert more[0].store is store
        done.append("build")
        raise StopError

    class Opened:
        @staticmethod
        def open(_: object) -> Any:
            return type("Files", (), {"vocabulary_size": 270})

    monkeypatch.setattr(rank_process, "TokenFiles", Opened)
    monkeypatch.setattr(rank_process.ModelPlan, "of", lambda *_: None)
    monkeypatch.setattr(rank_process, "open_endpoint", lambda *_: Links())
    monkeypatch.setattr(rank_process, "RankControl", Control)
    monkeypatch.setattr(rank_process.site_log, "TellingClient", Client)
    monkeypatch.setattr(rank_process, "build_rank", build)
    job = RankJob(
        config=run(tmp_path, stages=2),
        place=rank_process.RankPlace("paris", 0, 0),
        url="https://localhost:1",
        identity=None,  # type: ignore[arg-type]
        hooks=Hooks(),
        address="127.0.0.1",
        meeting=store,
        local_rank=0,
        ranks_here=2,
        shared_folder=False,
        log_file=None,
    )
    with pytest.raises(StopError):
        rank_process.train_rank(job, lambda *_: None)
    assert done == [
        "links", "client", "beats, building True", "build", "links closed", "closed",
    ]  # fmt: skip


class Line:
    """What a rank says to its coordinator, which may not let the site go."""

    def __init__(self, can_retire: bool = True) -> None:
        self.said: list[str] = []
        self._can = can_retire

    def retire(self, reason: str) -> bool:
        self.said.append(f"retire: {reason}")
        return self._can

    def leave(self, reason: str, *, failed: bool) -> None:
        self.said.append(f"leave: {reason}, failed {failed}")


def test_a_launchers_sigterm_has_the_site_leave_and_the_rank_trains_on() -> None:
    moment, ended, line = 100.0, list[int](), Line()
    going = torchrun.Going(line, ended.append, now=lambda: moment)  # type: ignore[arg-type]
    with listening(asked=going):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: bool(line.said))
        # Both were one request, and nothing has ended.
        assert (line.said, going.times, ended) == (["retire: asked to go (signal 15)"], 1, [])
        moment += 3.0
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: bool(ended))
    assert line.said[1:] == ["leave: asked to go (signal 15), failed False"]
    assert ended == [130]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_rank_that_cannot_ask_ends_at_once() -> None:
    ended, line = list[int](), Line(can_retire=False)
    going = torchrun.Going(line, ended.append)  # type: ignore[arg-type]
    going(signal.SIGTERM, None)
    until(lambda: bool(ended))
    assert ended == [130]
    assert len(line.said) == 2


def test_a_rank_that_was_asked_to_go_says_so_in_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    line = Line()
    monkeypatch.setattr(torchrun, "enrol_site", lambda *_: SimpleNamespace(to_text=lambda: "id"))
    monkeypatch.setattr(torchrun.Identity, "from_text", lambda text: text)
    monkeypatch.setattr(torchrun, "run_rank", told)
    monkeypatch.setattr(torchrun, "SiteLine", lambda *_: line)
    monkeypatch.setattr(RankVariables, "export", nothing_of)
    endpoint = Endpoint("https://localhost:1", {"paris": "token"}, "")
    code = torchrun.join_as_rank(
        run(tmp_path), "paris", endpoint, variables(0, 1), NOTHING, debug=False
    )
    assert code == 130
    until(lambda: bool(line.said))


def codes_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rank: Callable[[int, dict[int, int]], int]
) -> dict[int, int]:
    """The exit codes of the three ranks of a site, by number.

    `run_rank`: called with the rank's number, and with the codes of those that have ended.
    """
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torchrun, "enrol_site", lambda *_: SimpleNamespace(to_text=lambda: "id"))
    monkeypatch.setattr(torchrun.Identity, "from_text", lambda text: text)
    monkeypatch.setattr(torchrun, "run_rank", lambda job, _: run_rank(job.local_rank, codes))
    monkeypatch.setattr(torchrun, "SiteLine", lambda *_: Line())
    monkeypatch.setattr(RankVariables, "export", nothing_of)
    config = run(tmp_path, stages=3, batch_size=6)
    endpoint = Endpoint("https://localhost:1", {"paris": TOKEN}, "")
    codes: dict[int, int] = {}

    def join(number: int) -> None:
        mine = variables(number, 3, str(agent.port))
        code = torchrun.join_as_rank(config, "paris", endpoint, mine, NOTHING, debug=False)
        codes[number] = code

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(join, range(3)))
    return codes


def test_a_signal_to_one_machine_is_in_the_exit_codes_of_all_ranks_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher takes back the machine of the last rank. An exchange keeps the rank before it."""
    handlers: dict[int, torchrun.Going] = {}
    signalled, first_is_done = threading.Event(), threading.Event()

    class Heard(torchrun.Going):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            handlers[threading.get_ident()] = self

    def run_rank(number: int, codes: dict[int, int]) -> int:
        if number == 2:
            handlers[threading.get_ident()](signal.SIGTERM, None)
            for thread in threading.enumerate():
                if thread.name == "signalled":
                    thread.join()
            signalled.set()
        elif number == 1:
            assert first_is_done.wait(20.0)
            # The store may end with the first rank, so that rank waits until the others know.
            assert 0 not in codes
        else:
            assert signalled.wait(20.0)
            threading.Timer(0.2, first_is_done.set).start()
        return 0

    monkeypatch.setattr(torchrun, "Going", Heard)
    monkeypatch.setattr(torchrun, "LAST_WORDS", 0.0)
    assert codes_of_ranks(tmp_path, monkeypatch, run_rank) == {0: 130, 1: 130, 2: 130}


@pytest.mark.parametrize("code", [0, rank_process.STOPPED])
def test_without_a_signal_the_end_of_a_site_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The code is 0 after `dilocox leave`, and where the run was stopped while the site joined."""
    assert codes_of_ranks(tmp_path, monkeypatch, lambda *_: code) == {0: 0, 1: 0, 2: 0}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)
