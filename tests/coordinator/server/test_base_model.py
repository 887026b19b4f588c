"""Sites that train adapters must have the same base model, also when the run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import VERSIONS, Driver, replayed, run_config

pytestmark = pytest.mark.waits


def adapters() -> RunConfig:
    raw = run_config("ab").model_dump(mode="json", exclude_none=True)
    return resolve_run({**raw, "model": {"path": "org/base"}, "adapter": {}})


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path, adapters())
    driver.enrol("a", base_digest="1" * 64)
    with pytest.raises(Refused) as refused:
        driver.enrol("b", base_digest="2" * 64)
    assert refused.value.kind == "join"
    for part in ("site b: its base model org/base", "2" * 12 + "…", "1" * 12 + "…"):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    assert driver.core.state.live == ["a"]
    driver.enrol("b", base_digest="1" * 64)
    assert replayed(driver).base_digest == "1" * 64
    driver.core.close()


@pytest.mark.parametrize("trains", [True, False])
def test_a_digest_is_needed_with_adapters_and_refused_without(tmp_path: Path, trains: bool) -> None:
    driver = Driver(tmp_path, adapters() if trains else run_config("ab"))
    digest = None if trains else "1" * 64
    with pytest.raises(Refused, match="use the same run file everywhere"):
        driver.enrol("a", base_digest=digest)
    driver.core.close()


@pytest.mark.parametrize("theirs", ["0.21.1", ""])
def test_another_peft_is_refused(tmp_path: Path, theirs: str) -> None:
    driver = Driver(tmp_path, adapters())
    versions = [VERSIONS.model_copy(update={"peft": peft}) for peft in ("0.21.2", theirs)]
    driver.enrol("a", base_digest="1" * 64, versions=versions[0])
    with pytest.raises(Refused, match=rf"peft {theirs or 'missing'}, but this run has 0\.21\.2"):
        driver.enrol("b", base_digest="1" * 64, versions=versions[1])
    driver.enrol("b", base_digest="1" * 64, versions=versions[0])
    assert replayed(driver).versions == {**VERSIONS.named(), "peft": "0.21.2"}
    driver.core.close()


def test_a_run_without_adapters_names_no_peft() -> None:
    assert set(VERSIONS.named()) == {"dilocox", "torch", "python", "defaults"}


def test_sites_with_a_model_of_their_own_have_the_same(tmp_path: Path) -> None:
    raw = run_config("abc").model_dump(mode="json", exclude_none=True)
    driver = Driver(tmp_path, resolve_run({**raw, "model": {"own": True}}))
    with pytest.raises(Refused, match=r"take part with dilocox\.site, not with dilocox join"):
        driver.enrol("a")
    driver.enrol("a", base_digest="1" * 64)
    with pytest.raises(Refused, match="site b: its model trains other tensors than the model of"):
        driver.enrol("b", base_digest="2" * 64)
    driver.enrol("c", base_digest="1" * 64)
    assert replayed(driver).base_digest == "1" * 64
    driver.core.close()
