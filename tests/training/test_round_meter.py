"""What of a round's exchanges the controller is told: on processors, and on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.messages import MemberPlan, RoundPlan
from dilocox.inner import StepResult
from dilocox.inner.device_memory import MemoryUse
from dilocox.inner.step_result import ReportedStep
from dilocox.outer.loop_status import LoopStatus
from dilocox.training import round_meter
from dilocox.training.round_meter import NOTHING, Devices, RoundMetrics
from tests.support.planned_runs import run

pytestmark = pytest.mark.waits

PLAN = RoundPlan(
    round=0, kind="train", first_tick=0, first_step=0, inner_steps=1, slots=1, fragments=1,
    members={"lyon": MemberPlan(weight=1.0, batch=8, ranges=[], space="shared")}, delay=1,
    overlap="keep", keep=1.0, learning_rate=1.0, momentum=0.0, codec="int4", residual_decay=1.0,
    exchange="gather", checkpoint=False, evaluate=False, last=False,
)  # fmt: skip


FLOPS = 6000.0


class Clocks:
    """The clock on the wall and the thread's own, moved by hand. Seconds."""

    def __init__(self) -> None:
        self.wall = self.thread = self.kept = 0.0
        self.ahead = 0.0
        """What a GPU has still to do of its inner steps."""

    def monotonic(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.thread

    def synchronize(self, _device: torch.device) -> None:
        self.wall += self.ahead
        self.ahead = 0.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(round_meter, "time", made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(round_meter, "ran_and_kept_waiting", lambda: (made.thread, made.kept))
    monkeypatch.setattr(round_meter, "memory_meter", lambda _device: Readings(MemoryUse(None)))
    monkeypatch.setattr(round_meter, "peak_here", lambda _config, _device: None)
    return made


class Readings:
    """The memory of a device, given beforehand; the last reading is given again."""

    def __init__(self, *uses: MemoryUse) -> None:
        self._uses = list(uses)

    def read(self) -> MemoryUse:
        return self._uses.pop(0) if len(self._uses) > 1 else self._uses[0]


def round_on(
    kind: str, clocks: Clocks, training: Callable[[], None] = lambda: None
) -> tuple[RoundMetrics, dict[str, Any]]:
    """A round of one step: exchange threads compute 3 s; the training's own thread spends 5 s at
    the slot's end and computes for 1 s of them, waits 2 s for a site, and 0.5 s for the account."""
    rank: Any = SimpleNamespace(
        blueprint=SimpleNamespace(trained=1000, flops_per_token=FLOPS),
        place=SimpleNamespace(site="lyon"),
        states=[],
        mesh=SimpleNamespace(device=torch.device(kind), gather_names=lambda names: [names]),
    )
    outer: Any = SimpleNamespace(status=LoopStatus())
    outer.status.counts.work_seconds = 3.0
    measured = RoundMetrics(run(), rank)
    measured.begin(PLAN, 0)
    clocks.wall += 10.0
    training()
    clocks.ahead = 4.0
    measured.add(StepResult(torch.tensor([[1.0, 1.0, 0.0]]), 1, 0, [["loss"]]), 0.1)
    with measured.working(outer.status.counts):
        clocks.wall += 5.0
        clocks.thread += 1.0
        outer.status.counts.wait_seconds += 2.0
    with measured.working():
        clocks.wall += 0.5
        clocks.thread += 0.5
    return measured, measured.end(PLAN, outer, rank)


def test_on_processors_all_that_exchanges_compute_is_lost(clocks: Clocks) -> None:
    measured, record = round_on("cpu", clocks)
    assert record["exchange_work_seconds"] == pytest.approx(3.0 + 1.0 + 0.5)
    assert measured.measured is not None
    assert measured.measured.work_us == 4_500_000


def test_who_gets_half_a_core_loses_two_seconds_by_one(clocks: Clocks) -> None:
    def training() -> None:
        clocks.thread += 8.5  # beside the 1.5 s of the exchanges' work
        clocks.kept += 10.0

    measured, record = round_on("cpu", clocks, training)
    assert record["exchange_work_seconds"] == pytest.approx(4.5)
    assert measured.measured is not None
    assert measured.measured.work_us == 9_000_000


def test_a_gpu_loses_the_time_in_which_it_stands_still(clocks: Clocks) -> None:
    """What it still computes when the slot ends is not lost, nor is what its exchanges' threads
    compute; waiting for a site is counted elsewhere."""
    measured, record = round_on("cuda", clocks)
    assert record["exchange_work_seconds"] == pytest.approx(3.0)
    assert record["seconds"] == pytest.approx(10.0 + 4.0 + 5.0 + 0.5)
    assert measured.measured is not None
    assert measured.measured.work_us == 3_000_000


def test_a_rank_that_waits_for_the_last_landing_ends_the_round_for_all(clocks: Clocks) -> None:
    """The others pass that time in telling each other what the round was like: it is in the
    round, and is not taken off steps that were short."""
    waited = {**NOTHING, "steps": 1.0, "seconds": 12.0, "wait": 11.0}
    other = {
        "sums": waited, "link": [[0.0, 4.0, 40], [4.0, 8.0, 40]], "ranks": [], "work": 0.0,
        "lost": 0.0, "seconds": 8.0, "exchanges": 2, "waited_for": {}, "behind": False,
        "memory": {"peak": 7, "reserved": 9, "retries": 2}, "peak": 1.0,
    }  # fmt: skip
    rank: Any = SimpleNamespace(
        blueprint=SimpleNamespace(trained=1000),
        place=SimpleNamespace(site="lyon"),
        states=[],
        mesh=SimpleNamespace(
            device=torch.device("cpu"),
            gather_names=lambda names: [names, ["", "", json.dumps(other)]],
        ),
    )
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured = RoundMetrics(run(), rank)
    measured.begin(PLAN, 0)
    clocks.wall += 1.0
    measured.add(StepResult(torch.tensor([[1.0, 1.0, 0.0]]), 1, 0, [["loss"]]), 0.1)
    record = measured.end(PLAN, outer, rank)
    assert (record["seconds"], record["wait_share"]) == (12.0, pytest.approx(11 / 12))
    assert measured.measured is not None
    assert measured.measured.step_us == 1_000_000
    assert measured.measured.exchanges == 2


def test_swaps_of_all_shards_count_once(clocks: Clocks) -> None:
    """The controller adds up what travels over shards: latency passes at all of them at once."""
    rank: Any = SimpleNamespace(
        blueprint=SimpleNamespace(trained=1000),
        place=SimpleNamespace(site="lyon"),
        states=[],
        mesh=SimpleNamespace(device=torch.device("cpu"), gather_names=lambda names: [names, names]),
    )
    outer: Any = SimpleNamespace(status=LoopStatus())
    outer.status.counts.link = [(0.0, 1.0, 8), (2.0, 3.0, 8)]
    measured = RoundMetrics(run(site={"shards": 2}), rank)
    measured.begin(PLAN, 0)
    clocks.wall += 4.0
    measured.add(StepResult(torch.tensor([[1.0, 1.0, 0.0]]), 1, 0, [["loss"]]), 0.1)
    measured.end(PLAN, outer, rank)
    assert measured.measured is not None
    assert (measured.measured.exchanges, measured.measured.exchange_bytes) == (2, 32)


def test_a_slot_is_as_long_as_the_rank_takes_with_its_waits_for_others(clocks: Clocks) -> None:
    """A lease is some beats of slots. Where a slow site's slots are short but for its waits, a
    lease by what it computes would be many times as long, and a stop that much later."""
    rank: Any = SimpleNamespace(
        blueprint=SimpleNamespace(trained=1000),
        place=SimpleNamespace(site="lyon"),
        states=[],
        mesh=SimpleNamespace(device=torch.device("cpu"), gather_names=lambda names: [names]),
    )
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured = RoundMetrics(run(), rank)
    step = StepResult(torch.tensor([[1.0, 1.0, 0.0]]), 1, 0, [["loss"]])
    plan = PLAN.model_copy(update={"slots": 4})
    measured.begin(plan, 0)
    clocks.wall += 0.1
    assert measured.slot_seconds(1) is None, "no step yet: the rank may have nothing to do in it"
    measured.add(step, 0.1)
    clocks.wall += 0.3
    assert measured.slot_seconds(2) == pytest.approx(0.2)
    clocks.wall += 7.0  # behind a payload
    clocks.wall += 5.0
    measured.held(5.0)  # for the lease
    assert measured.slot_seconds(4) == pytest.approx(7.4 / 4)
    measured.end(plan, outer, rank)
    clocks.wall += 100.0  # for a checkpoint, say
    measured.begin(plan, 0)
    clocks.wall += 0.6
    assert measured.slot_seconds(1) == pytest.approx(8.0 / 5)
    # Gone on with in the middle: two of its slots were trained before.
    measured.begin(plan, 2)
    clocks.wall += 0.4
    assert measured.slot_seconds(4) == pytest.approx(7.8 / 6)


def test_a_gpu_of_known_peak_has_an_mfu_and_its_peak_memory(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = MemoryUse(peak=50, reserved=70, retries=3)
    monkeypatch.setattr(round_meter, "memory_meter", lambda _device: Readings(use))
    monkeypatch.setattr(round_meter, "peak_here", lambda _config, _device: 1e6)
    _, record = round_on("cuda", clocks)
    speed = 8 * run().data.sequence_length / 19.5
    assert record["tokens_per_second"] == pytest.approx(speed)
    assert record["mfu"] == pytest.approx(FLOPS * speed / 1e6)
    assert record["peak_flops"] == 1e6
    assert record["peak_memory_bytes"] == 50
    assert record["peak_reserved_bytes"] == 70
    assert record["allocation_retries"] == 3


def test_what_is_not_known_of_a_device_is_not_in_the_record(clocks: Clocks) -> None:
    _, record = round_on("cpu", clocks)
    assert not {"mfu", "peak_flops", "peak_memory_bytes", "allocation_retries"} & record.keys()


def test_a_site_is_as_large_as_its_largest_rank_and_as_fast_as_all_together() -> None:
    first = MemoryUse(peak=5, reserved=9, retries=1)
    second = MemoryUse(peak=7, reserved=8, retries=2)
    whole = Devices.of([(first, 1e6), (second, 2e6)])
    assert whole == Devices(MemoryUse(peak=7, reserved=9, retries=3), 3e6)
    assert Devices.of([(first, 1e6), (second, None)]).peak is None


def test_a_norm_of_infinity_drops_nothing_and_is_not_shown(clocks: Clocks) -> None:
    """A loop with a gradient scaler leaves such a step out, and its weights are sound."""
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured = RoundMetrics(run(), lyon())
    measured.begin(PLAN, 0)
    for norm in (2.0, float("inf")):
        clocks.wall += 1.0
        measured.add(ReportedStep(1.5, norm, None), 0.1)
    assert measured.non_finite() is None
    record = measured.end(PLAN, outer, lyon())
    assert (record["loss"], record["grad_norm"]) == (1.5, 2.0)
    measured.begin(PLAN, 0)
    measured.add(ReportedStep(1.5, float("nan"), None), 0.1)
    assert "grad_norm" not in measured.end(PLAN, outer, lyon())
    measured.begin(PLAN, 0)
    measured.add(ReportedStep(float("nan"), float("inf"), None), 0.1)
    assert measured.non_finite() == "stage 0: loss"


def lyon(kind: str = "cpu") -> Any:
    return SimpleNamespace(
        blueprint=SimpleNamespace(trained=1000),
        place=SimpleNamespace(site="lyon"),
        states=[],
        mesh=SimpleNamespace(device=torch.device(kind), gather_names=lambda names: [names]),
    )


STEP = StepResult(torch.tensor([[1.0, 1.0, 0.0]]), 1, 0, [["loss"]])


def steps_of(measured: RoundMetrics, clocks: Clocks, outer: Any, *seconds: float) -> None:
    for each in seconds:
        with measured.first_step(outer.status.counts):
            clocks.wall += each
        measured.add(STEP, 0.1)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_first_step_of_a_process_is_not_its_pace(clocks: Clocks, kind: str) -> None:
    """It compiles, and connects the ranks: plans and leases are made from the others. What it did
    is in the round's seconds all the same."""
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured, plan = RoundMetrics(run(), lyon(kind)), PLAN.model_copy(update={"slots": 4})
    measured.begin(plan, 0)
    clocks.ahead = 10.0 if kind == "cuda" else 0.0  # which the device still computes
    steps_of(measured, clocks, outer, 50.0 if kind == "cuda" else 60.0)
    assert measured.slot_seconds(1) is None, "nothing is known of the others yet"
    steps_of(measured, clocks, outer, 0.5, 0.5, 0.5)
    assert measured.slot_seconds(4) == pytest.approx(0.5)
    record = measured.end(plan, outer, lyon(kind))
    assert record["seconds"] == pytest.approx(61.5)
    assert measured.measured is not None
    assert measured.measured.step_us == 500_000
    # Also before the next round begins, when this rank says where it stands.
    assert measured.slot_seconds(0) == pytest.approx(0.5)
    # From then on all steps count.
    measured.begin(plan, 0)
    steps_of(measured, clocks, outer, 0.7)
    assert measured.slot_seconds(1) == pytest.approx((2.0 + 0.7) / 5)
    measured.end(plan, outer, lyon(kind))
    assert measured.measured.step_us == 700_000


def test_a_round_of_the_first_step_alone_tells_nothing(clocks: Clocks) -> None:
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured = RoundMetrics(run(), lyon())
    measured.begin(PLAN, 0)
    steps_of(measured, clocks, outer, 60.0)
    record = measured.end(PLAN, outer, lyon())
    assert (record["steps"], measured.measured) == (1, None)
    measured.begin(PLAN, 0)
    assert measured.slot_seconds(1) is None
    steps_of(measured, clocks, outer, 0.5)
    assert measured.slot_seconds(1) == pytest.approx(0.5)
    measured.end(PLAN, outer, lyon())
    assert measured.measured is not None
    assert measured.measured.step_us == 500_000


def test_what_the_first_step_waits_for_other_sites_is_left_out_once(clocks: Clocks) -> None:
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured, plan = RoundMetrics(run(), lyon()), PLAN.model_copy(update={"slots": 2})
    measured.begin(plan, 0)
    with measured.first_step(outer.status.counts):
        clocks.wall += 60.0
        outer.status.counts.wait_seconds += 20.0
    measured.add(STEP, 0.1)
    steps_of(measured, clocks, outer, 0.5)
    measured.end(plan, outer, lyon())
    assert measured.measured is not None
    assert measured.measured.step_us == 500_000


def test_a_round_of_the_first_step_alone_tells_no_pace(clocks: Clocks) -> None:
    outer: Any = SimpleNamespace(status=LoopStatus())
    measured, plan = RoundMetrics(run(), lyon()), PLAN.model_copy(update={"slots": 1})
    measured.begin(plan, 0)
    steps_of(measured, clocks, outer, 60.0)
    measured.end(plan, outer, lyon())
    clocks.wall += 0.1
    assert measured.slot_seconds(0) is None
