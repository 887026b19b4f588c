"""The peers' scripts: what they are told, what is made of what they say, and that they train."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks.wan import grid as wan_grid
from benchmarks.wan import peer_runs as wan_peers
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import BY_NAME, METHODS, Extent
from benchmarks.wan.peers.peer import Outcome, PeerJob, allreduce_bytes

from dilocox.tools.testbed import Lab, LabError
from tests.support.lab_needs import needs_lab

pytestmark = pytest.mark.alone

PEERS = [method for method in METHODS if method.kind == "peer"]


def outcome(**more: float) -> Outcome:
    known = Outcome(
        seconds=20.0,
        steps=10,
        tokens=5120,
        cycles=5,
        payload_bytes=4e6,
        wire_bytes=4_200_000,
        loss=6.5,
    )
    return dataclasses.replace(known, **more)


def test_two_sites_send_all_values_and_four_send_half_again_as_many() -> None:
    assert allreduce_bytes(1000, 2) == 4000
    assert allreduce_bytes(1000, 4) == 6000


def test_a_row_adds_the_sites_up_and_counts_bytes_per_cycle() -> None:
    row = wan_peers.peer_row([outcome(), outcome(seconds=10.0)])
    assert row["tokens_per_second"] == pytest.approx(5120 / 20 + 5120 / 10)
    assert row["inner_steps"] == 2
    assert row["payload_bytes"] == 8e5
    assert row["wire_bytes"] == 840_000


@pytest.mark.parametrize("method", PEERS, ids=lambda method: method.name)
def test_jobs_are_read_as_they_were_written(method: wan_grid.Method, tmp_path: Path) -> None:
    job = PeerJob(
        model={"model_type": "qwen3"},
        batch=4,
        sequence_length=64,
        sites=2,
        warm_up=method.warm_up,
        cycles=2,
        sync_every=method.inner_steps,
        **method.settings,
    )
    job.save(tmp_path / "job.json")
    assert PeerJob.load(tmp_path / "job.json") == job


def test_every_parameter_is_in_one_of_torchfts_fragments() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (extra: peers)")
    from benchmarks.wan.peers.torchft_site import fragments
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = {**wan_grid.MODEL, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 300}
    config = AutoConfig.for_model(**tiny)
    model = AutoModelForCausalLM.from_config(config)
    parts = fragments(model, 4)
    held = [id(p) for part in parts for p in part.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    untied = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**tiny, "tie_word_embeddings": False})
    )
    with pytest.raises(ValueError, match="the model has others"):
        fragments(untied, 4)


TINY = Extent(1, 1, 1, 1, 40, 4, (4,), (2,), ("ddp",))
"""As little as can be measured."""


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("name", [method.name for method in PEERS])
def test_a_peer_trains_over_a_slow_link_and_sends_what_it_says(name: str, tmp_path: Path) -> None:
    method = dataclasses.replace(BY_NAME[name], inner_steps=min(BY_NAME[name].inner_steps, 16))
    if "delay" in method.settings:
        method = dataclasses.replace(method, settings={**method.settings, "delay": 2})
    if method.script.startswith("torchft"):
        pytest.importorskip("torchft", reason="torchft is not installed (extra: peers)")
    with Lab(["a", "b"], "50mbit", quota=0.4) as lab:
        row = wan_peers.measure_peer(lab, tmp_path, method, 4, TINY, step_seconds=0.2)
    assert row["tokens_per_second"] > 0
    assert row["inner_steps"] == method.inner_steps
    # Beyond the payload: frames' headers, acknowledgements, control messages.
    assert row["payload_bytes"] < row["wire_bytes"] < 1.1 * row["payload_bytes"] + 30_000


@needs_lab
@pytest.mark.slow
def test_a_peer_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    broken = dataclasses.replace(BY_NAME["ddp-powersgd"], warm_up=1)
    with (
        Lab(["a", "b"], "50mbit", quota=0.4) as lab,
        pytest.raises(LabError, match="powersgd at a has failed: powersgd: warm_up 1 must be"),
    ):
        wan_peers.measure_peer(lab, tmp_path, broken, 4, TINY, step_seconds=0.2)


@needs_lab
@pytest.mark.slow
def test_a_method_of_the_engine_is_measured(tmp_path: Path) -> None:
    method = dataclasses.replace(BY_NAME["allreduce"], warm_up=2)
    with Lab(["paris", "lyon"], "20mbit", quota=0.4) as lab:
        row = wan_run.measure_engine(lab, tmp_path, method, 4, TINY)
    parameters = 918_912
    assert row["payload_bytes"] == pytest.approx(4 * parameters, rel=0.01)
    assert row["payload_bytes"] < row["wire_bytes"] < 1.15 * row["payload_bytes"]
    # 29 Mbit of payload per step: 1.5 s of a link of 20 Mbit/s, with its headers.
    assert row["seconds"] > 1.4 * row["steps"]
    assert 0.3 < row["efficiency"] < 1.1
