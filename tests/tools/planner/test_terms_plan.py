"""What the planner says of a run's terms, against the planner's own figures."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
from tests.config.test_terms import raw_run
from tests.support.planned_runs import ARCHITECTURE, TABLE
from transformers import LlamaConfig

from dilocox.config.run_config import resolve_run
from dilocox.config.terms import TermsFile, read_terms
from dilocox.errors import ConfigError
from dilocox.tools.planner.core_plan import Cluster
from dilocox.tools.planner.terms_plan import SitePlan, as_json, as_text, plan_site, write_terms

FABRIC = TABLE.fabric(None)


@functools.cache
def file() -> TermsFile:
    raw = raw_run()
    raw["control"] = {"adapt": "off"}
    terms = write_terms(resolve_run(raw), "l40s:2", "100mbit", FABRIC, 2 * 10**9, 60)
    return TermsFile(terms, "0" * 64)


def planned(gpu: str = "l40s:2", link: str = "100mbit", memory: int | None = None) -> SitePlan:
    place = TABLE.place(gpu, host_memory=memory)
    return plan_site(file(), place, TABLE.link(link), FABRIC, TABLE)


def test_the_terms_have_the_figures_of_the_planner() -> None:
    terms = file().terms
    config = terms.planned()
    places, links = [TABLE.place("l40s:2")] * 2, [TABLE.link("100mbit")] * 2
    core = Cluster(places, links, FABRIC).plan(config)
    assert terms.need.gpu == "l40s:2x1"
    assert terms.need.gpu_memory == core.needed
    assert core.host is not None
    assert terms.need.host_memory == core.host.needed
    assert terms.need.tokens_per_second == round(core.prediction.tokens_per_second, 1)
    assert 0 < terms.need.upload < 100e6 / 8
    assert terms.need.upload == pytest.approx(
        core.prediction.payload_bytes / core.prediction.round_seconds, abs=0.1
    )


def test_an_owner_of_the_same_gpus_has_an_equal_share_of_tokens_and_pay() -> None:
    plan, need = planned(), file().terms.need
    assert plan.share == 1 / 2
    assert plan.tokens_per_second == pytest.approx(need.tokens_per_second / 2, abs=0.1)
    assert plan.upload == pytest.approx(need.upload, abs=0.1)
    assert plan.needed == need.gpu_memory
    assert (plan.fits, plan.slow_link) == (True, False)
    # 2,000 gwei for a million tokens; the pay of all sites is that of all tokens.
    offer = file().terms.offer
    assert 2 * plan.coins == pytest.approx(offer.tokens / 1e6 * 2000e-9)
    assert plan.coins_per_hour == pytest.approx(plan.tokens_per_second * 3600 * 2e-12)
    assert plan.coins_per_hour * plan.seconds / 3600 == pytest.approx(plan.coins)


def test_a_fast_owner_is_promised_no_tokens_that_slower_sites_never_train() -> None:
    """The run file counts the steps of the faster site; the other site takes fewer."""
    raw = raw_run()
    raw["control"] = {"adapt": "off", "steps": "by-speed"}
    # Exchanges are short beside steps, so that the speed of the GPUs decides.
    large = {"hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 512}
    raw["model"]["architecture"] |= large
    raw["data"]["sequence_length"] = 512
    terms = write_terms(resolve_run(raw), "rtx3090:2", "999gbit", FABRIC, 1, 60)
    place, fast = TABLE.place("h100-80g:2"), TABLE.link("999gbit", rtt=0.0)
    plan = plan_site(TermsFile(terms, "0" * 64), place, fast, FABRIC, TABLE)
    course = plan.core.prediction.course
    assert course.steps_of(plan.own) > 1.2 * course.steps_of(0)
    trained = 400 * 8 * 512  # steps, sequences and tokens of the faster site
    assert plan.coins == pytest.approx(trained / 1e6 * 2000e-9, rel=0.01)
    every = plan.core.prediction.tokens_per_second * plan.seconds
    assert every == pytest.approx(trained / plan.share, rel=0.01)
    assert every < 0.95 * terms.offer.tokens


def test_faster_gpus_and_a_slower_link_change_the_owners_site_alone() -> None:
    usual, fast = planned(), planned("h100-80g:2x1", "50mbit")
    assert fast.slow_link
    assert "SLOWER than 100mbit" in as_text(fast)
    assert fast.place.device.name == "h100-80g"
    assert [place.device.name for place in (usual.place, fast.core.fullest)] == ["l40s"] * 2
    assert fast.host is not None
    assert not planned(memory=1).fits
    assert "host memory DOES NOT FIT" in as_text(planned(memory=1))


def test_too_few_gpus_and_gpus_that_others_do_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 GPU, and each site of this run needs 2"):
        planned("l40s:1")
    config = resolve_run(raw_run())
    with pytest.raises(ConfigError, match='no GPU "local"'):
        write_terms(config, "local", "100mbit", FABRIC, 1, 60)
    raw = raw_run()
    large = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 40}
    raw["model"]["architecture"] |= large
    with pytest.raises(ConfigError, match=r"--gpu rtx3090:2: does not fit, \d+\.\d GiB of 21\.4"):
        write_terms(resolve_run(raw), "rtx3090:2", "100mbit", FABRIC, 1, 60)


def test_terms_of_a_folder_s_model_are_planned_where_there_is_no_such_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    LlamaConfig(**ARCHITECTURE, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
                ).save_pretrained(folder)  # fmt: skip
    raw = raw_run()
    raw["control"] = {"adapt": "off"}
    raw["model"] = {"path": str(folder), "pretrained": False, "activation_checkpointing": True}
    terms = write_terms(resolve_run(raw), "l40s:2", "100mbit", FABRIC, 1, 60)
    shutil.rmtree(folder)
    text = terms.to_toml()
    path = tmp_path / "terms.toml"
    path.write_text(text)
    read = read_terms(str(path))
    assert read.terms == terms
    assert terms.planned().model.activation_checkpointing is True
    plan = plan_site(read, TABLE.place("l40s:2"), TABLE.link("100mbit"), FABRIC, TABLE)
    assert plan.needed == terms.need.gpu_memory
    assert plan.core.outline.hf_config.rope_parameters["rope_theta"] == 1e5


def test_the_page_and_the_data_say_the_same() -> None:
    plan = planned()
    text, data = as_text(plan), as_json(plan)
    assert "fits: " in text
    assert "share: 50.0% of the tokens" in text
    assert f"pay: {data['coins_per_hour']:.9f} coins an hour, {data['coins']:.9f} for all" in text
    assert "stake: 2 coins, bound until 120 s after you leave" in text
    assert "host memory: " in text
    assert data["fits"] is True
    assert data["gpu_memory"]["needed"] == plan.needed
    assert data["deposit"] == {"stake": 2 * 10**9, "window": 60}
