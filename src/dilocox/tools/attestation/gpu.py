"""NVIDIA GPU attestation reports: SPDM 1.1 measurements, signature and certificates.

A report is the request GET_MEASUREMENTS followed by the GPU's answer. Source: DMTF DSP0274, "SPDM
Specification" 1.1.0, sections "GET_MEASUREMENTS" and "MEASUREMENTS"; NVIDIA's opaque fields as in
the package nv-local-gpu-verifier.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import NVIDIA, check_chain, extension, fingerprint

_REQUEST = bytes((0x11, 0xE0))
"""Version 1.1 and code of the request."""
_RESPONSE = bytes((0x11, 0x60))
_REQUEST_BYTES, _NONCE, _SIGNATURE = 37, 32, 96
_DRIVER, _VBIOS, _NVDEC, _FIRMWARE = 3, 6, 11, 20
"""Numbers of opaque fields."""
_FIRMWARE_OID = "2.23.133.5.4.1"
_NVDEC_DISABLED = 0x55
_NVDEC_MEASUREMENT = 35
"""The measurement that does not count while the first video decoder is off."""


@dataclass(frozen=True)
class GpuReport:
    """What a verified report says."""

    nonce: bytes
    """32 bytes that the request named."""
    driver: str
    vbios: str
    measurements: Mapping[int, str]
    """SHA-384, hex, by index from 0."""
    uncounted: frozenset[int]
    """Indices that do not count in the state of this GPU."""
    key: str
    """SHA-256 of the leaf certificate, hex: two reports of one GPU have the same."""
    root: str
    """SHA-256 of the root certificate, hex."""
    expires: datetime.datetime
    """End of the shortest validity of the certificates."""


def verify_gpu(
    report: bytes,
    chain: Sequence[x509.Certificate],
    when: datetime.datetime,
    further_roots: Collection[str] = (),
) -> GpuReport:
    """Check a report against its certificates, leaf first. Revocation is not checked.

    `further_roots`: SHA-256, hex, of roots that are accepted beside NVIDIA's. Raises
    `AttestationError`.
    """
    root = check_chain(chain, {NVIDIA, *further_roots}, when, "GPU report")
    request, answer = report[:_REQUEST_BYTES], report[_REQUEST_BYTES:]
    if request[:2] != _REQUEST or answer[:2] != _RESPONSE:
        raise AttestationError("GPU report: not measurements in SPDM 1.1")
    size = int.from_bytes(answer[5:8], "little")
    after = 8 + size + _NONCE
    opaque_size = int.from_bytes(answer[after : after + 2], "little")
    end = after + 2 + opaque_size
    if len(answer) != end + _SIGNATURE:
        raise AttestationError("GPU report: its length is not the one that it says")
    _check_signature(report, chain[0])
    fields = _fields(answer[after + 2 : end])
    _check_firmware(fields.get(_FIRMWARE), chain[0])
    off = fields.get(_NVDEC) == bytes((_NVDEC_DISABLED,))
    return GpuReport(
        nonce=request[4:36],
        driver=_text(fields.get(_DRIVER, b"")),
        vbios=_vbios(fields.get(_VBIOS, b"")),
        measurements=_measurements(answer[8 : 8 + size], answer[4]),
        uncounted=frozenset({_NVDEC_MEASUREMENT} if off else ()),
        key=fingerprint(chain[0]),
        root=root,
        expires=min(each.not_valid_after_utc for each in chain),
    )


def golden_measurements(manifest: bytes) -> dict[int, frozenset[str]]:
    """Return the accepted SHA-384 values, hex, by index, of a reference manifest (RIM) of NVIDIA.

    The caller knows the manifest's digest, and so trusts the XML. Raises `AttestationError` if it
    is not such a manifest.
    """
    try:
        # A policy has pinned these bytes by their SHA-256, so they are trusted.
        tree = ElementTree.fromstring(manifest)  # noqa: S314
        found = {
            int(each.attrib["index"]): frozenset(
                value.lower() for name, value in each.attrib.items() if "}Hash" in name
            )
            for each in tree.iter()
            if each.tag.endswith("}Resource") and each.attrib.get("active") == "True"
        }
    except (ElementTree.ParseError, KeyError, ValueError):
        raise AttestationError("reference manifest: not a RIM in XML") from None
    if not found:
        raise AttestationError("reference manifest: it has no measurements")
    return found


def manifest_version(manifest: bytes) -> str:
    """Return the version of the driver or VBIOS that a reference manifest describes.

    The caller knows the manifest's digest. Raises `AttestationError` if it names none.
    """
    try:
        tree = ElementTree.fromstring(manifest)  # noqa: S314
    except ElementTree.ParseError:
        raise AttestationError("reference manifest: not a RIM in XML") from None
    for each in tree.iter():
        if each.tag.endswith("}Meta") and each.attrib.get("colloquialVersion"):
            return each.attrib["colloquialVersion"]
    raise AttestationError("reference manifest: it names no version")


def check_measurements(report: GpuReport, manifests: Sequence[bytes]) -> int:
    """Check a report's measurements against all reference manifests; return how many were compared.

    Both the GPU's driver and its VBIOS must have a manifest. Raises `AttestationError` if one has
    none, or if a measurement differs, is missing, or is in two manifests.
    """
    golden: dict[int, frozenset[str]] = {}
    for manifest in manifests:
        own = golden_measurements(manifest)
        both = sorted(golden.keys() & own.keys())
        if both:
            raise AttestationError(f"reference manifests: two of them have measurement {both[0]}")
        golden |= own
    # Who makes the evidence chooses its manifests, and could leave out the one that accuses.
    versions = {manifest_version(each).upper() for each in manifests}
    for what, version in (("driver", report.driver), ("VBIOS", report.vbios)):
        if version.upper() not in versions:
            raise AttestationError(
                f"GPU report: the evidence has no reference manifest of its {what} {version!r}"
            )
    counted = sorted(golden.keys() - report.uncounted)
    for index in counted:
        if report.measurements.get(index) not in golden[index]:
            raise AttestationError(
                f"GPU report: measurement {index} is not the reference one: other firmware or "
                "driver, or a mode for developers"
            )
    return len(counted)


def _check_signature(report: bytes, leaf: x509.Certificate) -> None:
    signature = report[-_SIGNATURE:]
    halves = [int.from_bytes(signature[place : place + 48], "big") for place in (0, 48)]
    try:
        key = leaf.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
        key.verify(encode_dss_signature(*halves), report[:-_SIGNATURE], ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise AttestationError("GPU report: its signature is not its GPU's") from None


def _check_firmware(said: bytes | None, leaf: x509.Certificate) -> None:
    """Newer firmware names its own digest, and the certificate must be one for this firmware."""
    if said is not None and said not in (extension(leaf, _FIRMWARE_OID) or b""):
        raise AttestationError("GPU report: its certificate is for other firmware")


def _measurements(record: bytes, blocks: int) -> dict[int, str]:
    found: dict[int, str] = {}
    place = 0
    while place < len(record):
        size = int.from_bytes(record[place + 2 : place + 4], "little")
        # Index, specification (1: DMTF), size; then type and size of the value.
        value = record[place + 7 : place + 4 + size]
        if len(record) < place + 4 + size or record[place + 1] != 1 or record[place] == 0:
            raise AttestationError("GPU report: a measurement has another form")
        found[record[place] - 1] = value.hex()
        place += 4 + size
    if len(found) != blocks:
        raise AttestationError("GPU report: it has not as many measurements as it says")
    return found


def _fields(opaque: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    place = 0
    while place < len(opaque):
        kind, size = (
            int.from_bytes(opaque[place + at : place + at + 2], "little") for at in (0, 2)
        )
        if len(opaque) < place + 4 + size or kind in found:
            raise AttestationError("GPU report: its opaque data has another form")
        found[kind] = opaque[place + 4 : place + 4 + size]
        place += 4 + size
    return found


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("ascii", "replace")


def _vbios(data: bytes) -> str:
    """Write the version as NVIDIA does, such as 96.00.5E.00.01."""
    if len(data) < 5:
        return ""
    return ".".join(f"{each:02X}" for each in (*data[3::-1], data[4]))
