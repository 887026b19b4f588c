"""What a run hands over to one of another layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dilocox.config.handover import MOMENTUM
from dilocox.config.run_config import resolve_run
from dilocox.coordinator.protocol.messages import MemberPlan, RoundPlan
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.ledger_audit import audit
from dilocox.errors import CheckpointError, ConfigError, TrainingError
from dilocox.outer.layout import Layout, local_shapes
from dilocox.training.launch.coordinator_process import earlier_run
from dilocox.training.payload_sizes import piece_names
from dilocox.training.portable_checkpoint import Handover
from dilocox.training.portable_checkpoint_export import (
    hand_over,
    ledger_of,
    steps_taken_by,
    whole_state,
)
from tests.outer.test_loop import plan as plan_of
from tests.support.coordinator_driver import Driver

pytestmark = pytest.mark.waits


def config(**site: int) -> object:
    return resolve_run(
        {
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": site,
            "outer": {"rounds": 4, "inner_steps": 4, "fragments": 2},
            "control": {"adapt": "off"},
            "sites": {"paris": {}},
        }
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_shards_are_put_together_as_they_were_cut(shards: int, kept: torch.dtype) -> None:
    run = config(shards=shards, batch_size=6, micro_batch_size=1)
    shapes = {"layers.0.w": (7, 3), "layers.0.b": (5,), "layers.1.w": (2, 4), "layers.1.b": (1,)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    parts = []
    for shard in range(shards):
        part = {}
        for number, names in enumerate(piece_names(run, shapes)):  # type: ignore[arg-type]
            local = local_shapes(shapes, names, shard, shards)
            rows = {
                name: whole[name][shard * -(-len(whole[name]) // shards) :][: local[name][0]]
                for name in names
            }
            anchor = Layout.of(local).pack(rows)
            momentum = (2 * anchor).to(kept)
            part |= {f"outer/{number}/anchor": anchor, f"outer/{number}/momentum": momentum}
        parts.append(part)
    found = whole_state(run, shapes, parts)  # type: ignore[arg-type]
    assert list(found["anchor"]) == list(found["momentum"]) == list(shapes)
    for name, tensor in whole.items():
        assert torch.equal(found["anchor"][name], tensor)
        assert torch.equal(found["momentum"][name], (2 * tensor).to(kept).float())
    shapes["layers.1.w"] = (2, 4 * math.prod((2, 64)))
    with pytest.raises(CheckpointError, match="does not fit the run file's model"):
        whole_state(run, shapes, parts)  # type: ignore[arg-type]


def plan(round_: int, **changes: object) -> RoundPlan:
    members = {
        "paris": MemberPlan(weight=1.0, batch=4, ranges=[(32, 16)], space="shared"),
        "lyon": MemberPlan(weight=1.0, batch=4, ranges=[(48, 8)], space="shared", pace=500),
    }
    return plan_of(round_, members=members, first_step=8, **changes)


def test_steps_count_to_the_slot_of_the_checkpoint() -> None:
    point = e.Resumed(0.0, 9, 2, 3)
    assert steps_taken_by(point, plan(2), plan(1)) == 8 + 3
    assert steps_taken_by(e.Resumed(0.0, 8, 2, 0), None, plan(1)) == 8 + 4
    assert steps_taken_by(e.Resumed(0.0, 0, 0, 0), None, None) == 0


def test_what_was_trained_on_is_never_given_out_again_and_the_rest_is() -> None:
    ledger = Ledger()
    ledger.issue("paris", 1, 1, "shared", [(0, 16)])
    ledger.issue("lyon", 1, 1, "shared", [(16, 8), (24, 8)])
    ledger.commit("paris", 1, 1)
    ledger.commit("lyon", 1, 1)
    ledger.issue("paris", 1, 2, "shared", [(32, 16)])
    ledger.issue("lyon", 1, 2, "shared", [(48, 8)])
    # Three of four slots: paris has taken three steps of four sequences, lyon, half as fast, one.
    found = ledger_of(ledger, plan(2), 3)
    assert [(each.start, each.count) for each in found.entries] == [(0, 44), (48, 4)]
    assert found.pool == {"shared": [(44, 4), (52, 4)]}
    assert found.next == {"shared": 56}
    checked = audit(found)
    assert (checked.committed, checked.waiting) == (48, 8)
    assert (checked.doubled, checked.unsettled, checked.missing) == (0, 0, 0)
    # Between two rounds nothing is half done: what is planned ahead is given out again.
    assert ledger_of(ledger, None, 0).pool == {"shared": [(32, 24)]}


def test_a_handover_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    made = Handover(
        run="old", tick=3, steps=24, seed=0, sequence_length=32, data_digest="d" * 64,
        momentum="0" * 64, ledger=Ledger().to_json(),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="needs a folder that"):
        Handover.read(tmp_path)
    made.write(tmp_path)
    assert Handover.read(tmp_path) == made
    (tmp_path / MOMENTUM).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="missing or changed"):
        made.check_momentum(tmp_path)
    (tmp_path / "handover.json").write_text('{"run": "old"}')
    with pytest.raises(CheckpointError, match="write the folder again"):
        Handover.read(tmp_path)


def test_the_coordinator_goes_on_from_steps_and_ranges(tmp_path: Path) -> None:
    ledger = Ledger(next={"shared": 56}, pool={"shared": [(44, 4), (52, 4)]})
    ledger.note_committed("handover", "shared", [(0, 44), (48, 4)])
    made = Handover(
        run="old", tick=11, steps=11, seed=0, sequence_length=32, data_digest="d" * 64,
        momentum="0" * 64, ledger=ledger.to_json(),
    )  # fmt: skip
    made.write(tmp_path)
    run = resolve_run(
        {
            "model": {"path": str(tmp_path), "handover": True},
            "site": {"batch_size": 4, "micro_batch_size": 1},
            "outer": {"rounds": 4, "inner_steps": 4, "fragments": 2},
            "control": {"adapt": "off"},
            "sites": {"a": {}, "b": {}},
        }
    )
    with pytest.raises(TrainingError, match="was given no earlier run"):
        Driver(tmp_path / "run", run)
    driver = Driver(tmp_path / "run", run, earlier=lambda: earlier_run(run))
    driver.start()
    plans = [driver.plan(0, "a"), driver.plan(1, "a")]
    assert [plan and plan.first_step for plan in plans] == [11, 15]
    assert [plan and plan.inner_steps for plan in plans] == [4, 1]
    assert plans[0] is not None
    assert plans[0].first_tick == 0
    assert plans[0].members["a"].ranges == [(44, 4), (52, 4), (56, 8)]
    # It is read once: what is in the log counts when the coordinator starts again.
    (tmp_path / "handover.json").unlink()
    driver.reopen()
    assert driver.core.state.steps_before == 11
    driver.write_checkpoint("a", 2, 0, 2)
    driver.write_checkpoint("b", 2, 0, 2)
    driver.core.resume()
    assert driver.core.state.ledger.next == {"shared": 56 + 24}
    assert audit(driver.core.state.ledger).missing == 0
    driver.core.close()


def test_one_message_lists_all_that_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = resolve_run(
        {
            "model": {"architecture": {"model_type": "qwen3"}},
            "data": {"folder": str(tmp_path / "tokens")},
            "sites": {"paris": {}},
        }
    )
    (folder / "run.toml").write_text(run.to_toml())
    with pytest.raises(CheckpointError) as caught:
        hand_over(folder, tmp_path / "start")
    text = str(caught.value)
    assert f"needs also: {folder / 'coordinator'}: the coordinator's event log; and " in text
    assert f"{tmp_path / 'tokens'}: the token files that the run trained on" in text
    assert "data prepare" not in text
    EventLog(folder / "coordinator").close()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*; and .*the token files"):
        hand_over(folder, tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_the_tokenizer_of_the_run_before_is_taken(tmp_path: Path) -> None:
    def going_on(**data: object) -> tuple[str, int]:
        found = resolve_run(
            {
                "model": {"path": str(tmp_path), "handover": True},
                "data": data,
                "sites": {"paris": {}},
            }
        ).data
        return found.tokenizer, found.vocabulary_size

    def handed(**fields: object) -> None:
        Handover(
            run="old", tick=3, steps=24, seed=0, sequence_length=32, data_digest="d" * 64,
            momentum="0" * 64, ledger=Ledger().to_json(), **fields,  # type: ignore[arg-type]
        ).write(tmp_path)  # fmt: skip

    usual = going_on()
    assert usual[0] == "train"
    handed()  # of an earlier version
    assert going_on() == usual
    handed(tokenizer="train", vocabulary_size=1024)
    assert going_on() == ("train", 1024)
    assert going_on(vocabulary_size=300) == ("train", 300)
    assert going_on(tokenizer="hub/name") == ("hub/name", usual[1])
    handed(tokenizer="hub/name@main", vocabulary_size=4096)
    assert going_on() == ("hub/name@main", usual[1])
    # A local one that is not on this machine: the folder has its files.
    handed(tokenizer=str(tmp_path / "gone"))
    assert going_on() == (str(tmp_path / "gone"), usual[1])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert going_on() == (str(tmp_path), usual[1])
    (tmp_path / "handover.json").write_text("[")
    assert going_on() == usual


def test_a_handover_needs_a_folder_and_its_weights() -> None:
    for model in ({"architecture": {"model_type": "qwen3"}}, {"path": "x", "pretrained": False}):
        with pytest.raises(ConfigError, match="handover needs path, and pretrained = true"):
            resolve_run({"model": {**model, "handover": True}, "sites": {"a": {}}})
