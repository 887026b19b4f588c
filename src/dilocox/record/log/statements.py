"""Signed statements: in-toto Statement v1 in a DSSE envelope, Ed25519, canonical JSON (RFC 8785).

Every statement names its run, so that none counts in another. What each type says is in `Predicate`
fields by name (see docs/verification.md); types that a reader does not know are passed over.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import FormatError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from dilocox.errors import RecordError
from dilocox.record.log.canonical import dumps, encoded, parsed

STATEMENT = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREFIX, SUFFIX = "urn:dilocox:record:", ":v1"

MANIFEST = "run-manifest"
ENROLMENT = "enrolment"
COMMITMENT = "commitment"
CONTRIBUTION = "contribution"
STEP = "outer-step"
CHECKPOINT = "checkpoint"
RESUME = "resume"
PLAN = "plan"
ROUND = "round-state"
ATTESTATION = "attestation"
ANCHOR = "anchor-state"
REPORT = "report"
AUDIT = "audit"
VERDICT = "urn:dilocox:audit-verdict:v1"
"""The whole of its `predicateType`: readers before there was the type pass over it so, where they
take another of `PREFIX` that they do not know for one that was tampered with."""
ACCEPTANCE = "acceptance"
STANDING = "standing"
BY_LOG = (MANIFEST, ENROLMENT, STEP, RESUME, PLAN, STANDING)
"""Types that the log's own key signs: what the coordinator has decided."""
BY_SITE = (ACCEPTANCE, COMMITMENT, CONTRIBUTION, CHECKPOINT, ROUND, ATTESTATION, ANCHOR, REPORT)
"""Types that a site's key signs."""
BY_AUDITOR = (AUDIT, VERDICT)
"""Types that an auditor's key signs: a verdict, which is a file, and what the log names of it."""
KNOWN = (*BY_LOG, *BY_SITE, *BY_AUDITOR)
_OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What goes wrong where JSON of another form, or nested too deeply, is taken apart."""


@dataclass(frozen=True)
class Statement:
    """What is said, whoever says it."""

    kind: str
    """One of the types above; of an unknown type, its whole `predicateType`."""
    subjects: Mapping[str, str]
    """SHA-256, hex, by name."""
    predicate: Mapping[str, Any]

    @property
    def run(self) -> str:
        """The run that it is about."""
        return str(self.predicate.get("run", ""))

    @property
    def known(self) -> bool:
        """This version knows what it says."""
        return self.kind in KNOWN

    def to_bytes(self) -> bytes:
        """Canonical JSON, which is what is signed."""
        read: bytes | None = self.__dict__.get("_read")
        return dumps(self._document()) if read is None else read

    def _document(self) -> dict[str, Any]:
        return {
            "_type": STATEMENT,
            "subject": [
                {"name": name, "digest": {"sha256": digest}}
                for name, digest in self.subjects.items()
            ],
            "predicateType": _type_of(self.kind),
            "predicate": dict(self.predicate),
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> Statement:
        """Inverse of `to_bytes`. Raises `RecordError` for anything else, other forms too."""
        try:
            found, plain = parsed(data.decode())
            kind = _kind_of(found["predicateType"])
            subjects = {each["name"]: each["digest"]["sha256"] for each in found["subject"]}
            statement = cls(kind, subjects, dict(found["predicate"]))
            same = encoded(statement._document(), plain) == data
        except (*_OTHER_FORM, rfc8785.CanonicalizationError):
            raise RecordError("not a statement: it is not in-toto Statement v1") from None
        if not same:
            raise RecordError(f"statement {kind}: not in canonical form")
        # What was just seen to be its canonical form need not be made again.
        object.__setattr__(statement, "_read", data)
        return statement


def _type_of(kind: str) -> str:
    return f"{PREFIX}{kind}{SUFFIX}" if kind in KNOWN and kind != VERDICT else kind


def _kind_of(predicate_type: str) -> str:
    kind = predicate_type.removeprefix(PREFIX).removesuffix(SUFFIX)
    return kind if _type_of(kind) == predicate_type else predicate_type


class Signer:
    """A private key that signs statements."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.public = key.public_key().public_bytes_raw().hex()
        """The public key, 64 hex digits."""
        self._signer = CryptoSigner(key, _public(self.public))

    @classmethod
    def from_hex(cls, seed: str) -> Signer:
        """From 32 bytes as hex."""
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)))

    def sign(self, statement: Statement) -> str:
        """The statement in its envelope, one line of canonical JSON."""
        envelope = Envelope(statement.to_bytes(), PAYLOAD_TYPE, {})
        envelope.sign(self._signer)
        return dumps(envelope.to_dict()).decode()


