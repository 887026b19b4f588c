"""What an exchange keeps of its payloads until its landing."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch

from dilocox.compression import compressor
from dilocox.compression.second_moments import carried
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.exchanger import without_payloads
from dilocox.outer.layout import Layout

GEOMETRY = Layout.of({"x": (8, 16)}).geometry


def given(moments: bool) -> Contribution:
    codec = compressor("int4+moments" if moments else "int4", GEOMETRY)
    return Contribution(ExchangeKey.outer(0, 0, 0), 128, None, codec, "gather", {"paris": 1.0})


def outcome() -> Outcome:
    payload = torch.zeros(64, dtype=torch.uint8)
    return Outcome(torch.ones(128), ("paris",), None, None, 7, 0.5, 2, payloads=(payload,))


def answered(future: Future[Outcome], _: Contribution) -> Future[Outcome]:
    return future


@pytest.mark.parametrize("ended", [False, True])
def test_payloads_are_free_before_the_landing(ended: bool) -> None:
    future: Future[Outcome] = Future()
    found = outcome()
    payload = weakref.ref(found.payloads[0])
    if ended:
        future.set_result(found)
    landing = without_payloads(partial(answered, future))(given(moments=False))
    if not ended:
        assert not landing.done()
        future.set_result(found)
    average = found.average
    del future, found
    assert payload() is None
    left = landing.result(0.0)
    assert left.average is average
    assert (left.contributors, left.payload_bytes, left.attempts) == (("paris",), 7, 2)
    assert left.payloads == ()


def test_a_landing_has_the_moments_of_payloads_that_are_free() -> None:
    future: Future[Outcome] = Future()
    brought = given(moments=True)
    landing = without_payloads(partial(answered, future))(brought)
    size = brought.compressor.part(0, 128, 0).payload_bytes
    payload = torch.arange(size, dtype=torch.uint8)
    found = replace(outcome(), payloads=(payload,))
    moments = carried(payload, GEOMETRY).clone()
    assert 0 < moments.numel() < payload.numel()
    free = weakref.ref(payload.untyped_storage())
    future.set_result(found)
    del future, found, payload
    assert free() is None
    (left,) = landing.result(0.0).payloads
    assert torch.equal(carried(left, GEOMETRY), moments)


def test_an_exchange_that_fails_has_no_landing() -> None:
    future: Future[Outcome] = Future()
    landing = without_payloads(lambda _: future)(given(moments=False))
    error = RuntimeError("broken")
    future.set_exception(error)
    assert landing.exception(0.0) is error
