from __future__ import annotations

from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, load_run, resolve_run
from dilocox.errors import ConfigError


def run(**data: Any) -> RunConfig:
    model = {"architecture": {"model_type": "qwen3"}}
    return resolve_run({"model": model, "sites": {"a": {}}, "data": data})


def two(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> Any:
    return [
        {"name": "a", "source": "a/"} | (first or {}),
        {"name": "b", "source": "b/"} | (second or {}),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": []}, "data.sources is empty: add a table [[data.sources]]"),
        ({"sources": two(), "source": "c/"}, "data.source and sources are both set: leave one"),
        ({"sources": two({"name": "b"})}, 'data.sources has 2 tables named "b": give each'),
        (
            {"sources": two({"weight": 0})},
            "data.sources (table 1).weight: got 0, expected a number",
        ),
        (
            {"sources": two({"weight": 1}, {"weight": -2.5})},
            "data.sources (table 2).weight: got -2.5, expected a number above 0",
        ),
        (
            {"sources": two({"weight": float("nan")})},
            "data.sources (table 1).weight: got nan, expected a finite number",
        ),
        (
            {"sources": two({"weight": 0.7}, {"weight": 0.2})},
            "data.sources have the weights 0.7 + 0.2, which sum to 0.9: shares below 1 must sum",
        ),
        ({"sources": two({"weight": 2})}, 'data.sources "b" has no weight, others have one: give'),
        (
            {"sources": two({"epochs": 1}, {"epochs": 2.5})},
            "data.sources all have epochs, so the text would end before the run: leave epochs",
        ),
        ({"sources": two({"split": "test"})}, 'data.sources "a" sets split, which hub datasets'),
        ({"sources": two({"wieght": 1})}, "data.sources (table 1).wieght: no such key; did you"),
        (
            {"sources": two({"validation_fraction": 0.1, "validation_source": "c/"})},
            'data.sources "a" sets validation_source and validation_fraction: leave one out',
        ),
        (
            {"sources": two({"validation_fraction": 0.1}), "validation_source": "c/"},
            'data.sources "a" sets validation_fraction, and data.validation_source is set for all',
        ),
        (
            {"sources": two({"validation_fraction": 0}, {"validation_fraction": 0})},
            "data.sources all have validation_fraction 0, so no text is held out: raise it at one",
        ),
        (
            {"sources": two({"filter": {"a": 1}, "format": "code"})},
            'data.sources "a" sets filter, which needs records with fields, and format "code"',
        ),
        (
            {"sources": two({"validation_filter": {"a": 1}})},
            'data.sources "a" sets validation_filter without validation_source: set it, or leave',
        ),
        (
            {"sources": two({"filter": {"a": []}})},
            "data.sources (table 1).filter: a is an empty list, so no record would be taken",
        ),
        (
            {"sources": two({"format": "text"}), "format": "instruction"},
            'data.sources "a" sets format "text" beside data.format "instruction": text and',
        ),
        (
            {"sources": two({"format": "chat"})},
            'data.sources (table 1).format: "chat" is a format of all sources or of none: set data',
        ),
    ],
)
def test_bad_tables_are_refused_in_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(**data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "weights", [(3, 1), (0.75, 0.25), (0.6667, 0.3333), (1.5, 0.5), (None, None)]
)
def test_ratios_and_shares_are_taken(weights: tuple[float | None, float | None]) -> None:
    given = [{} if each is None else {"weight": each} for each in weights]
    tables = run(sources=two(*given)).data.sources
    assert tables is not None
    assert [each.weight for each in tables] == list(weights)


def test_a_source_takes_its_own_keys_and_those_of_data_else() -> None:
    data = run(text_field="body", sources=two({"text_field": "title", "epochs": 2})).data
    assert data.sources is not None
    first, second = (data.of_source(each) for each in data.sources)
    assert (first.source, first.text_field) == ("a/", "title")
    assert (second.source, second.text_field) == ("b/", "body")


def test_tables_change_the_digest_and_come_back_from_the_written_run_file(tmp_path: Any) -> None:
    config = run(sources=two({"weight": 3}, {"weight": 1, "epochs": 2}))
    other = run(sources=two({"weight": 4}, {"weight": 1, "epochs": 2}))
    assert config.digest() != other.digest()
    assert "sources" not in run(source="a/").to_toml()
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml())
    assert load_run(path) == config
