"""A run file against what a record's sites had agreed on, also by other versions."""

from __future__ import annotations

import pytest

from dilocox.config import digest_of
from dilocox.record.agreed import first_difference
from tests.outer.coordinator.helpers import run_config

AGREED = {"outer": {"rounds": 4, "keep": 1.0}, "sites": {"paris": {"speed": 1.0}}}


def resolved(**outer: object) -> dict[str, object]:
    return {**AGREED, "outer": {**AGREED["outer"], **outer}}


def test_the_same_is_no_difference() -> None:
    assert first_difference(AGREED, AGREED, {"outer": {"rounds": 4}}) is None


@pytest.mark.parametrize("value", [5, 4.5, None, "4"])
def test_another_value_is_named(value: object) -> None:
    changed = resolved(rounds=value)
    assert first_difference(AGREED, changed, changed) == "outer.rounds"


def test_a_key_that_came_later_is_not_asked_for_unless_the_run_file_has_it() -> None:
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


def test_a_config_is_what_it_digests() -> None:
    config = run_config("ab")
    assert digest_of(config.shared()) != digest_of(run_config("abc").shared())
    assert first_difference(config.shared(), config.shared(), {}) is None
