"""A site that starts a run compares the founder's theta_0 with its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.messages import Entering
from dilocox.outer.first_state import FirstState, OtherStartError
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.snapshot import Snapshot
from dilocox.training.join_run import JoiningSite

pytestmark = pytest.mark.waits

OWN = torch.randn(1000, generator=torch.Generator().manual_seed(1))
STILL = torch.zeros(1000)


def given(anchor: torch.Tensor = OWN, momentum: torch.Tensor = STILL, tick: int = 0) -> Snapshot:
    return Snapshot(2, tick, {"anchor": anchor, "momentum": momentum})


def off(
    snapshot: Snapshot, *, stored: bool = False, starting: bool = True, momentum: Any = STILL
) -> float:
    first = FirstState("lyon", "paris", stored)
    return first.difference(snapshot, OWN, momentum, starting)


def test_the_same_state_is_taken() -> None:
    assert off(given()) == off(given(), stored=True) == off(Snapshot(2, 0, {})) == 0.0


def test_what_two_processors_differ_by_is_taken_of_a_seed_alone() -> None:
    near = OWN * (1 + 1e-7)
    assert 0 < off(given(near)) < 1e-6
    with pytest.raises(OtherStartError, match=r"another state than model\.path holds here"):
        off(given(near), stored=True)


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (given(OWN * 1.5 + 0.01), r"run\.seed gives here \(piece 2 is 0\.5 of its size off\)"),
        (given(OWN * torch.nan), r"piece 2 is nan of its size off"),
        (given(OWN[:10]), r"piece 2 has no anchor of its length"),
        (Snapshot(2, 0, {"anchor": OWN}), r"piece 2 has no momentum of its length"),
        (given(momentum=STILL + 1), r"piece 2 has another outer momentum"),
        (given(OWN * 1.5, tick=1), r"piece 2 is of slot 1"),
    ],
)
def test_another_state_is_refused(snapshot: Snapshot, said: str) -> None:
    with pytest.raises(OtherStartError, match=said) as caught:
        off(snapshot)
    assert "site lyon: paris begins the run from another state" in str(caught.value)
    assert caught.value.permanent, "another start of this site would end in the same way"


def test_once_the_run_has_begun_rounds_have_changed_the_state() -> None:
    assert off(given(OWN * 1.5, tick=4), starting=False) == 0.0
    with pytest.raises(OtherStartError):
        off(given(OWN * 1.5, tick=0), starting=False)


def test_a_handover_s_momentum_is_compared() -> None:
    moving = STILL + 1
    assert off(given(momentum=moving), momentum=moving) == 0.0
    assert off(given(momentum=moving), momentum=moving.bfloat16()) == 0.0
    with pytest.raises(OtherStartError, match="another outer momentum"):
        off(given(), momentum=moving)


@pytest.mark.parametrize("kind", ["same", "near", "other"])
def test_a_newcomer_refuses_before_it_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    told: list[str] = []
    change = {"same": 1.0, "near": 1 + 1e-7, "other": 1.5}[kind]
    client: Any = SimpleNamespace(
        ready=lambda: told.append("ready"),
        report=lambda round_, said, kind: told.append(said["text"]),
    )
    pieces = [SimpleNamespace(anchor=OWN, momentum=STILL) for _ in range(2)]
    adopted: list[int] = []
    outer = SimpleNamespace(
        status=LoopStatus(), adopt=lambda snapshot: adopted.append(snapshot.piece)
    )
    place = SimpleNamespace(site="lyon", stage=0, shard=0, leads=True)
    own: Any = SimpleNamespace(rank=SimpleNamespace(states=pieces, place=place), outer=outer)
    control: Any = SimpleNamespace(news=SimpleNamespace(phase="starting", entering=[]))

    def fetch(form: Any, donor: str, known: Any, limits: Any, on_piece: Any, *_: Any) -> int:
        for piece in range(2):
            tensors = {"anchor": OWN * change, "momentum": STILL}
            on_piece(Snapshot(piece, 0, {} if kind == "same" else tensors))
        return 0

    monkeypatch.setattr("dilocox.training.join_run.fetch", fetch)
    entry = Entering(site="lyon", incarnation=1, donor="paris", from_round=0)
    first = FirstState("lyon", "paris", stored=False)
    form: Any = lambda *_: None  # noqa: E731
    joining_site = JoiningSite(own, control, client, entry, form, 1.0, first)
    joining_site._thread.join(10)
    if kind == "other":
        with pytest.raises(OtherStartError):
            joining_site.adopt()
        assert (told, adopted) == ([], [])
        return
    joining_site.adopt()
    assert adopted == [0, 1]
    assert told.pop() == "ready"
    assert len(told) == (kind == "near"), "told once"
    assert all("no more than between two kinds of processors: it is taken" in t for t in told)
