"""AMD SEV-SNP attestation reports: signature, certificates and fields.

Source: AMD, "SEV Secure Nested Paging Firmware ABI Specification" (56860), table
"ATTESTATION_REPORT Structure"; "Versioned Chip Endorsement Key Certificate and
KDS Interface Specification" (57230).
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import AMD, check_chain, extension

REPORT_BYTES, SIGNED_BYTES = 0x4A0, 0x2A0
_COMPONENT = 72
"""Bytes of each half of the signature, little-endian."""
_OID = "1.3.6.1.4.1.3704.1."
TCB_PARTS = ("bootloader", "tee", "snp", "microcode")
_PLACES = {
    "Milan": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
}
"""Bytes of the parts of a TCB version, by family."""
_OIDS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
"""Ends of the OIDs of the same parts in the certificate."""
_TABLE = {
    "63da758d-e664-4564-adc5-f4b93be8accd": 0,
    "4ab7b379-bbac-4fe4-a02f-05aef327c782": 1,
    "c0b406a4-a803-4952-9743-3fb6014cd0ae": 2,
}
"""Place in the chain (VCEK, ASK, ARK) of the certificates of `auxblob`, by GUID."""


@dataclass(frozen=True)
class SnpReport:
    """What a verified report says."""

    report_data: bytes
    """64 bytes."""
    measurement: str
    """SHA-384 of the guest's launch, hex."""
    tcb: dict[str, int]
    """Security version of each part (`TCB_PARTS`, and `fmc` on Turin), as reported."""
    debug: bool
    migration: bool
    """True if a migration agent may move the guest."""
    smt: bool
    """True if the policy of the guest allows simultaneous multithreading."""
    vmpl: int
    """Privilege level of who asked for the report, 0 (highest) to 3."""
    chip: str
    """Id of the processor, hex; zeros if it is masked."""
    root: str
    """SHA-256 of the root certificate, hex."""
    expires: datetime.datetime
    """End of the shortest validity of the certificates."""


def verify_snp(
    report: bytes,
    chain: Sequence[x509.Certificate],
    when: datetime.datetime,
    further_roots: Collection[str] = (),
) -> SnpReport:
    """Check a report against its certificates.

    Args:
        report: The report, 1184 bytes.
        chain: VCEK, ASK, ARK.
        when: Moment at which the certificates must be valid.
        further_roots: SHA-256, hex, of roots that are accepted beside AMD's.

    Raises:
        AttestationError: The report is not one of such a processor.
    """
    if len(report) != REPORT_BYTES:
        raise AttestationError(f"SNP report: {len(report)} bytes instead of {REPORT_BYTES}")
    root = check_chain(chain, {*AMD.values(), *further_roots}, when, "SNP report")
    if (_number(report, 0x48, 4) >> 2) & 7:
        raise AttestationError("SNP report: not signed with the processor's own key (VCEK)")
    _check_signature(report, chain[0])
    family = _family(chain[0])
    tcb = {part: report[0x180 + place] for part, place in _PLACES[family].items()}
    for part, version in tcb.items():
        if _integer(extension(chain[0], _OID + _OIDS[part])) != version:
            raise AttestationError(f"SNP report: its {part} version is not its certificate's")
    chip = report[0x1A0:0x1E0]
    own = extension(chain[0], _OID + "4") or b""
    if any(chip) and (not own or chip[: len(own)] != own or any(chip[len(own) :])):
        raise AttestationError("SNP report: its processor is not its certificate's")
    policy = _number(report, 0x08, 8)
    return SnpReport(
        report_data=report[0x50:0x90],
        measurement=report[0x90:0xC0].hex(),
        tcb=tcb,
        debug=bool(policy >> 19 & 1),
        migration=bool(policy >> 18 & 1),
        smt=bool(policy >> 16 & 1),
        vmpl=_number(report, 0x30, 4),
        chip=chip.hex(),
        root=root,
        expires=min(each.not_valid_after_utc for each in chain),
    )


def certificate_table(auxblob: bytes) -> list[bytes]:
    """Return VCEK, ASK and ARK of the certificate table that a host hands its guest.

    Returns an empty list if the table lacks one. Source: Linux, "configfs-tsm-report"; AMD 56421.
    """
    found: dict[int, bytes] = {}
    for start in range(0, len(auxblob) - 23, 24):
        name = auxblob[start : start + 16]
        if not any(name):
            break
        offset, length = _number(auxblob, start + 16, 4), _number(auxblob, start + 20, 4)
        for text in (str(uuid.UUID(bytes=name)), str(uuid.UUID(bytes_le=name))):
            if text in _TABLE:
                found[_TABLE[text]] = auxblob[offset : offset + length]
    return [found[place] for place in range(3)] if len(found) == 3 else []


def _check_signature(report: bytes, leaf: x509.Certificate) -> None:
    halves = [_number(report, SIGNED_BYTES + place, _COMPONENT) for place in (0, _COMPONENT)]
    try:
        key = leaf.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or _number(report, 0x34, 4) != 1:
            raise ValueError
        key.verify(encode_dss_signature(*halves), report[:SIGNED_BYTES], ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise AttestationError("SNP report: its signature is not its processor's") from None


def _family(leaf: x509.Certificate) -> str:
    name = (extension(leaf, _OID + "2") or b"")[2:].decode("ascii", "replace").split("-")[0]
    if name not in _PLACES:
        raise AttestationError(f"SNP report: of a processor {name!r}, which dilocox does not know")
    return name


def _integer(der: bytes | None) -> int | None:
    """Return a DER integer of at most two bytes; None for anything else."""
    if der is None or len(der) < 3 or der[0] != 2 or len(der) != 2 + der[1]:
        return None
    return int.from_bytes(der[2:], "big", signed=True)


def _number(data: bytes, start: int, length: int) -> int:
    return int.from_bytes(data[start : start + length], "little")
