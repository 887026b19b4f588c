"""Which runs and models a loop of the user's own can train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError, ModelError
from dilocox.loop import own_loop
from dilocox.models import load_model_config
from dilocox.training.builder import RankPlace, anchors
from dilocox.training.launch.several_processes import FollowingSite
from dilocox.training.loop.batches import batches_of_loop
from dilocox.training.loop.parts import OwnLoop, OwnModelPlan, build_parts, check_loop, plan_of
from dilocox.training.loop.turns import Turns
from tests.support.base_model import write_base

ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "vocab_size": 300,
}  # fmt: skip


def run_with(
    own_code: bool = True, packing: str = "stream", sections: dict[str, Any] | None = None
) -> RunConfig:
    """A run of two sites whose loops are their own."""
    raw: dict[str, Any] = {
        "model": {"architecture": dict(ARCHITECTURE)},
        "data": {"source": "python-stdlib", "packing": packing, "sequence_length": 16},
        "inner": {"optimizer": "sgd"},
        "outer": {"rounds": 2, "inner_steps": 4, "fragments": 2},
        "sites": {"paris": {"own_code": own_code}, "lyon": {"own_code": True}},
    }
    for name, keys in (sections or {}).items():
        merged = {**raw.get(name, {}), **keys}
        raw[name] = {key: value for key, value in merged.items() if value is not None}
    return resolve_run(raw)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"own_code": False}, r"sites\.paris\.own_code: is false"),
        ({"sections": {"site": {"replicas": 2}}}, "no pipeline and no replicas"),
        ({"sections": {"site": {"shards": 2}}}, "one process for each shard, and this one has 1"),
        ({"sections": {"site": {"code": __file__}}}, r"site\.code: has functions for"),
        ({"sections": {"outer": {"method": "allreduce"}}}, "gradients of every step"),
        ({"sections": {"admission": {"gate": True}}}, r"admission\.gate: needs dilocox's own"),
        ({"sections": {"inner": {"optimizer": "adamw"}}}, 'set it to "sgd"'),
        (
            {"sections": {"data": {"columns": ["weight"], "format": "jsonl"}}},
            "columns and preferences",
        ),
    ],
)
def test_a_run_that_needs_dilocoxs_own_loop_is_refused(run: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_loop(run_with(**run), "paris")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"source": "python-stdlib"}}, "source is about the run's text"),
        ({"data": {"packing": "none"}}, "packing is about the run's text"),
        ({"sites": {"paris": {"own_code": False}}}, r"sites\.paris\.own_code is false"),
        ({"sites": {"paris": {"own_code": True, "data": "x"}}}, r"sites\.paris\.data names some"),
        ({"model": {"path": "x", "architecture": None, "handover": True}}, "continues token"),
        ({"admission": {"gate": True}}, r"admission\.gate judges by held-out"),
        ({"evaluation": {"tasks": ["x"]}}, r"evaluation\.tasks needs a tokenizer"),
        (
            {"model": {"architecture": {"model_type": "qwen3"}}},
            r"set vocab_size in model\.architecture",
        ),
    ],
)
def test_a_run_without_text_has_nothing_about_text(sections: dict[str, Any], said: str) -> None:
    data = {"own": True, "source": None, "packing": None, **sections.pop("data", {})}
    with pytest.raises(ConfigError, match=said):
        run_with(sections={**sections, "data": data})


def test_a_run_without_text(tmp_path: Path) -> None:
    """Its vocabulary is the model's, and its own batches are refused."""
    data = {"own": True, "source": None, "packing": None, "sequence_length": 16}
    config = run_with(sections={"data": data})
    assert config.data.trained_vocabulary is None
    batches = batches_of_loop(config, "paris", (0, 1), None, torch.device("cpu"))
    assert batches.labels([(0, 8)], 8) is None
    batches.step([(0, 8)], 8, 0)
    with pytest.raises(ConfigError, match=r"data\.own: the run has no text of its own"):
        batches.read_now()


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"call torch\.distributed\.init_process_group and wrap"):
        check_loop(run_with(), "paris")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_loop(run_with(), "paris")


def test_a_divided_model_needs_shards(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        config = run_with(sections={"model": {"own": True, "architecture": None}})
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ModelError, match=r"weight is divided among processes \(FSDP2"):
            plan_of(config, OwnLoop(model, []), 0)
    finally:
        dist.destroy_process_group()


def test_processes_divide_a_batch_evenly() -> None:
    class Ranks:
        world = 3

    site = FollowingSite.__new__(FollowingSite)
    site.config, site.name, site.ranks = run_with(), "paris", Ranks()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be divided among the 3 processes of site paris"):
        site.check_batches()
    Ranks.world = 2
    site.check_batches()


