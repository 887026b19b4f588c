"""Windows of a rank's payloads: when one begins, what goes, and what a replay begins from."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.outer.anchor_state import AnchorCopy
from dilocox.outer.contribution import Outcome
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import MissingError, Store, Stores
from dilocox.record.log.digests import sha256, stage_root, tensor_bytes, tensor_digest
from dilocox.record.log.state_statements import AnchorState
from dilocox.record.verify.completeness import gaps
from dilocox.record.verify.origins import (
    Origin,
    lost_payloads,
    origin_before,
    origin_of,
    replay_from,
)
from dilocox.record.verify.replay import Stage, digests_of, replay_stage
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import (
    RankRecord,
    SigningIdentity,
    anchor_state,
    listing_of,
)
from dilocox.record.writer.windows import Bound, Windows, bound_of, first_kept, small_budget
from tests.record.verify.test_replay import Made
from tests.record.writer.test_rank_recorder import (
    RANK,
    SIGNER,
    Notebook,
    contribution,
    exchanged,
    outcome,
)
from tests.support.coordinator_driver import run_config
from tests.support.record_scene import SIGNERS, Scene

PLACE = "paris/1.0"


@pytest.mark.parametrize("where", ["{folder}", "memory://windows-test/store"])
def test_what_lies_in_a_window_is_found_and_goes_with_it(where: str, tmp_path: Path) -> None:
    store = Store(where.format(folder=tmp_path))
    assert store.windows(PLACE) == {}
    digest = store.window(PLACE, 3).put(b"abc")
    store.window(PLACE, 12).put(b"abcd")
    fresh = Store(store.where)
    assert fresh.has(digest)
    assert fresh.get(digest) == b"abc"
    assert store.windows(PLACE) == {3: 3, 12: 4}
    store.drop_window(PLACE, 3)
    store.drop_window(PLACE, 3)
    assert store.windows(PLACE) == {12: 4}
    assert not Store(store.where).has(digest)


def test_what_was_changed_in_a_window_is_not_given_out(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    window = store.window(PLACE, 0)
    digest = window.put(b"abc")
    Path(window.path(digest)).write_bytes(b"abd")
    with pytest.raises(RecordError, match="holds other bytes than its name says"):
        Stores([store]).get(digest)


def filled(windows: Windows, rounds: int, of_round: int, start: int = 0) -> list[int]:
    """Rounds with which a window begins, where every round brings so many bytes."""
    found = []
    for round_ in range(rounds):
        if windows.due(round_):
            windows.open(round_).put(b"begin %d" % round_)
            windows.add(start)
            windows.drop()
            found.append(round_)
        windows.current.put(b"round %d" % round_)
        windows.add(of_round)
    return found


@pytest.mark.parametrize(
    ("keep", "begins", "stay"),
    [
        (1, list(range(1, 12)), [10, 11]),
        (2, list(range(1, 12)), [9, 10, 11]),
        (4, list(range(1, 12)), [7, 8, 9, 10, 11]),
        (8, [2, 4, 6, 8, 10], [2, 4, 6, 8, 10]),
        (100, [], [0]),
    ],
)
def test_the_newest_rounds_stay(
    keep: int, begins: list[int], stay: list[int], tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    windows = Windows(store, PLACE, Bound(rounds=keep))
    assert filled(windows, 12, 10) == begins
    assert sorted(store.windows(PLACE)) == stay
    # Before the last round had come, the bound's rounds were whole already.
    assert stay[0] <= max(0, 11 - keep)


def test_a_byte_budget_is_never_exceeded_and_half_used(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    windows = Windows(store, PLACE, Bound(bytes=4000))
    most = 0
    for round_ in range(200):
        if windows.due(round_):
            windows.open(round_).put(b"%d" % round_)
            windows.add(200)
            windows.drop()
        windows.current.put(b"round %d" % round_)
        windows.add(90)
        most = max(most, sum(windows._sizes.values()))
    assert 2000 < most <= 4000
    assert len(store.windows(PLACE)) == len(windows._sizes) == 4


@pytest.mark.parametrize(
    "bound", [Bound(rounds=1), Bound(rounds=4), Bound(rounds=9), Bound(bytes=4000), Bound(bytes=1)]
)
def test_what_the_windows_begun_say_is_kept(bound: Bound, tmp_path: Path) -> None:
    """Whoever knows the begins alone knows rounds of which nothing can have been removed."""
    store = Store(str(tmp_path))
    windows, begun = Windows(store, PLACE, bound), {0}
    for round_ in range(60):
        if windows.due(round_):
            begun.add(round_)
            windows.open(round_)
            windows.drop()
        windows.current.put(b"round %d" % round_)
        windows.add(90)
        kept = first_kept(begun, max(begun), bound)
        assert min(windows._sizes) <= kept <= round_
        if bound.rounds is not None:
            assert min(windows._sizes) == kept <= max(0, round_ - bound.rounds)


def test_a_rank_that_starts_again_goes_on_with_its_windows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    filled(Windows(store, PLACE, Bound(rounds=2)), 5, 10)
    again = Windows(store, PLACE, Bound(rounds=2))
    again.current.put(b"what is exchanged again")
    assert sorted(store.windows(PLACE)) == [2, 3, 4]
    assert again.due(6)
    again.open(6)
    again.drop()
    assert sorted(store.windows(PLACE)) == [4], "rounds 4 and 5 are in it"


def test_bounds_of_run_files() -> None:
    small, large = 10**8, 7 * 10**9

    def of(keep: str | int, parameters: int) -> Bound | None:
        return bound_of(run_config(record={"keep": keep}), parameters)

    sparing = run_config(availability={"keep_whole": False})
    assert bound_of(sparing, large) is None, "certificates of pieces decide what goes"
    assert bound_of(run_config(availability={}), large) == of("auto", large)
    assert of("auto", small) is None
    assert of("auto", large) == Bound(bytes=560 * 10**9)
    assert of("auto", 10**9) == Bound(bytes=500 * 10**9)
    assert of("all", large) is None
    assert of(20, small) == Bound(rounds=20)
    assert of("1.5 TB", small) == Bound(bytes=1500 * 10**9)
    assert of("1" + "0" * 400 + "GB", small) == Bound(bytes=10**409), "more than a float holds"
    assert Bound(bytes=100).for_one_of(4) == Bound(bytes=25)
    assert Bound(rounds=7).for_one_of(4) == Bound(rounds=7)
    assert small_budget(run_config(record={"keep": "1GB"}), small) == 64 * small
    assert small_budget(run_config(), large) is None
    assert small_budget(run_config(record={"keep": 1}), large) is None


# --- what a rank writes ---------------------------------------------------------------------


def test_a_window_begins_with_a_signed_anchor(tmp_path: Path) -> None:
    store, notebook, warnings = Store(str(tmp_path)), Notebook(), list[str]()
    windows = Windows(store, PLACE, Bound(rounds=1))
    author = SigningIdentity("run", RANK, SIGNER)
    record = RankRecord(author, store, notebook, warnings.append, 60.0, windows)
    tensors = {"anchor/0": torch.ones(128), "momentum/0": torch.zeros(128, dtype=torch.bfloat16)}
    ended: Future[Outcome] = Future()
    ended.set_result(outcome(b"not landed yet"))
    broken: Future[Outcome] = Future()
    broken.set_exception(RuntimeError("broken"))
    asked = []

    def copy() -> AnchorCopy:
        asked.append(1)
        return AnchorCopy(tensors, (2,), [ended, broken, Future()])

    record.begin_round(0, 0, copy)
    exchanged(record, ExchangeKey.outer(2, 1, 0), b"not landed yet", b"landed")
    record.begin_round(3, 24, lambda: None)
    record.wait()
    assert (notebook.heard, asked) == ([], []), "theta_0 is signed; of a rank behind nothing is"
    record.begin_round(4, 32, copy)
    exchanged(record, ExchangeKey.outer(4, 1, 0), b"new")
    record.wait()
    (line,) = notebook.heard
    said = s.open_signed(line, SIGNER.public, run="run", kinds=(s.ANCHOR,))
    state = AnchorState.of(said)
    assert (state.site, state.stage, state.shard) == ("paris", 1, 0)
    assert (state.round, state.tick, state.landed) == (4, 32, (2,))
    digests = [tensor_digest(name, tensor) for name, tensor in tensors.items()]
    assert state.root == stage_root(digests).hex()
    window = store.window(PLACE, 4)
    assert window.get(state.listing) == listing_of(digests)
    assert window.get(digests[1].sha256) == bytes(256)
    assert window.has(sha256(b"new"))
    assert window.has(sha256(b"not landed yet")), "a replay from here needs it"
    assert not window.has(sha256(b"landed"))
    record.begin_round(5, 40, copy)
    record.wait()
    assert sorted(store.windows(PLACE)) == [4, 5]
    assert warnings == []


def test_an_exchange_that_ends_while_the_anchor_is_copied_is_kept_in_the_new_window(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path))
    windows = Windows(store, PLACE, Bound(rounds=1))
    author = SigningIdentity("run", RANK, SIGNER)
    record = RankRecord(author, store, Notebook(), lambda _: None, 60.0, windows)
    future: Future[Outcome] = Future()
    landing = record.watching(lambda _: future)(contribution(ExchangeKey.outer(3, 1, 0)))
    assert landing is future, "the next window needs its payloads, too"

    def copy() -> AnchorCopy:
        found = AnchorCopy({"anchor/0": torch.ones(128)}, (2,), [future])
        future.set_result(outcome(b"ends while it is copied"))
        return found

    record.begin_round(4, 32, copy)
    record.wait()
    assert store.window(PLACE, 4).has(sha256(b"ends while it is copied"))


def test_windows_that_stay_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, warnings = Store(str(tmp_path)), list[str]()
    windows = Windows(store, PLACE, Bound(rounds=1))
    record = RankRecord(
        SigningIdentity("run", RANK, SIGNER), store, Notebook(), warnings.append, 60.0, windows
    )

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(store._files, "rm", refuse)
    for round_ in range(1, 5):
        exchanged(record, ExchangeKey.outer(round_, 1, 0), b"payload %d" % round_)
        record.begin_round(round_, round_, lambda: AnchorCopy({"a": torch.ones(1)}, (0,)))
    record.wait()
    assert warnings == [
        f"record: {tmp_path}: old rounds cannot be removed (Operation not permitted); all payloads "
        "stay"
    ]


# --- what readers make of it ----------------------------------------------------------------


class Kept(Made):
    """A course of which the state at the beginning of round 1 is signed."""

    def __init__(self, codec: str, exchange: str = "gather", shards: int = 1) -> None:
        self.states: list[AnchorState] = []
        super().__init__(codec, exchange, shards)
        self.course.manifest["config"]["record"] = {"keep": 1}  # type: ignore[index]
        stage = Stage.of(self.course, 0, self.theta)
        early = [step for step in self.course.steps.values() if step.key.round == 0]
        for shard in range(shards):
            tensors = {}
            for piece in range(len(stage.pieces)):
                own = [step for step in early if step.key.fragment == piece]
                run = range(piece, piece + 1)
                flats = replay_from(None, own, stage, run, shard, self.shelf.get, "fp32")
                for kind, flat in zip(("anchor", "momentum"), flats, strict=True):
                    tensors[f"{kind}/{piece}"] = flat
            digests = [tensor_digest(name, tensor) for name, tensor in tensors.items()]
            for tensor in tensors.values():
                self.shelf.put(tensor_bytes(tensor))
            listing = self.shelf.put(listing_of(digests))
            root = stage_root(digests).hex()
            for site in ("a", "b"):
                state = AnchorState(site, 0, shard, 1, 1, (0, 0), root, listing)
                self.course.anchors.append(state)

    def has(self, digest: str) -> bool:
        return digest in self.shelf.kept

    def forget(self, round_: int) -> None:
        for step in self.course.steps.values():
            if step.key.round == round_:
                for digest in step.payloads.values():
                    self.shelf.kept.pop(digest, None)

    def origin(self, shard: int = 0) -> Origin | None:
        lost = lost_payloads(self.course, self.has, self.shelf.get)
        return origin_of(self.course, 0, shard, lost, self.has, self.shelf.get)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("codec", "exchange"), [("int4", "gather"), ("lowrank:4", "gather"), ("int8", "reduce")]
)
def test_the_rest_is_replayed_from_a_signed_state(codec: str, exchange: str, shards: int) -> None:
    made = Kept(codec, exchange, shards)
    assert made.origin() is None, "nothing is lost: theta_0"
    made.forget(0)
    origins = [made.origin(shard) for shard in range(shards)]
    assert all(origin is not None and origin.state.round == 1 for origin in origins)
    stage, get = Stage.of(made.course, 0, made.theta), made.shelf.get
    counted: list[int] = []

    def replay(shard: int, run: range, steps: list) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[type-arg]
        count = lambda: counted.append(1)  # noqa: E731
        return replay_from(origins[shard], steps, stage, run, shard, get, "fp32", count)

    found = replay_stage(made.course, stage, get, lambda: None, replay)
    assert stage_root(digests_of(found)) == stage_root(digests_of(made.final))
    assert len(counted) == shards * len(made.course.steps)


def test_a_chunk_that_a_kept_payload_names_is_missed() -> None:
    """In exchange `reduce` an index stands for the payloads of its chunks."""
    made = Kept("int8", "reduce")
    step = next(step for step in made.course.steps.values() if step.key.round == 2)
    index = made.shelf.get(step.payloads["a/0"])
    del made.shelf.kept[index[:32].hex()]
    with pytest.raises(MissingError, match=r"payloads of outer/2/0/"):
        made.origin()


def test_a_state_on_which_sites_differ_is_no_beginning() -> None:
    made = Kept("int4")
    made.forget(0)
    made.course.anchors[1] = replace(made.course.anchors[1], root="0" * 64)
    with pytest.raises(MissingError):
        made.origin()
    assert (
        "stage 0 shard 0: a and b have signed different anchors at the beginning of round 1"
        in gaps(made.course)
    )


def test_an_audit_begins_with_a_state_that_another_site_has_signed() -> None:
    made = Kept("int4")

    def origin(tick: int, site: str) -> Origin | None:
        return origin_before(made.course, 0, 0, tick, site, made.has, made.shelf.get)

    assert origin(1, "a") is None, "theta_0, from which all payloads are kept"
    made.forget(0)
    assert origin(0, "a") is None, "the state is of later"
    found = origin(1, "a")
    assert found is not None
    assert found.state.round == 1
    del made.course.anchors[1]
    assert origin(1, "a") is None
    assert origin(1, "b") is not None


def test_a_step_that_a_state_holds_in_part_is_refused() -> None:
    made = Kept("int4")
    state = replace(made.course.anchors[0], landed=(0, -1))
    origin = Origin.of(state, made.shelf.get)
    whole = replace(made.course.steps["outer/0/0/0"], fragments=1)
    with pytest.raises(RecordError, match=r"outer/0/0/0: the state of round 1 includes only some"):
        origin.holds(whole)


def signed_anchor(scene: Scene, site: str, round_: int, landed: list[int]) -> str:
    rank = RANK.model_copy(update={"site": site, "stage": 0})
    subjects = {"state": "1" * 64, "tensors": "2" * 64}
    said = anchor_state(scene.notary.run, rank, round_, 8 * round_, landed, subjects)
    return SIGNERS[site].sign(said)


def test_anchor_states_enter_the_log_and_are_read(scene: Scene) -> None:
    rank = RANK.model_copy(update={"site": "a", "stage": 0})
    scene.notary.checkpoint(rank, signed_anchor(scene, "a", 1, [0, -1]))
    with pytest.raises(Exception, match="is malformed"):
        scene.notary.checkpoint(rank, signed_anchor(scene, "a", 1, [1]))
    scene.notary.resumed(1, 8)
    scene.notary.checkpoint(rank, signed_anchor(scene, "a", 2, [1]))
    course = scene.course()
    assert [(state.round, state.landed) for state in course.anchors] == [(1, (0, -1)), (2, (1,))]


def test_states_of_a_course_that_was_left_behind_do_not_count(scene: Scene) -> None:
    rank = RANK.model_copy(update={"site": "a", "stage": 0})
    for round_ in (1, 2):
        scene.notary.checkpoint(rank, signed_anchor(scene, "a", round_, [0]))
    scene.notary.resumed(1, 8)
    assert [state.round for state in scene.course().anchors] == [1]


def test_records_of_earlier_versions_keep_all() -> None:
    manifest = {"config": {"outer": {"method": "dilocox"}, "record": {"enabled": True}}}
    course = RunHistory("run", "log", manifest)
    assert course.keep == "all"
    course.anchors.append(AnchorState("a", 0, 0, 1, 1, (0,), "1" * 64, "2" * 64))
    assert course.keep == "auto", "a later version went on with it"