def opened(line: str) -> tuple[Statement, Envelope]:
    """What an envelope holds, its signature not checked yet.

    Raises `RecordError` for what is no envelope, or is not in canonical form.
    """
    usual = _usual(line)
    if usual is not None:
        return Statement.from_bytes(usual.payload), usual
    try:
        found, plain = parsed(line)
        envelope = Envelope.from_dict(found)
        same = encoded(envelope.to_dict(), plain).decode() == line
    except (*_OTHER_FORM, FormatError):
        raise RecordError("not a signed statement: it is not a DSSE envelope") from None
    if not same or envelope.payload_type != PAYLOAD_TYPE or len(envelope.signatures) != 1:
        raise RecordError("not a signed statement: its envelope has another form")
    return Statement.from_bytes(envelope.payload), envelope


_BASE64 = "([A-Za-z0-9+/]*={0,2})"
_USUAL = re.compile(
    f'{{"payload":"{_BASE64}","payloadType":"{re.escape(PAYLOAD_TYPE)}",'
    f'"signatures":\\[{{"keyid":"([0-9a-f]{{64}})","sig":"{_BASE64}"}}\\]}}'
)
"""The canonical form of an envelope with one signature, by a key as this version names it."""


def _usual(line: str) -> Envelope | None:
    """The envelope of a line that is in canonical form at first sight; None for all others."""
    match = _USUAL.fullmatch(line)
    if match is None:
        return None
    payload, key, signature = match.groups()
    try:
        data, own = base64.b64decode(payload), base64.b64decode(signature)
    except ValueError:
        return None
    # Bits behind the last byte may be anything in base64, but not in its canonical form.
    if (base64.b64encode(data), base64.b64encode(own)) != (payload.encode(), signature.encode()):
        return None
    return Envelope(data, PAYLOAD_TYPE, {key: Signature(key, own.hex())})


def check_signature(envelope: Envelope, public: str) -> None:
    """Raise `RecordError` unless the key `public` (64 hex digits) has signed."""
    # As `Envelope.verify` with this key and a threshold of one, without its objects.
    signatures = [each for each in envelope.signatures.values() if each.keyid == public]
    try:
        key = _ed25519(public)
        for each in signatures:
            key.verify(bytes.fromhex(each.signature), envelope.pae())
    except (InvalidSignature, ValueError):
        signatures = []
    if not signatures:
        raise RecordError(f"the signature is not one of key {public[:12]}…")


@functools.lru_cache(maxsize=4096)
def _ed25519(public: str) -> Ed25519PublicKey:
    """Raises ValueError."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))


def open_signed(line: str, public: str, *, run: str, kinds: Sequence[str]) -> Statement:
    """The statement of an envelope that `public` has signed for `run`, of one of `kinds`.

    Raises `RecordError` with the reason if it is anything else.
    """
    statement, envelope = opened(line)
    if statement.kind not in kinds:
        raise RecordError(f"a statement of type {statement.kind}; {' or '.join(kinds)} is due")
    if statement.run != run:
        raise RecordError(f"statement {statement.kind} is of run {statement.run[:12]!r}")
    check_signature(envelope, public)
    return statement


def _public(text: str) -> SSlibKey:
    # The key's own bytes name it: no statement can be moved under another key by its name.
    return SSlibKey(text, "ed25519", "ed25519", {"public": text})


def round_of_rank(run: str, rank: Any, round_: int, tick: int) -> dict[str, Any]:
    """What a rank's statement of the beginning of a round says: the rank, and where the run is.

    `rank` has `site`, `stage` and `shard`. `tick` counts the run's slots.
    """
    return {
        "run": run,
        "site": rank.site,
        "stage": rank.stage,
        "shard": rank.shard,
        "round": round_,
        "tick": tick,
    }
