"""Collects the evidence of this machine, with all that its verdict needs later."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import read_certificates
from dilocox.tools.attestation.evidence import Evidence, GpuEvidence
from dilocox.tools.attestation.runtime_data import gpu_nonce, report_data
from dilocox.tools.attestation.simulated_machine import SimulatedMachine
from dilocox.tools.attestation.snp import certificate_table
from dilocox.tools.attestation.sources import RawQuote
from dilocox.tools.attestation.tdx import MISSING

PCS = "https://api.trustedservices.intel.com"
"""Intel's service that publishes collateral of platforms."""
COLLATERAL_SECONDS = 60.0
CHIP = bytes(range(64))
"""Id of the pretended processor."""


@dataclass(frozen=True)
class Collector:
    """Collects evidence from the places that the operator has named."""

    quote: Callable[[bytes], RawQuote]
    """Returns a quote that carries the given 64 bytes."""
    collateral: str = PCS
    """Of TDX: a file, or the URL of a service like Intel's."""
    certificates: Path | None = None
    """Of SNP: file with VCEK, ASK and ARK; None: the host hands them to its guest."""
    gpus: Callable[[bytes], list[GpuEvidence]] = field(default=lambda nonce: [])
    """Returns reports that name the given 32 bytes; by default none."""
    manifests: Sequence[Path] = ()
    """Reference manifests of NVIDIA."""

    @classmethod
    def simulated(cls, folder: Path) -> Collector:
        """Collect evidence of the pretended machine in `folder`."""
        machine = SimulatedMachine.kept(folder, CHIP)
        path = folder / "simulated-machine.pem"
        return cls(lambda data: RawQuote("snp", machine.report(data)), certificates=path)

    def collect(self, runtime_data: bytes) -> Evidence:
        """Return evidence that is bound to `runtime_data`.

        Raises `AttestationError` if a place gives none, or evidence of something else.
        """
        found = self.quote(report_data(runtime_data))
        gpus = self.gpus(gpu_nonce(runtime_data))
        manifests = [_text(path) for path in self.manifests]
        if found.tee == "snp":
            chain = self._snp_chain(found.auxblob)
            return Evidence(
                runtime_data, "snp", found.quote, certificates=chain, gpus=gpus,
                manifests=manifests,
            )  # fmt: skip
        return Evidence(
            runtime_data, "tdx", found.quote, self._tdx_collateral(found.quote),
            event_log=found.event_log, gpus=gpus, manifests=manifests,
        )  # fmt: skip

    def _snp_chain(self, auxblob: bytes) -> str:
        if self.certificates is not None:
            return _text(self.certificates)
        table = certificate_table(auxblob)
        if not table:
            raise AttestationError(
                "SNP: the host hands its guest no certificates; give VCEK, ASK and ARK with "
                "--certificates FILE"
            )
        chain = [each for der in table for each in read_certificates(der, "SNP certificates")]
        return "".join(each.public_bytes(Encoding.PEM).decode() for each in chain)

    def _tdx_collateral(self, quote: bytes) -> Mapping[str, str]:
        if "://" not in self.collateral:
            text = _text(Path(self.collateral))
        else:
            text = _fetched(self.collateral, quote)
        try:
            found: dict[str, Any] = json.loads(text)
            return {str(name): str(each) for name, each in found.items() if each is not None}
        except (ValueError, AttributeError):
            raise AttestationError(f"{self.collateral}: not collateral in JSON") from None


def _fetched(url: str, quote: bytes) -> str:
    if importlib.util.find_spec("dcap_qvl") is None:
        raise AttestationError(MISSING)
    import dcap_qvl

    async def ask() -> str:
        async with asyncio.timeout(COLLATERAL_SECONDS):
            found = await dcap_qvl.get_collateral(url, quote)
        return str(found.to_json())

    try:
        return asyncio.run(ask())
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AttestationError(f"{url}: no collateral ({reason})") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AttestationError(f"{path}: cannot be read ({error})") from None
