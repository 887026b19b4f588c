"""The index of a published run: only what the log's key has signed, whole and in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.errors import RecordError
from dilocox.record.bundles.publication import MOST_PART, Bundle, Publication
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.statements import Signer

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
LOG = NoteKey("dilocox/toy/1", PRIVATE.public_key().public_bytes_raw())
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def bundle(number: int, **changes: object) -> Bundle:
    parts = (f"{number:064x}", "b" * 64)
    found = Bundle(
        number, "a" * 64, 1500, 1024, parts, Prefix(10 * number + 10, "c" * 64),
        files={"run.toml": "d" * 64},
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


def published(*bundles: Bundle) -> Publication:
    found = Publication(LOG, "e" * 64)
    for each in bundles:
        found.add(each, Signer(PRIVATE))
    return found


def test_what_is_signed_is_read() -> None:
    written = published(bundle(0, toward=20, until="record/x"), bundle(1, last=True, missing=2))
    for key in (None, str(LOG)):
        found = Publication.parse(written.text, key)
        assert (found.log, found.run, found.bundles) == (LOG, "e" * 64, written.bundles)
    assert found.bundles[0].paths() == [f"bundles/000000-{'a' * 16}.tar.00000{n}" for n in (0, 1)]
    assert bundle(0, parts=("a" * 64,)).paths() == [f"bundles/000000-{'a' * 16}.tar"]


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda lines: lines.pop(0), "line 1 does not follow"),
        (lambda lines: lines.pop(1), "line 2 does not follow"),
        (lambda lines: lines.reverse(), "line 1 does not follow"),
        (lambda lines: lines.insert(1, lines[0]), "line 2 does not follow"),
        (lambda lines: lines.insert(0, "{}"), "not a signed statement"),
        (lambda lines: lines.clear(), "cut short"),
        (lambda lines: lines.append(lines.pop()[:-1]), "not a signed statement"),
        (lambda lines: lines.append(lines.pop().replace('"sig":"', '"sig":"AAAA')), "signature"),
    ],
)
def test_a_changed_index_is_refused(change: Callable[[list[str]], object], because: str) -> None:
    lines = published(bundle(0), bundle(1), bundle(2)).lines
    change(lines)
    with pytest.raises(RecordError, match=because):
        Publication.parse("".join(f"{line}\n" for line in lines))


def test_an_index_that_was_cut_within_a_line_is_refused() -> None:
    text = published(bundle(0)).text
    for cut in (0, 1, len(text) - 1):
        with pytest.raises(RecordError, match="cut short"):
            Publication.parse(text[:cut])


def test_another_key_is_refused() -> None:
    text = published(bundle(0)).text
    other = NoteKey("dilocox/toy/1", OTHER.public_key().public_bytes_raw())
    with pytest.raises(RecordError, match="is of log"):
        Publication.parse(text, str(other))
    forged = Publication(LOG, "e" * 64)
    forged.add(bundle(0), Signer(OTHER))
    with pytest.raises(RecordError, match="signature"):
        Publication.parse(forged.text)
    mixed = published(bundle(0))
    mixed.run = "f" * 64
    mixed.add(bundle(1), Signer(PRIVATE))
    with pytest.raises(RecordError, match="is of run"):
        Publication.parse(mixed.text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"part_size": 0}, {"part_size": MOST_PART + 1}, {"size": 1024}, {"size": 2**20},
        {"parts": ()}, {"size": -1}, {"digest": "A" * 64}, {"parts": ("a", "b")},
        {"until": "../x\n"}, {"head": Prefix(9, "c" * 63)}, {"missing": -1},
    ],
)  # fmt: skip
def test_malformed_bundles_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RecordError, match="malformed"):
        Publication.parse(published(bundle(0, **wrong)).text)


def test_a_log_that_shrinks_is_refused() -> None:
    with pytest.raises(RecordError, match="line 2 does not follow"):
        Publication.parse(published(bundle(0), bundle(1, head=Prefix(9, "c" * 64))).text)
