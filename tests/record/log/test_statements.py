"""Signed statements: DSSE, canonical JSON, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope

from dilocox.errors import RecordError
from dilocox.record.log import statements as s

ONE = s.Signer.from_hex("01" * 32)
TWO = s.Signer.from_hex("02" * 32)
SAID = s.Statement(s.CONTRIBUTION, {"payload": "ab" * 32}, {"run": "r", "round": 3, "gamma": 0.8})


def test_the_pre_authentication_encoding_of_the_specification() -> None:
    """DSSE's own example (protocol.md): what is signed, byte for byte."""
    envelope = Envelope(b"hello world", "http://example.com/HelloWorld", {})
    assert envelope.pae() == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_a_statement_is_in_toto_in_dsse_with_ed25519() -> None:
    found = json.loads(ONE.sign(SAID))
    payload = base64.b64decode(found["payload"])
    body = json.loads(payload)
    assert found["payloadType"] == "application/vnd.in-toto+json"
    assert body["_type"] == "https://in-toto.io/Statement/v1"
    assert body["subject"] == [{"name": "payload", "digest": {"sha256": "ab" * 32}}]
    assert body["predicateType"] == "urn:dilocox:record:contribution:v1"
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
    signature = base64.b64decode(found["signatures"][0]["sig"])
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(ONE.public)).verify(signature, signed)


def test_it_comes_back() -> None:
    line = ONE.sign(SAID)
    assert "\n" not in line
    assert s.open_signed(line, ONE.public, run="r", kinds=(s.CONTRIBUTION,)) == SAID


def changed(**parts: Any) -> str:
    return json.dumps({**json.loads(ONE.sign(SAID)), **parts}, sort_keys=True,
                      separators=(",", ":"))  # fmt: skip


@pytest.mark.parametrize(
    ("line", "public", "run", "kinds", "reason"),
    [
        (ONE.sign(SAID), TWO.public, "r", (s.CONTRIBUTION,), "not one of key"),
        (ONE.sign(SAID), "", "r", (s.CONTRIBUTION,), "not one of key"),
        (ONE.sign(SAID), ONE.public, "other", (s.CONTRIBUTION,), "of run 'r'"),
        (ONE.sign(SAID), ONE.public, "r", (s.STEP,), "expected outer-step"),
        (changed(payload=base64.b64encode(
            SAID.to_bytes().replace(b"0.8", b"0.9")).decode()), ONE.public, "r",
         (s.CONTRIBUTION,), "not one of key"),
        (changed(payloadType="text"), ONE.public, "r", (s.CONTRIBUTION,), "another form"),
        (changed(signatures=[]), ONE.public, "r", (s.CONTRIBUTION,), "another form"),
        (changed(more=1), ONE.public, "r", (s.CONTRIBUTION,), "another form"),
        ("{}", ONE.public, "r", (s.CONTRIBUTION,), "not a DSSE envelope"),
        ("nothing", ONE.public, "r", (s.CONTRIBUTION,), "not a DSSE envelope"),
    ],
)  # fmt: skip
def test_what_is_refused(line: str, public: str, run: str, kinds: tuple[str], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        s.open_signed(line, public, run=run, kinds=kinds)


def test_other_forms_of_the_same_statement_are_refused() -> None:
    """One statement, one text: nothing can be added twice under another spelling."""
    spaced = json.dumps(json.loads(SAID.to_bytes())).encode()
    with pytest.raises(RecordError, match="not in canonical form"):
        s.Statement.from_bytes(spaced)


def test_statements_of_later_versions_can_be_read() -> None:
    later = s.Statement("https://example.org/attestation/v1", {}, {"run": "r"})
    assert not later.known
    assert s.opened(ONE.sign(later))[0] == later


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e15, 1e15), max_size=5))
def test_numbers_come_back_to_the_bit(numbers: list[float]) -> None:
    statement = s.Statement(s.STEP, {}, {"run": "r", "weights": numbers})
    back = s.Statement.from_bytes(statement.to_bytes()).predicate["weights"]
    assert [float(value) for value in back] == numbers


def test_a_key_of_its_own_each() -> None:
    assert s.Signer(Ed25519PrivateKey.generate()).public != ONE.public


def taken(line: str) -> Any:
    """What becomes of a line, an error included."""
    try:
        statement, envelope = s.opened(line)
    except RecordError as error:
        return str(error)
    return statement, envelope.to_dict(), envelope.pae()


@settings(max_examples=300)
@given(st.data())
def test_a_line_of_the_usual_form_is_read_as_any_other(data: st.DataObject) -> None:
    line = list(ONE.sign(SAID))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(line) - 1))
        new = data.draw(st.sampled_from([*'AB=+/-_9z"\\{},\n', "", "==", "{}", "\u00e9"]))
        line[place] = new
    text = "".join(line)
    quickly = taken(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s, "_usual", lambda line: None)
        assert taken(text) == quickly


def test_bits_behind_the_last_byte_of_base64_are_none() -> None:
    found = json.loads(ONE.sign(SAID))
    sig = found["signatures"][0]["sig"]
    assert sig.endswith("==")
    other = {**found, "signatures": [{**found["signatures"][0], "sig": f"{sig[:-3]}B=="}]}
    line = json.dumps(other, sort_keys=True, separators=(",", ":"))
    assert taken(line) == "not a signed statement: its envelope has another form"
