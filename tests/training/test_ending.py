"""Who evaluates and publishes in the end, and what a site does that was left behind by then."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import RunEndedError
from dilocox.outer.loop_status import LoopStatus
from dilocox.training import checkpointing, rank_state
from dilocox.training.checkpointing import Checkpointer
from dilocox.training.join_run import EntryStopped
from dilocox.training.one_folder import part_in_the_end
from dilocox.training.trainer import Stopped, Trainer

pytestmark = pytest.mark.waits

PLAN: Any = SimpleNamespace(kind="flush", round=4, codec="int8", members=dict.fromkeys("abc"))


def sites(**roles: str) -> Any:
    """What the coordinator says of them."""
    return [SimpleNamespace(site=name, role=role) for name, role in roles.items()]


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ("active", "active", "waits"),
        ("finished", "active", "listens"),
        # Overtaken in the flush, or lost before it was through.
        ("entering", "active", "waits"),
        ("gone", "entering", "speaks"),
        ("enrolled", "finished", "listens"),
    ],
)
def test_the_first_site_that_is_in_the_run_speaks(first: str, second: str, part: str) -> None:
    assert part_in_the_end(sites(a=first, b=second, c="active"), "abc", "c") == part
    assert part_in_the_end(sites(a="active", b=second, c="active"), "abc", "a") == "speaks"
    # It only received the flush: it has the model, and does not count.
    assert part_in_the_end(sites(a="entering", b=second, c="active"), "abc", "a") == "listens"


class Ending:
    """Site b of a run at its end, with what the coordinator says of site a, look by look."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *roles: str,
        shared: bool,
        folder: Path = Path("run"),
        own: str = "active",
    ) -> None:
        self.roles, self.asked, self.exported = list(roles), list[tuple[int, float]](), list[str]()
        self.checkpointer = object.__new__(Checkpointer)
        self.checkpointer._shared, self.checkpointer._touch = shared, lambda: None
        self.checkpointer._record, self.checkpointer._form = None, cast(Any, None)
        self.checkpointer._config = cast(Any, SimpleNamespace(folder=folder))
        self.own = own
        monkeypatch.setattr(self.checkpointer, "export", self.export)
        monkeypatch.setattr(checkpointing, "other_files", lambda folder: {})
        rank = SimpleNamespace(
            place=SimpleNamespace(site="b", leads=True),
            mesh=SimpleNamespace(gather_names=lambda names: [names]),
        )
        self.checkpointer._client = cast(Any, SimpleNamespace(status=self._status))
        self.rank: Any = rank

    def export(self, rank: object, folder: Path) -> str:
        self.exported.append(str(folder))
        return ""

    def _status(self, since: int, wait: float) -> Any:
        self.asked.append((since, wait))
        role = self.roles.pop(0)
        phase = "failed" if role == "failed" else "running"
        return SimpleNamespace(
            phase=phase, reason="why", sequence=7, sites=sites(a=role, b=self.own, c="active")
        )

    def publishes(self) -> list[str]:
        """Which folders it writes."""
        self.checkpointer.ends_run(self.rank, PLAN)
        self.checkpointer.publish(self.rank, PLAN)
        return self.exported


