"""`[availability]`: defaults, what sites agree on, and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.config.availability import PieceCode
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError


def run(count: int = 4, **sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"architecture": {"model_type": "qwen3"}},
        "outer": {"rounds": 4},
        "sites": {f"s{number}": {} for number in range(count)},
    }
    return resolve_run({**raw, **sections})


@pytest.mark.parametrize(("sites", "needed", "quorum"), [(3, 2, 2), (4, 2, 3), (5, 2, 4),
                                                         (12, 6, 8), (64, 32, 43)])  # fmt: skip
def test_half_of_the_sites_are_needed_by_default(sites: int, needed: int, quorum: int) -> None:
    config = run(sites, availability={})
    assert config.availability is not None
    code = config.availability.code(config.sites)
    assert (code.needed, code.pieces, code.quorum) == (needed, sites, quorum)


def test_a_run_without_it_is_as_before() -> None:
    """So its manifest, its digest and its log stay what they were."""
    assert "availability" not in run().shared()
    assert PieceCode.of_run(run().shared()) is None


def test_sites_agree_on_the_code_and_not_on_what_each_keeps() -> None:
    own = run(availability={"needed": 3})
    assert own.shared()["availability"] == {"needed": 3}
    assert PieceCode.of_run(own.shared()) == PieceCode(3, ("s0", "s1", "s2", "s3"))
    assert own.digest() == run(availability={"needed": 3, "keep_whole": False}).digest()
    assert own.digest() != run(availability={}).digest() != run().digest()
    # What is said and what is the default are the same run.
    assert run(availability={"needed": 2}).digest() == run(availability={}).digest()


def test_the_resolved_run_file_is_read_back() -> None:
    import tomllib

    config = run(availability={"needed": 3})
    assert resolve_run(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(("sections", "why"), [
    ({"sites": {"a": {}, "b": {}}, "availability": {}}, "over at least 3 sites, this run has 2"),
    ({"availability": {"needed": 4}}, "above two thirds of the 4 sites.*give at most 3"),
    ({"availability": {}, "record": {"enabled": False}}, "set record.enabled"),
    ({"availability": {}, "outer": {"rounds": 4, "exchange": "reduce"}}, 'set it to "gather"'),
    ({"availability": {"keep_whole": False}, "record": {"keep": 10}}, 'set record.keep to "all"'),
    ({"availability": {"needed": 1}}, "needed"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_a_mend(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(**sections)
