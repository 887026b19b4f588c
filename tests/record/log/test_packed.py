"""Packed mappings read and change as dicts do."""

from __future__ import annotations

import gc
import hashlib
import pickle
import tracemalloc
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.record.log import packed
from dilocox.record.log.packed import Commitments, Contributions, Digests, Said
from dilocox.record.log.step_statements import Commitment

keys = st.sampled_from(["outer/0/0/0", "outer/0/0/1", "outer/1/0/0"])
places = st.tuples(st.sampled_from("ab"), st.integers(0, 1))
digests = st.one_of(
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.sampled_from(["", "0", "F" * 64, "0" * 62, "0 " * 32, "no digest"]),
)
contributions = st.lists(
    st.tuples(st.tuples(keys, st.integers(1, 2), places), digests | st.none()), max_size=20
)
commitments = st.lists(
    st.tuples(
        st.tuples(keys, places),
        st.builds(Commitment, digests, digests | st.none(), st.integers(0, 2**40)) | st.none(),
    ),
    max_size=20,
)


@pytest.fixture(autouse=True)
def few_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most exchanges are closed."""
    monkeypatch.setattr(packed, "OPEN", 1)


def check(found: MutableMapping[Any, Any], changes: list[tuple[Any, Any]]) -> dict[Any, Any]:
    plain: dict[Any, Any] = {}
    for key, value in changes:
        if value is None:
            plain.pop(key, None)
            found.pop(key, None)
        else:
            plain[key] = found[key] = value
        assert (found.get(key), key in found) == (plain.get(key), key in plain)
    assert len(found._open) <= 1  # type: ignore[attr-defined]
    assert found == plain
    assert len(found) == len(plain)
    assert pickle.loads(pickle.dumps(found)) == plain
    return plain


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contributions, st.sets(keys))
def test_contributions(changes: list[tuple[Any, str | None]], kept: set[str]) -> None:
    found = Contributions()
    plain = check(found, [((key, n, *place), value) for (key, n, place), value in changes])
    found.keep(kept)
    assert found == {key: value for key, value in plain.items() if key[0] in kept}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commitments)
def test_commitments(changes: list[tuple[Any, Commitment | None]]) -> None:
    check(Commitments(), [((key, *place), value) for (key, place), value in changes])


def test_a_statement() -> None:
    said = {"round": 1, "set": ["a", "b"], "rate": 0.8, "deep": {"a": [[1, 2]]}, "none": None}
    found = Said(said)
    assert found == said
    assert dict(found) == {**found} == said
    assert (found["set"], found.get("other"), "rate" in found) == (["a", "b"], None, True)


def test_digests() -> None:
    found = {f"{site}/0": str(number) * 64 for number, site in enumerate("abc")}
    small = Digests(found)
    assert small == found
    assert list(small) == list(found)
    assert pickle.loads(pickle.dumps(small)) == found
    assert Digests({}) == {}


def test_a_long_run_takes_little_more_than_its_digests() -> None:
    tracemalloc.start()
    try:
        found, said = Contributions(), Commitments()
        for number in range(200):
            for place in range(64):
                digest = hashlib.sha256(f"{number}/{place}".encode()).hexdigest()
                where = f"outer/{number}/0/0", f"site{place % 8}", place // 8
                found[where[0], 1, where[1], where[2]] = digest
                said[where] = Commitment(digest, digest, number)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 1.3 * 200 * 64 * (32 + 72)
    assert len(found) == len(said) == 200 * 64
    assert found["outer/3/0/0", 1, "site2", 5] == hashlib.sha256(b"3/42").hexdigest()