def test_in_a_folder_of_all_sites_the_next_one_publishes_what_the_first_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits until the first is through or lost: then there is one model, and no more."""
    ending = Ending(monkeypatch, "active", "active", "finished", shared=True)
    assert ending.publishes() == []
    assert ending.asked == [(0, 0.0), (7, checkpointing.MEETING), (7, checkpointing.MEETING)]
    assert Ending(monkeypatch, "entering", shared=True).publishes() == ["run/model"]
    assert Ending(monkeypatch, "active", "gone", shared=True).publishes() == ["run/model"]
    with pytest.raises(RunEndedError, match="the run has failed: why"):
        Ending(monkeypatch, "active", "failed", shared=True).publishes()


def test_with_folders_of_their_own_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, "active", shared=False)
    assert not ending.checkpointer.ends_run(ending.rank, PLAN)
    ending.checkpointer.publish(ending.rank, PLAN)
    assert ending.exported == ["run/model"]
    lost = Ending(monkeypatch, "gone", shared=False)
    assert lost.checkpointer.ends_run(lost.rank, PLAN), "it evaluates then"
    # It only received the flush: it has the model.
    assert Ending(monkeypatch, "active", shared=False, own="entering").publishes() == ["run/model"]


def test_of_the_sites_that_joined_from_one_folder_one_publishes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Site c joined from the folder of site b, and site a, the first of the plan, elsewhere."""
    model = [str(tmp_path / "model")]

    def journal(name: str, **ended: int) -> None:
        lines = [{"kind": "joined", "host": socket.gethostname(), "process": os.getpid()}]
        lines += [{"kind": "round", "round": 0}, {"kind": "ended", **ended}][: 1 + bool(ended)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"site-{name}.jsonl").write_text(text + '{"kind": "joi', encoding="utf-8")

    def found(*roles: str) -> list[str]:
        return Ending(monkeypatch, *roles, shared=False, folder=tmp_path).publishes()

    for name in "bc":
        journal(name)
    assert found("active") == model
    journal("a")
    assert found("active", "finished") == []
    assert found("active", "gone") == model
    journal("a", code=0)
    assert found("finished") == [], "it has finished, and published"
    # It has left, and may have joined again from elsewhere.
    for code in (1, 130):
        journal("a", code=code)
        assert found("active") == model


class Calls:
    """Takes any call and notes its name; what it is asked for is in `answers`."""

    def __init__(self, made: list[str], **answers: Any) -> None:
        self._made, self._answers = made, answers

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            self._made.append(name)
            return self._answers.get(name)

        return call


def at_the_end(behind: bool, made: list[str], **changes: Any) -> Trainer:
    """A rank of site b; with the flush it finds that it is `behind`. `made`: calls so far."""
    trainer = object.__new__(Trainer)
    fields = {
        "me": "b",
        "at": SimpleNamespace(round=4, slot=0, tick=8),
        "rank": SimpleNamespace(
            place=SimpleNamespace(leads=True), mesh=SimpleNamespace(device=torch.device("cpu"))
        ),
        "watch": None,
        "outer": Calls(made),
        "exchange": Calls(made),
        "non_finite": Calls(made),
        "meter": Calls(made, end={}),
        "background": Calls(made),
        "checkpointer": Calls(made, ends_run=True),
        "collector": Calls([]),
        "client": Calls(made),
        "config": SimpleNamespace(tasks_site=None),
        "counted_from": -1,
        "state": SimpleNamespace(weight=1.0, dropped_round=-2),
        **changes,
    }
    trainer.__dict__.update(fields)
    trainer.meter.behind = behind
    trainer.report_eval_loss = lambda round_: made.append(f"loss {round_}")  # type: ignore[method-assign]
    return trainer


def test_who_was_overtaken_in_the_flush_publishes_nothing() -> None:
    """Its anchor lacks the flush: it says so, and neither evaluates nor finishes."""
    made: list[str] = []
    with pytest.raises(
        RunEndedError, match="site b: the run ended while this site was left behind"
    ):
        at_the_end(True, made).finish(PLAN)
    assert "report" in made
    assert not {"publish", "finish", "ends_run", "loss 4"} & set(made)
    made.clear()
    at_the_end(False, made).finish(PLAN)
    assert made[-5:] == ["ends_run", "loss 4", "publish", "wait", "finish"]


def entering(from_round: int) -> Any:
    entry = Entering(site="b", incarnation=1, donor="a", from_round=from_round)
    return SimpleNamespace(news=SimpleNamespace(entering=[entry]), at=lambda *_: None)


@pytest.mark.parametrize("from_round", [4, 5])
def test_a_site_that_has_entered_is_told_once_that_it_was_overtaken(from_round: int) -> None:
    """Until it counts from round 4 on, its beats tell of the entry that is behind it then; what
    they tell later is news, also of one that entered when its process began."""
    made: list[str] = []
    trainer = at_the_end(False, made, control=entering(from_round))
    trainer.next_plan = lambda: PLAN  # type: ignore[method-assign]
    trainer.finish = lambda plan: made.append("finish")  # type: ignore[method-assign]
    joining_site: Any = SimpleNamespace(catch_up=lambda: None)
    if from_round == 5:
        with pytest.raises(RunEndedError, match="left behind"):
            trainer.run(joining_site)
    else:
        trainer.run(joining_site)
    assert ("finish" in made) == (from_round == 4)


