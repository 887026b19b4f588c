"""Section `[settlement]`: what it refuses, and what it leaves as it was."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.errors import ConfigError
from tests.support.coordinator_driver import run_config

ACCOUNT = "0x" + "ab" * 20


def test_a_run_without_it_has_the_digest_that_it_had() -> None:
    config = run_config()
    assert config.settlement is None
    assert "settlement" not in config.shared()
    assert run_config(settlement={"price": 1}).digest() != config.digest()


def test_all_of_it_is_agreed() -> None:
    plain = run_config(settlement={"price": 1})
    for other in ({"price": 2}, {"price": 1, "accounts": {"a": ACCOUNT}}):
        assert run_config(settlement=other).digest() != plain.digest()
    assert run_config(settlement={"price": 1}).shared()["settlement"] == {
        "price": 1, "accounts": {}, "auditors": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "others", "match"),
    [
        ({"accounts": {"z": ACCOUNT}}, {}, "'z', which is not one of the sites: a, b, c"),
        ({}, {"record": {"enabled": False}}, "set record.enabled"),
        ({}, {"outer": {"method": "allreduce"}}, "exchanges gradients"),
        ({"price": 0}, {}, "price"),
        ({"accounts": {"a": "0x12"}}, {}, "settlement.accounts"),
        ({"auditors": ["me"]}, {}, "settlement.auditors"),
    ],
)
def test_what_cannot_be_settled_is_refused(
    section: dict[str, Any], others: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        run_config(settlement={"price": 1, **section}, **others)
