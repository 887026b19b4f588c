"""Section `[settlement]`: what it refuses, and what it leaves as it was."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.config.run_config import digest_of
from dilocox.config.settlement import names_place, place_problem
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


def test_the_place_on_a_chain_is_agreed_and_changes_no_run_without_it() -> None:
    plain = run_config(settlement={"price": 1})
    assert plain.digest() == digest_of_before()
    place = {"chain": 7, "contract": ACCOUNT, "owner": "0x" + "cd" * 20}
    assert run_config(settlement={"price": 1, **place}).digest() != plain.digest()
    terms = run_config(settlement={"price": 1, **place}).shared()["settlement"]
    assert names_place(terms)
    assert not names_place(plain.shared()["settlement"])
    assert place_problem(terms, 7, ACCOUNT.upper().replace("X", "x"), "0x" + "CD" * 20) is None
    for name, other in (("chain", 8), ("contract", "0x" + "00" * 20), ("owner", ACCOUNT)):
        problem = place_problem(terms, **{**place, name: other})
        assert problem is not None
        assert f"names the {name} " in problem
    assert place_problem(plain.shared()["settlement"], 8, ACCOUNT, ACCOUNT) is None


def digest_of_before() -> str:
    """The digest that `run_config(settlement={"price": 1})` had before places could be named."""
    keys = run_config().shared(without_defaults=True)
    return digest_of({**keys, "settlement": {"price": 1}})


@pytest.mark.parametrize(
    ("section", "others", "match"),
    [
        ({"accounts": {"z": ACCOUNT}}, {}, "'z', which is not one of the sites: a, b, c"),
        ({}, {"record": {"enabled": False}}, "set record.enabled"),
        ({}, {"outer": {"method": "allreduce"}}, "exchanges gradients"),
        ({"price": 0}, {}, "price"),
        ({"accounts": {"a": "0x12"}}, {}, "settlement.accounts"),
        ({"auditors": ["me"]}, {}, "settlement.auditors"),
        ({"chain": 1, "owner": ACCOUNT}, {}, "give all three, or none"),
        ({"contract": ACCOUNT}, {}, "give all three, or none"),
    ],
)
def test_what_cannot_be_settled_is_refused(
    section: dict[str, Any], others: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        run_config(settlement={"price": 1, **section}, **others)
