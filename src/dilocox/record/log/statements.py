"""Signed statements: in-toto Statement v1 in a DSSE envelope, Ed25519, canonical JSON (RFC 8785).

Every statement names its run, so that it cannot be used in another run. docs/verification.md
describes the predicate fields of each type. Readers ignore statements of unknown types.
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
"""The whole `predicateType`, without `PREFIX`. Readers of versions before this type ignore it in
this form; they would treat an unknown type with `PREFIX` as tampering."""
CUSTODY = "urn:dilocox:custody:v1"
"""The whole `predicateType`, for the same reason as `VERDICT`."""
ACCEPTANCE = "acceptance"
STANDING = "standing"
BY_LOG = (MANIFEST, ENROLMENT, STEP, RESUME, PLAN, STANDING)
"""Types that the log's own key signs: decisions of the coordinator."""
BY_SITE = (
    ACCEPTANCE, COMMITMENT, CONTRIBUTION, CHECKPOINT, ROUND, ATTESTATION, ANCHOR, REPORT, CUSTODY,
)  # fmt: skip
"""Types that a site's key signs."""
BY_AUDITOR = (AUDIT, VERDICT)
"""Types that an auditor's key signs: `AUDIT`, a verdict in a file of its own, and `VERDICT`, by
which the log names such a file."""
KNOWN = (*BY_LOG, *BY_SITE, *BY_AUDITOR)
_WHOLE = (VERDICT, CUSTODY)
_OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions that parsing raises for JSON of another form, or for JSON nested too deeply."""


@dataclass(frozen=True)
class Statement:
    """A statement without its signature."""

    kind: str
    """One of the types above; the whole `predicateType` if the type is unknown."""
    subjects: Mapping[str, str]
    """SHA-256, hex, by name."""
    predicate: Mapping[str, Any]

    @property
    def run(self) -> str:
        """Id of the run that the statement is about."""
        return str(self.predicate.get("run", ""))

    @property
    def known(self) -> bool:
        """True if this version knows the statement's type."""
        return self.kind in KNOWN

    def to_bytes(self) -> bytes:
        """Encode as canonical JSON, the bytes that are signed."""
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
        """Decode `to_bytes`.

        Raises `RecordError` for anything else, including JSON that is not in canonical form.
        """
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
        # `data` has just been shown to be the canonical form, so `to_bytes` need not encode again.
        object.__setattr__(statement, "_read", data)
        return statement


def _type_of(kind: str) -> str:
    return f"{PREFIX}{kind}{SUFFIX}" if kind in KNOWN and kind not in _WHOLE else kind


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
        """Create a signer from a seed of 32 bytes, in hex."""
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)))

    def sign(self, statement: Statement) -> str:
        """Sign a statement; return its envelope as one line of canonical JSON."""
        envelope = Envelope(statement.to_bytes(), PAYLOAD_TYPE, {})
        envelope.sign(self._signer)
        return dumps(envelope.to_dict()).decode()


def opened(line: str) -> tuple[Statement, Envelope]:
    """Parse an envelope; return (statement, envelope). The signature is not checked.

    Raises `RecordError` if `line` is not an envelope, or is not in canonical form.
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
"""The canonical form of an envelope with one signature, whose key is named by its own bytes."""


def _usual(line: str) -> Envelope | None:
    """Parse a line in the usual canonical form, fast; return None for all other lines."""
    match = _USUAL.fullmatch(line)
    if match is None:
        return None
    payload, key, signature = match.groups()
    try:
        data, own = base64.b64decode(payload), base64.b64decode(signature)
    except ValueError:
        return None
    # Base64 may have any bits behind the last byte; its canonical form may not.
    if (base64.b64encode(data), base64.b64encode(own)) != (payload.encode(), signature.encode()):
        return None
    return Envelope(data, PAYLOAD_TYPE, {key: Signature(key, own.hex())})


def check_signature(envelope: Envelope, public: str) -> None:
    """Raise `RecordError` unless the key `public` (64 hex digits) has signed the envelope."""
    # Same result as `Envelope.verify` with this key and a threshold of one, but faster.
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
    """Return the key object of 64 hex digits. Raises `ValueError` if they are not a key."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))


def open_signed(line: str, public: str, *, run: str, kinds: Sequence[str]) -> Statement:
    """Parse and check an envelope: signed by `public`, about `run`, of a type in `kinds`.

    Returns the statement. Raises `RecordError` with the reason if a check fails.
    """
    statement, envelope = opened(line)
    if statement.kind not in kinds:
        raise RecordError(f"a statement of type {statement.kind}; expected {' or '.join(kinds)}")
    if statement.run != run:
        raise RecordError(f"statement {statement.kind} is of run {statement.run[:12]!r}")
    check_signature(envelope, public)
    return statement


def _public(text: str) -> SSlibKey:
    # The key's own bytes are its name, so no statement can be moved to another key by its name.
    return SSlibKey(text, "ed25519", "ed25519", {"public": text})


def round_of_rank(run: str, rank: Any, round_: int, tick: int) -> dict[str, Any]:
    """Return the predicate fields that name a rank and the beginning of a round.

    `rank` has `site`, `stage` and `shard`. `tick`: slots of the run that have ended.
    """
    return {
        "run": run,
        "site": rank.site,
        "stage": rank.stage,
        "shard": rank.shard,
        "round": round_,
        "tick": tick,
    }
