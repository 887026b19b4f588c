"""Signatures of a long log are checked by workers; the first bad one is named all the same."""

from __future__ import annotations

import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.record import signatures
from dilocox.record.signatures import SignatureChecks

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()
COUNT = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "BATCH", 3)
    monkeypatch.setattr(signatures, "FEW", 7)


def checked(bad: dict[int, str], workers: int, count: int = COUNT) -> tuple[int, str] | None:
    checks = SignatureChecks(workers)
    try:
        for number in range(count):
            data = f"statement {number}".encode()
            checks.add(2 * number, PUBLIC, bad.get(number, KEY.sign(data).hex()), data)
        found = checks.bad()
        assert bad or bool(checks._processes) == (workers > 0)
        return found
    finally:
        checks.close()
        assert all(process.returncode == 0 for process in checks._processes)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_are_right(workers: int) -> None:
    assert checked({}, workers) is None


def test_a_few_need_no_worker() -> None:
    assert checked({2: ""}, 2, count=5) == (4, PUBLIC)


@pytest.mark.parametrize("first", [0, 11, 39])
def test_the_first_bad_one_is_named(first: int) -> None:
    other = KEY.sign(b"another").hex()
    assert checked({39: "", first: other}, 2) == (2 * first, PUBLIC)
    assert checked({39: "00", first: "no hex"}, 2) == (2 * first, PUBLIC)


def test_it_is_checked_where_no_worker_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/not/there")
    checks = SignatureChecks(1)
    for number in range(20):
        data = str(number).encode()
        checks.add(number, PUBLIC, KEY.sign(data).hex() if number != 13 else "00" * 64, data)
    assert checks.bad() == (13, PUBLIC)
    checks.close()


def test_a_worker_that_dies_is_made_up_for() -> None:
    checks = SignatureChecks(1)
    for number in range(20):
        data = str(number).encode()
        checks.add(number, PUBLIC, KEY.sign(data).hex() if number != 17 else "00" * 64, data)
        if number == 12:
            checks._pending[-1][1].result()
            checks._processes[0].kill()
            checks._processes[0].wait()
    assert checks.bad() == (17, PUBLIC)
    checks.close()
