"""Sizes that the controller goes by: what ranks really exchange, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilocox.compression import Geometry, compressor
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.controller.candidates import codecs
from dilocox.errors import ConfigError
from dilocox.models import chunk
from dilocox.models.meta_model import build_skeleton
from dilocox.training import payload_sizes as payloads
from dilocox.training.builder import ModelPlan
from dilocox.training.payload_sizes import message_bytes, payload_sizes, stage_shapes
from tests.support.architectures import ROUTED_IN_FP32
from tests.support.process_starts import ARCHITECTURE

pytestmark = pytest.mark.waits

VOCABULARY = 300


def config(**sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"architecture": {**ARCHITECTURE, "intermediate_size": 48}},
        "data": {"sequence_length": 32},
        "site": {"stages": 2, "shards": 1, "batch_size": 8, "micro_batch_size": 2},
        "outer": {"fragments": 2},
        "sites": {"a": {}, "b": {}},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return resolve_run(raw)


def sizes(**sections: Any) -> dict[str, list[list[int]]]:
    found = payload_sizes(config(**sections), VOCABULARY)
    assert found is not None
    return found


def test_every_codec_that_may_be_chosen_has_its_sizes() -> None:
    found = sizes()
    assert list(found) == codecs(config())
    for rows in found.values():
        assert [len(row) for row in rows] == [2, 2]
    # Least lossy first; what loses more is smaller.
    totals = [sum(map(sum, rows)) for rows in found.values()]
    assert len(totals) > 4
    assert totals == sorted(totals, reverse=True)


def test_dense_sizes_are_the_parameters_with_their_padding_and_frames() -> None:
    run = config()
    blueprint = ModelPlan.of(run, VOCABULARY)
    assert blueprint.tied is not None
    expected = 0
    rows = 0
    for stage in range(2):
        for name, shape in stage_shapes(run, blueprint, stage).items():
            if name != blueprint.tied[1]:
                size = 1
                for length in shape:
                    size *= length
                expected += 4 * -(-size // 128) * 128
                rows += -(-shape[0] // 32) if len(shape) > 1 else 0
    plain = sizes(compression={"moments": False})
    assert sum(map(sum, plain["none"])) == expected + 4 * 64
    # A byte for one of 32 rows of each tensor, whatever the codec.
    for codec, with_moments in sizes().items():
        assert sum(map(sum, with_moments)) - sum(map(sum, plain[codec])) == rows


def test_parameters_that_a_type_freezes_are_part_of_the_models_state() -> None:
    """Ranks keep and exchange them, so that a handover has all of the model."""
    run = config(model={"architecture": {**ROUTED_IN_FP32, "vocab_size": VOCABULARY}})
    blueprint = ModelPlan.of(run, VOCABULARY)
    found = payloads.model_shapes(run, blueprint)
    whole = dict(build_skeleton(blueprint.hf_config).named_parameters())
    assert any(not parameter.requires_grad for parameter in whole.values())
    assert {n: s for stage in found for n, s in stage.items()} == {
        name: tuple(parameter.shape) for name, parameter in whole.items()
    }


def test_shards_send_their_rows_each() -> None:
    whole = sum(map(sum, sizes(site={"stages": 1})["none"]))
    for shards in (2, 3):
        cut = sizes(site={"stages": 1, "shards": shards, "batch_size": 4 * shards})["none"]
        # More padding and more frames, the same values.
        padding = shards * (40 * 128 * 4 + 2 * 64)
        assert whole < sum(map(sum, cut)) < whole + padding


def test_no_sizes_without_need() -> None:
    assert payload_sizes(config(control={"adapt": "off"}), VOCABULARY) is None
    only = sizes(compression={"codec": "int8"})
    # And what says how many values there are.
    assert list(only) == ["none", "int8"]


def test_ranks_are_not_waited_for_where_no_matrix_has_one() -> None:
    paper = {"outer": {"method": "dilocox-paper", "fragments": 1}}
    with pytest.raises(ConfigError, match=r'codec = "lowrank:64": low rank pays for no matrix'):
        payload_sizes(config(**paper), VOCABULARY)
    small = config(**paper, compression={"codec": "lowrank:2"})
    assert small.control.adapt == "effective-rank"
    assert payload_sizes(small, VOCABULARY) is None
    fixed = config(**paper, control={"adapt": "off"})
    assert payload_sizes(fixed, VOCABULARY) is None


@pytest.mark.parametrize("codec", ["none", "int4", "topk:10", "cocktail", "lowrank:2"])
def test_a_message_is_what_its_codec_says(codec: str) -> None:
    geometry = Geometry(((64, 128), (128,)), (0, 8192), 8320)
    chosen: Any = compressor(codec, geometry)
    if codec.startswith("lowrank"):
        expected = 128 + chosen.basis_bytes + chosen.payload_bytes
    else:
        expected = 64 + chosen.part(0, 8320, 0).payload_bytes
    assert message_bytes(codec, geometry) == expected


def test_the_model_is_built_once_however_many_stages_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config(site={"stages": 4})
    blueprint = ModelPlan.of(run, None)
    built = []
    plain = chunk.build_skeleton

    def noted(*given: Any, **more: Any) -> Any:
        built.append(given)
        return plain(*given, **more)

    monkeypatch.setattr(chunk, "build_skeleton", noted)
    found = payloads.model_shapes(run, blueprint)
    assert payloads.model_shapes(run, blueprint) == found
    assert len(found) == 4
    assert len(built) == 1


def test_shapes_are_known_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attention_2 cannot be built without one, and looking for it would start CUDA."""

    def looks() -> bool:
        raise AssertionError("CUDA was looked for")

    plain = config()
    flash = config(model={"attention": "flash_attention_2"})
    expected = payloads.model_shapes(plain, ModelPlan.of(plain, None))
    monkeypatch.setattr(torch.cuda, "is_available", looks)
    blueprint = ModelPlan.of(flash, None)
    assert payloads.model_shapes(flash, blueprint) == expected
