"""Custody statements and certificates."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config.availability import PieceCode
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.custody import Certificates, Custody, Held, begins_with, content_of
from dilocox.record.pieces.layout import MOST_OBJECTS

RUN, ONE, TWO, THREE = "f" * 64, "1" * 64, "2" * 64, "3" * 64
CODE = PieceCode(2, ("a", "b", "c"))
KEY = ExchangeKey.outer(3, 1, 0).text
OTHER = ExchangeKey.outer(2, 1, 1).text


def custody(site: str = "a", root: str = TWO, **changes: Any) -> Custody:
    said: dict[str, Any] = {
        "site": site, "stage": 1, "shard": 0, "round": 3, "needed": 2, "pieces": 3,
        "index": "abc".index(site), "held": (Held(KEY, ONE, root, THREE, 500),), **changes,
    }  # fmt: skip
    return Custody(**said)


def test_a_statement_reads_back_with_all_its_cuts() -> None:
    own = custody(held=(Held(KEY, ONE, TWO, THREE, 500), Held(OTHER, TWO, ONE, THREE, 7)))
    signer = s.Signer.from_hex("aa" * 32)
    text = signer.sign(own.statement(RUN))
    found = s.open_signed(text, signer.public, run=RUN, kinds=(s.CUSTODY,))
    assert Custody.of(found) == own


def test_older_versions_ignore_the_type() -> None:
    """They take a type with their own prefix for tampering, and leave others out."""
    assert b"urn:dilocox:record" not in custody().statement(RUN).to_bytes()


@pytest.mark.parametrize(("name", "value"), [
    ("round", 2), ("round", -1), ("round", "3"), ("stage", 0), ("index", True), ("needed", None),
    ("held", {}), ("held", {KEY: [ONE, THREE]}), ("held", {KEY: [ONE, "x", 1]}),
    ("held", {KEY: [ONE, THREE, -1]}), ("held", {KEY: [ONE, THREE, 1], OTHER: [ONE, THREE, 1]}),
    ("held", []),
])  # fmt: skip
def test_a_malformed_statement_is_named_so(name: str, value: object) -> None:
    whole = custody().statement(RUN)
    with pytest.raises(RecordError, match=r"custody.* is malformed"):
        Custody.of(dataclasses.replace(whole, predicate={**whole.predicate, name: value}))


@pytest.mark.parametrize("key", ["final", "outer/3/1", "outer/x/1/0", "entry/3/1/0"])
def test_a_statement_is_about_outer_steps(key: str) -> None:
    held = (Held(key, ONE, TWO, THREE, 500),)
    with pytest.raises(RecordError, match="is malformed"):
        Custody.of(custody(held=held).statement(RUN))


def test_a_statement_of_another_code_or_piece_is_not_of_this_run() -> None:
    assert custody().problem(CODE) is None
    assert custody(needed=1).problem(CODE) == "1 of 3 pieces, not 2 of 3"
    assert custody(pieces=4).problem(CODE) == "2 of 4 pieces, not 2 of 3"
    assert custody(index=1).problem(CODE) == "piece 1 is not that of a"
    assert custody(index=3).problem(CODE) == "piece 3 is not that of a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((ONE, TWO))), max_size=8))
def test_two_thirds_with_one_root_make_a_certificate(said: list[tuple[str, str]]) -> None:
    known = Certificates()
    for site, root in said:
        known.add(custody(site, root))
    expected = [
        root for root in (ONE, TWO) if len({site for site, own in said if own == root}) >= 2
    ]
    found = known.certified(KEY, 0, CODE.quorum)
    assert (found in expected) if expected else found is None
    assert known.certified(KEY, 1, CODE.quorum) is None
    assert known.certified(KEY, 0, CODE.quorum, content=TWO) is None  # of other payloads


def test_the_coordinator_forgets_old_rounds() -> None:
    known = Certificates()
    known.add(custody())
    known.forget(3)
    assert known.signed
    known.forget(4)
    assert not known.signed
    assert not known.sizes


def test_the_content_names_the_payloads_in_order() -> None:
    assert content_of([ONE, TWO]) != content_of([TWO, ONE])


def test_the_payloads_that_count_are_the_first_ones() -> None:
    named = [ONE, TWO, THREE]
    for count in (1, 2, 3):
        assert begins_with(named, content_of(named[:count]))
    for wrong in ([], [TWO], [TWO, ONE], [*named, ONE]):
        assert not begins_with(named, content_of(wrong))
    assert not begins_with([], content_of([]))


def test_very_many_payloads_take_no_more_time_than_their_number() -> None:
    """Each number of them hashed anew would take minutes."""
    began = time.monotonic()
    assert not begins_with([ONE] * MOST_OBJECTS, TWO)
    assert time.monotonic() - began < 10.0