def test_who_is_overtaken_by_the_flush_has_no_round_to_enter_with() -> None:
    """It is in the round before, and the others have begun the flush."""
    asked: list[int] = []

    def poll_plan(round_: int) -> Any:
        asked.append(round_)
        return SimpleNamespace(plan=PLAN)

    client = SimpleNamespace(poll_plan=poll_plan)
    trainer = at_the_end(False, [], control=entering(5), client=client)
    with pytest.raises(RunEndedError, match="the run ended while this site was left behind"):
        trainer.catch_up()
    assert asked == [4]


def test_who_trained_a_round_more_before_he_heard_of_it_enters_again() -> None:
    """The others count it from round 4 on, which it has trained before its beats told of that."""
    made: list[str] = []
    at = SimpleNamespace(round=5, slot=0, tick=9)
    trainer: Any = at_the_end(False, made, control=entering(4), at=at)
    trainer.joining_site = lambda entry: entry
    trainer.enter = lambda entry: made.append(f"enter {entry.from_round}")
    trainer.catch_up()
    assert "enter 4" in made


@pytest.mark.parametrize(("leaves", "said"), [(True, "depart"), (False, "finish")])
def test_who_goes_before_its_entry_is_through_says_so_and_stops(leaves: bool, said: str) -> None:
    made: list[str] = []

    def catch_up() -> None:
        raise EntryStopped(leaves)

    joining_site: Any = SimpleNamespace(catch_up=catch_up)
    with pytest.raises(Stopped):
        at_the_end(False, made).enter(joining_site)
    assert made == ["wait", "wait", said], "what runs beside the training first, then the record"


class Restored:
    """The least of a rank that a checkpoint can be taken of and put back into."""

    def __init__(self) -> None:
        model = SimpleNamespace(
            optimizer_state=dict, load_optimizer_state=lambda tensors: None, sync_tied=lambda: None
        )
        self.rank = SimpleNamespace(
            live={}, states=[], model=model, place=SimpleNamespace(site="b"),
            mesh=SimpleNamespace(device=torch.device("cpu"), stages=1, shards=1),
        )  # fmt: skip
        self.outer = SimpleNamespace(
            owner_landings=[], status=LoopStatus(), under_way_now=list, restore=lambda *_: None
        )
        self.meter = SimpleNamespace(
            so_far=lambda outer: {}, non_finite=lambda: None, dropped=None, go_on=lambda *_: None
        )
        self.at = SimpleNamespace(round=3, slot=0, tick=6)
        self.dropped_round, self.weight = -2, 1.0


def test_what_a_site_weighs_is_known_after_a_resume() -> None:
    """It may be left behind at once, and sets aside what it had trained before the checkpoint."""
    before: Any = Restored()
    before.weight = 0.4
    tensors, state = rank_state.capture(before)
    after: Any = Restored()
    rank_state.restore(after, SimpleNamespace(tensors=tensors, state={**state, "tick": 6}))  # type: ignore[arg-type]
    assert after.weight == 0.4
    # An auditor's repetition has no part in it, and records of earlier versions stay comparable.
    assert "weight" not in rank_state.capture_round(before)[1]


def test_a_checkpoint_of_an_earlier_version_has_it_in_its_exchanges() -> None:
    def under_way(round_: int, **weights: float) -> dict[str, Any]:
        members = {site: {"weight": weight} for site, weight in weights.items()}
        return {"plan": {"round": round_, "members": members}}

    earlier = {"pending": [under_way(1, b=0.7), under_way(2, a=0.6, b=0.4), under_way(3, a=1.0)]}
    assert rank_state._weight(earlier, "b") == 0.4
    assert rank_state._weight({"pending": []}, "b") == 1.0