def built(model: nn.Module, config: RunConfig | None = None, vocabulary: int = 300) -> Any:
    """The parts of a rank around `model`."""
    config = config or run_with()
    trained = [each for each in model.parameters() if each.requires_grad]
    loop = own_loop(model, torch.optim.SGD(trained, lr=0.1), None, None)
    return build_parts(
        config, vocabulary, RankPlace("paris", 0, 0), loop,
        Turns(torch.device("cpu"), lambda: None), lambda: (0, False),
    )  # fmt: skip


def fresh(**changes: Any) -> nn.Module:
    """The run's architecture with weights of its own."""
    config = run_with(sections={"model": {"architecture": {**ARCHITECTURE, **changes}}})
    model: nn.Module = AutoModelForCausalLM.from_config(load_model_config(config.model, 300))
    return model.float()


def test_the_runs_first_weights_replace_those_of_the_model() -> None:
    torch.manual_seed(1)
    first = fresh()
    torch.manual_seed(2)
    second = fresh()
    rank, other = built(first), built(second)
    assert len(rank.states) == 2
    for name, tensor in first.named_parameters():
        assert torch.equal(tensor, dict(second.named_parameters())[name]), name
        assert torch.equal(anchors(rank)[name], anchors(other)[name])
        assert rank.live[name].data_ptr() == tensor.data_ptr()


def test_another_architecture_is_named() -> None:
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\..*unlike \[model\]"):
        built(fresh(num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"also trains model\.layers\.2\."):
        built(fresh(num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"has shape \(56, 32\), \[model\] .* says \(48, 32\)"):
        built(fresh(intermediate_size=56))


def test_tensors_of_sixteen_bits_are_named() -> None:
    with pytest.raises(ModelError, match="is bfloat16; keep trained tensors in fp32"):
        built(fresh().bfloat16())


def test_a_compiled_model_has_the_same_names() -> None:
    model = fresh()
    rank = built(torch.compile(model))  # type: ignore[arg-type]
    assert list(rank.live) == [name for name, _ in model.named_parameters()]
    assert rank.model.saved_buffers() == {}


def test_a_model_on_no_device_is_named() -> None:
    model = fresh().requires_grad_(False)
    with pytest.raises(ModelError, match="none is trained"):
        _ = own_loop(model, [], None, None).device


def test_adapters_of_peft_have_the_names_of_the_runs(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = write_base(tmp_path / "base")
    sections = {"model": {"path": str(base), "architecture": None}, "adapter": {"rank": 4}}
    config = run_with(sections=sections)

    def parts(alpha: float) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        lora = LoraConfig(r=4, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        return built(get_peft_model(model, lora), config, 272)

    rank = parts(32.0)
    assert len(rank.live) == 2 * 2 * 7
    assert all(".lora_" in name and ".default" not in name for name in rank.live)
    assert all(tensor.dtype == torch.float32 for tensor in rank.live.values())
    with pytest.raises(ModelError, match=r"adapters are scaled by 4, \[adapter\] .* says 8"):
        parts(16.0)
    with pytest.raises(ConfigError, match="freeze_a"):
        check_loop(run_with(sections={**sections, "adapter": {"freeze_a": True}}), "paris")


def test_a_model_of_ones_own_keeps_its_weights_and_is_known_by_a_digest() -> None:
    config = run_with(sections={"model": {"architecture": None, "own": True}})
    assert config.control.adapt == "off"

    def digest(*widths: int) -> str:
        layers = [nn.Linear(4, 4), *(nn.Linear(width, width) for width in widths)]
        model = nn.Sequential(*layers)
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        rank = built(model, config)
        assert all(torch.equal(before[name], tensor) for name, tensor in rank.live.items())
        assert rank.blueprint.trained == sum(tensor.numel() for tensor in before.values())
        assert isinstance(rank.blueprint, OwnModelPlan)
        return rank.blueprint.digest

    assert digest(8) == digest(8) != digest(9)
    own = {"model": {"architecture": None, "own": True}, "outer": {"fragments": 3}}
    run = run_with(sections=own)
    with pytest.raises(ConfigError, match=r"outer\.fragments"):
        built(nn.Sequential(nn.Linear(4, 4)), run)


@pytest.mark.parametrize(
    ("section", "keys", "said"),
    [
        ("control", {"adapt": "link"}, r"set control\.adapt to"),
        ("site", {"stages": 2}, "one rank: set site.stages"),
        ("checkpoint", {"hugging_face": True}, "checkpoint.hugging_face needs"),
        ("model", {"path": "somewhere"}, "exactly one of path and architecture, or own"),
    ],
)
def test_what_needs_a_known_model_is_refused(section: str, keys: Any, said: str) -> None:
    sections = {"model": {"architecture": None, "own": True}}
    sections[section] = {**sections.get(section, {}), **keys}
    with pytest.raises(ConfigError, match=said):
        run_with(sections=sections)


def test_commands_that_build_the_model_name_the_reason() -> None:
    config = run_with(sections={"model": {"architecture": None, "own": True}})
    with pytest.raises(ModelError, match=r"model\.own: the model is known to the sites' own"):
        load_model_config(config.model, None)
