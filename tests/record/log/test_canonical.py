"""The quick way to canonical JSON gives what the slow one gives, and leaves the rest to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from dilocox.record.log.canonical import dumps, encoded, parsed

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-1e15, 1e15) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(values)
def test_it_is_the_same(value: Any) -> None:
    data = rfc8785.dumps(value)
    found, plain = parsed(data.decode())
    assert encoded(found, plain) == data


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_other_forms_of_a_value_are_not_taken_for_canonical(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    found, plain = parsed(text)
    assert (encoded(found, plain) == text.encode()) == (rfc8785.dumps(value) == text.encode())


@pytest.mark.parametrize(
    "text",
    ["1.0", "1e2", "-0", "-0.0", "0.10", "1e-05", "1E-7", "123456789012345680.0",
     "9007199254740993", "1e400", '{"b":1,"a":1}', '{"a":1,"a":1}', '"\\u0041"',
     '"\\/"', '"\\ud800"', "[1, 2]", '"\\u00e9"', "NaN", "-Infinity"],
)  # fmt: skip
def test_what_is_not_canonical(text: str) -> None:
    found, plain = parsed(text)
    try:
        same = encoded(found, plain).decode() == text
    except (ValueError, rfc8785.CanonicalizationError):
        return
    assert not same


@given(st.floats(-1e15, 1e15))
def test_floats_are_written_alike(value: float) -> None:
    text = rfc8785.dumps(value)
    assert encoded(*parsed(text.decode())) == text
    assert dumps(value) == text
    found, plain = parsed(repr(value))
    assert (encoded(found, plain) == repr(value).encode()) == (text == repr(value).encode())


@given(values)
def test_a_value_is_written_alike(value: Any) -> None:
    assert dumps(value) == rfc8785.dumps(value)
    assert dumps({"a": (value, 1)}) == rfc8785.dumps({"a": [value, 1]})


@pytest.mark.parametrize("value", [{1: 2}, [float("nan")], ["\ud800"], [2**53], {"a": {None: 1}}])
def test_what_has_no_canonical_form_is_not_written(value: Any) -> None:
    with pytest.raises((ValueError, rfc8785.CanonicalizationError)):
        rfc8785.dumps(value)
    with pytest.raises((ValueError, rfc8785.CanonicalizationError)):
        dumps(value)


def test_most_statements_go_the_quick_way() -> None:
    assert parsed('{"a":[1,"x",null,true]}')[1]
    assert parsed('{"a":0.5}')[1]
    assert not parsed('{"a":1e-7}')[1]
    assert not parsed('{"é":1}')[1]
