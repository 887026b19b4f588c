"""Signed notes and checkpoints against published ones."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.signed_note import (
    LogCheckpoint,
    NoteKey,
    WitnessKey,
    cosign,
    cosigned_at,
    open_note,
    sign_note,
)

# The example of the Go documentation of golang.org/x/mod/sumdb/note.
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_KEY = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
TEXT = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
)
NOTE = (
    f"{TEXT}\n— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqd"
    "ngotpRZb6KE6RyyBwJnAM=\n"
)
# The key of Go's checksum database, a public log.
SUM = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"


def peter() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(PETER_KEY)


def test_the_published_note() -> None:
    assert sign_note(TEXT, "PeterNeumann", peter()) == NOTE
    assert open_note(NOTE, NoteKey.parse(PETER)) == TEXT


@pytest.mark.parametrize("text", [PETER, SUM])
def test_published_keys(text: str) -> None:
    assert str(NoteKey.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a+b", PETER[:-1], PETER.replace("c74f", "c74e"), SUM.replace("sum.", "other.")]
)
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(RecordError, match="is not a log key"):
        NoteKey.parse(text)


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (NOTE.replace("your problem is", "the problem is"), "not one of PeterNeumann"),
        (NOTE.replace("— Peter", "— Paul"), "not signed by"),
        (TEXT, "no signature lines"),
        (NOTE[:-1], "no signature lines"),
        (NOTE.replace("x08go", "!!"), "malformed"),
        (NOTE.replace("— ", "- "), "malformed"),
    ],
)
def test_a_note_that_is_not_the_one_signed(note: str, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        open_note(note, NoteKey.parse(PETER))


def test_signatures_of_others_are_passed_over() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    witness = sign_note(TEXT, "witness", other).rsplit("\n\n", 1)[1]
    text, line = NOTE.rsplit("\n\n", 1)
    assert open_note(f"{text}\n\n{witness}{line}", NoteKey.parse(PETER)) == TEXT


def test_a_checkpoint_as_specified() -> None:
    root = base64.b64decode("nND/nri/U0xuHUrYSy0HtMeal2vzD9V4k/BO79C+QeI=")
    text = "example.com/behind-the-sofa\n20852163\nnND/nri/U0xuHUrYSy0HtMeal2vzD9V4k/BO79C+QeI=\n"
    assert LogCheckpoint("example.com/behind-the-sofa", 20852163, root).text == text
    assert LogCheckpoint.parse(text) == LogCheckpoint("example.com/behind-the-sofa", 20852163, root)


@pytest.mark.parametrize("text", ["", "a\n1\n", "a\n01\nAAAA\n", "a\n-1\nAAAA\n", "\n1\nAAAA\n"])
def test_what_is_no_checkpoint(text: str) -> None:
    with pytest.raises(RecordError, match="not a log checkpoint"):
        LogCheckpoint.parse(text)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**60), st.binary(min_size=32, max_size=32))
def test_checkpoints_come_back(size: int, root: bytes) -> None:
    checkpoint = LogCheckpoint("dilocox/run", size, root)
    note = sign_note(checkpoint.text, "dilocox/run", peter())
    key = NoteKey("dilocox/run", peter().public_key().public_bytes_raw())
    assert LogCheckpoint.parse(open_note(note, key)) == checkpoint


# The public key of a witness that cosigns public logs, of a test in transparency-dev/formats.
WITNESS = "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2"


def test_keys_of_witnesses_are_not_those_of_logs() -> None:
    assert str(WitnessKey.parse(WITNESS)) == WITNESS
    assert WitnessKey.parse(WITNESS).hash.hex() == "da77ade7"
    with pytest.raises(RecordError, match="is a key of a witness, not a log key"):
        NoteKey.parse(WITNESS)
    with pytest.raises(RecordError, match="is a log key, not a key of a witness"):
        WitnessKey.parse(PETER)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**62), st.integers(0, 2**63 - 1), st.binary(min_size=32, max_size=32),
    st.integers(0, 10**9),
)  # fmt: skip
def test_a_cosignature_is_of_its_text_its_time_and_its_key(
    size: int, time: int, root: bytes, place: int
) -> None:
    key = WitnessKey("w.example/1", peter().public_key().public_bytes_raw())
    text = LogCheckpoint("a.log", size, root).text
    note = sign_note(text, "a.log", peter())
    assert cosigned_at(note, key) is None
    line = cosign(text, key.name, peter(), time)
    assert cosigned_at(note + line, key) == time
    # The log's own signature still counts, and the witness's is none of the log's.
    log = NoteKey("a.log", key.public)
    assert open_note(note + line, log) == text
    with pytest.raises(RecordError, match="not signed by"):
        open_note(f"{text}\n{line}", NoteKey(key.name, key.public))
    other = LogCheckpoint("a.log", size + 1, root).text
    with pytest.raises(RecordError, match=r"not one of witness w\.example/1"):
        cosigned_at(f"{other}\n{line}", key)
    # Any flipped bit of time or signature.
    data = bytearray(base64.b64decode(line.split()[2]))
    data[4 + place % (len(data) - 4)] ^= 1 << place % 8
    with pytest.raises(RecordError, match="not one of witness"):
        cosigned_at(f"{note}— {key.name} {base64.b64encode(data).decode()}\n", key)


def test_the_latest_of_several_cosignatures_counts() -> None:
    key = WitnessKey("w.example/1", peter().public_key().public_bytes_raw())
    text = LogCheckpoint("a.log", 1, b"\1" * 32).text
    lines = [cosign(text, key.name, peter(), time) for time in (5, 9, 7)]
    assert cosigned_at(f"{text}\n{''.join(lines)}", key) == 9
    message = f"cosignature/v1\ntime 5\n{text}".encode()
    peter().public_key().verify(base64.b64decode(lines[0].split()[2])[12:], message)
    with pytest.raises(RecordError, match="malformed"):
        cosigned_at(f"{text}\n{lines[0]}no line\n", key)
