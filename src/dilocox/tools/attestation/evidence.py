"""The document with all evidence of one machine, as it lies in the store of the record."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dilocox.errors import AttestationError
from dilocox.record.log.canonical import dumps

VERSION = 1
MOST_BYTES = 8 << 20
"""Largest document. Eight GPUs with manifests take about 300 kB."""
MOST_GPUS = 64


@dataclass(frozen=True)
class GpuEvidence:
    """The report of one GPU."""

    report: bytes
    certificates: str
    """PEM, leaf first."""


@dataclass(frozen=True)
class Evidence:
    """What a machine says of itself, with all that is needed to check it offline."""

    runtime_data: bytes
    """See `dilocox.tools.attestation.runtime_data`, byte for byte."""
    tee: Literal["tdx", "snp"]
    quote: bytes
    """A TDX quote, or an SNP report."""
    collateral: Mapping[str, str] | None = None
    """Of TDX: what Intel publishes about the platform, in dcap-qvl's form."""
    certificates: str = ""
    """Of SNP: VCEK, ASK and ARK in PEM."""
    event_log: Sequence[Mapping[str, Any]] | None = None
    """Of TDX: events that extended the registers; None if the machine keeps none."""
    gpus: Sequence[GpuEvidence] = ()
    manifests: Sequence[str] = field(default=())
    """Reference manifests of NVIDIA for driver and VBIOS, XML."""

    def to_bytes(self) -> bytes:
        """Return the document as canonical JSON."""
        return dumps(
            {
                "v": VERSION,
                "runtime_data": _text(self.runtime_data),
                "tee": self.tee,
                "quote": _text(self.quote),
                "collateral": None if self.collateral is None else dict(self.collateral),
                "certificates": self.certificates,
                "event_log": None if self.event_log is None else [*map(dict, self.event_log)],
                "gpus": [
                    {"report": _text(each.report), "certificates": each.certificates}
                    for each in self.gpus
                ],
                "manifests": list(self.manifests),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Evidence:
        """Inverse of `to_bytes`. Raises `AttestationError` for anything else."""
        if len(data) > MOST_BYTES:
            raise AttestationError(f"evidence: larger than {MOST_BYTES >> 20} MiB")
        try:
            said = json.loads(data)
            # JSON can name halves of characters, which no encoding has.
            json.dumps(said, ensure_ascii=False).encode()
            if said["v"] != VERSION or said["tee"] not in ("tdx", "snp"):
                raise AttestationError("evidence: of another version or kind of machine")
            gpus = [
                GpuEvidence(_bytes(each["report"]), str(each["certificates"]))
                for each in said["gpus"]
            ]
            found = cls(
                runtime_data=_bytes(said["runtime_data"]),
                tee=said["tee"],
                quote=_bytes(said["quote"]),
                collateral=_texts(said["collateral"]),
                certificates=str(said["certificates"]),
                event_log=_events(said["event_log"]),
                gpus=gpus,
                manifests=[*map(str, said["manifests"])],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise AttestationError("evidence: not a document of dilocox attest") from None
        if len(gpus) > MOST_GPUS:
            raise AttestationError(f"evidence: more than {MOST_GPUS} GPUs")
        return found


def _texts(said: Any) -> dict[str, str] | None:
    if said is None:
        return None
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        raise TypeError
    return said


def _events(said: Any) -> list[dict[str, Any]] | None:
    if said is None:
        return None
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise TypeError
    return said


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
