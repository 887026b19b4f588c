"""Section `[adapter]`: what it refuses, and that runs without it are as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.adapter import adapter_packages, compile_setting
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError

PATH = {"path": "org/base", "pretrained": True}


def resolved(
    adapter: dict[str, Any] | None, model: dict[str, Any] = PATH, **site: Any
) -> RunConfig:
    raw: dict[str, Any] = {"model": dict(model), "site": site, "sites": {"a": {}, "b": {}}}
    if adapter is not None:
        raw["adapter"] = adapter
    return resolve_run(raw)


def test_a_run_without_adapters_keeps_its_digest() -> None:
    config = resolved(None)
    assert "adapter" not in config.shared()
    assert "adapter" not in config.shared(without_defaults=True)
    assert "adapter" not in config.to_toml()


def test_an_adapter_is_part_of_what_sites_agree_on() -> None:
    plain, one, two = (resolved(each) for each in (None, {"rank": 8}, {"rank": 16}))
    assert len({each.digest() for each in (plain, one, two)}) == 3
    # The section counts even with every key at its default.
    assert resolved({}).digest() != plain.digest()


def test_scaling() -> None:
    for rslora, scaling in ((False, 2.0), (True, 8.0)):
        config = resolved({"rank": 16, "alpha": 32.0, "use_rslora": rslora})
        assert config.adapter is not None
        assert config.adapter.scaling == scaling


@pytest.mark.parametrize(
    ("adapter", "model", "message"),
    [
        ({"rank": 0}, PATH, "adapter.rank: got 0"),
        ({"alpha": 0.0}, PATH, "adapter.alpha: got 0"),
        ({"dropout": 1.0}, PATH, "adapter.dropout: got 1"),
        ({"kind": "dora"}, PATH, "adapter.kind: got"),
        ({"targets": []}, PATH, "adapter.targets: names no layer"),
        ({"targets": ["q", "q"]}, PATH, "names q twice"),
        ({"targets": "all"}, PATH, "adapter.targets"),
        ({"ranks": 8}, PATH, "adapter.ranks: no such key"),
        ({}, {"path": "org/base", "pretrained": False}, "cannot be fresh"),
        ({}, {"architecture": {"model_type": "qwen3"}}, "cannot be fresh"),
        ({}, {**PATH, "handover": True}, "name the handover's folder in adapter.handover"),
        ({"handover": True}, PATH, "adapter.handover: got true"),
        ({"path": "a", "handover": "b"}, PATH, "both name the first adapters: keep handover"),
        ({"path": "a", "freeze_a": True}, PATH, "set freeze_a = false, or leave path out"),
    ],
)
def test_what_is_refused(adapter: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(adapter, model)
    assert message in str(caught.value)


def test_a_base_in_four_bits_is_not_compiled_and_takes_any_layout() -> None:
    with pytest.raises(ConfigError, match=r"are not compiled: set model\.compile = false"):
        resolved({"base": "nf4"}, {**PATH, "compile": True})
    resolved({}, {**PATH, "compile": True})
    resolved({"base": "nf4"}, shards=2, replicas=2)


def test_a_base_in_four_bits_is_said_and_never_compiled() -> None:
    plain, packed = resolved({}), resolved({"base": "nf4"}, stages=2)
    assert plain.digest() != packed.digest()
    assert adapter_packages(None) == ()
    assert adapter_packages(plain.adapter) == ("peft",)
    assert adapter_packages(packed.adapter) == ("peft", "bitsandbytes")
    assert compile_setting(plain.adapter, plain.model) == "auto"
    assert compile_setting(packed.adapter, packed.model) is False


def test_the_run_that_it_goes_on_from(tmp_path: Path) -> None:
    anew, handed = resolved({}), resolved({"handover": str(tmp_path)})
    assert resolved(None).handover is None
    assert resolved(None, {**PATH, "handover": True}).handover == PATH["path"]
    assert anew.handover is None
    assert handed.handover == str(tmp_path)
    assert "handover" not in anew.shared(without_defaults=True)["adapter"]
    assert handed.digest() != anew.digest()
    # Adapters that a run starts from are no earlier run.
    begun = resolved({"path": "adapters"})
    assert begun.handover is None
    assert begun.digest() != anew.digest()
    for config, stored in ((anew, None), (handed, str(tmp_path)), (begun, "adapters")):
        assert config.adapter is not None
        assert config.adapter.stored == stored
    # The tokenizer is the earlier run's.
    (tmp_path / "handover.json").write_text(json.dumps({"tokenizer": "org/other"}))
    assert resolved({"handover": str(tmp_path)}).data.tokenizer == "org/other"
