"""A run file against what a record's sites had agreed on, also by other versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, digest_of
from dilocox.errors import RecordError
from dilocox.record.log.run_file_check import agreed_run, first_difference
from tests.support.coordinator_driver import run_config

AGREED = {"outer": {"rounds": 4, "keep": 1.0}, "sites": {"paris": {"speed": 1.0}}}


def resolved(**outer: object) -> dict[str, object]:
    return {**AGREED, "outer": {**AGREED["outer"], **outer}}


def test_the_same_is_no_difference() -> None:
    assert first_difference(AGREED, AGREED, {"outer": {"rounds": 4}}) is None


@pytest.mark.parametrize("value", [5, 4.5, None, "4"])
def test_another_value_is_named(value: object) -> None:
    changed = resolved(rounds=value)
    assert first_difference(AGREED, changed, changed) == "outer.rounds"


def test_a_key_that_came_later_is_not_asked_for_unless_the_run_file_sets_it() -> None:
    later = resolved(momentum_dtype="fp32")
    assert first_difference(AGREED, later, AGREED) is None
    said = {"outer": {"momentum_dtype": "fp32"}}
    assert first_difference(AGREED, later, said) == "outer.momentum_dtype"


def test_a_key_that_this_version_does_not_have_is_named() -> None:
    assert first_difference(resolved(gone=1), AGREED, AGREED) == "outer.gone"


def test_another_site_is_named() -> None:
    other = {**AGREED, "sites": {**AGREED["sites"], "oslo": {"speed": 1.0}}}
    assert first_difference(AGREED, other, other) == "sites.oslo.speed"
    assert first_difference(other, AGREED, AGREED) == "sites.oslo.speed"


def manifest_of(config: RunConfig, *later: tuple[str, str]) -> dict[str, Any]:
    """What a version that did not know the keys `later` yet has written."""
    agreed = config.shared()
    for section, key in later:
        del agreed[section][key]
    return {"config": agreed, "config_digest": digest_of(agreed)}


def test_a_run_that_went_on_under_a_later_version_is_the_one_that_was_begun(tmp_path: Path) -> None:
    """It has rewritten its run file, with the new keys at their defaults."""
    config, path = run_config("ab"), tmp_path / "run.toml"
    manifest = manifest_of(config, ("record", "states_keep"), ("outer", "momentum_dtype"))
    path.write_text(config.to_toml())
    assert agreed_run(path, manifest).shared() == config.shared()
    path.write_text(config.to_toml().replace('momentum_dtype = "fp32"', 'momentum_dtype = "bf16"'))
    with pytest.raises(RecordError, match=r"outer\.momentum_dtype is not what the run was begun"):
        agreed_run(path, manifest)
    path.write_text(config.to_toml())
    with pytest.raises(RecordError, match="not the one with the digest"):
        agreed_run(path, {**manifest, "config_digest": "0" * 64})


def test_what_methods_set_since_then_is_not_read_into_an_older_run(tmp_path: Path) -> None:
    """Sites of `dilocox` share second moments now; a run whose file does not say so had none."""
    config, path = run_config("ab", compression={"moments": False}), tmp_path / "run.toml"
    assert run_config("ab").compression.moments
    written = config.to_toml().replace("moments = false\n", "")
    assert "moments" not in written
    path.write_text(written)
    manifest = manifest_of(config, ("compression", "moments"))
    assert not agreed_run(path, manifest).compression.moments
    path.write_text(run_config("ab").to_toml())
    with pytest.raises(RecordError, match=r"compression\.moments is not what the run was begun"):
        agreed_run(path, manifest)
