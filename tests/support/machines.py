"""Evidence of pretended machines, and the policies that accept it."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.policy import Policy
from dilocox.tools.attestation.runtime_data import RuntimeData, gpu_nonce, report_data
from dilocox.tools.attestation.simulated_machine import MEASUREMENT, SimulatedMachine
from tests.support.simulated_gpu import DRIVER, VBIOS, SimulatedGpus, manifest
from tests.support.simulated_tdx import SimulatedTdx

NOW = datetime.datetime.now(datetime.UTC)
SAID = RuntimeData("1" * 64, "2" * 64, "paris", 3, 0, 1, "4" * 64, "5" * 64)
SNP = SimulatedMachine.new(bytes(range(64)))
TDX = SimulatedTdx(NOW)
GPUS = SimulatedGpus()
RIMS = [manifest(DRIVER, range(2)), manifest(VBIOS, range(2, 4))]
REGISTERS = {
    "mrtd": "91eb2b44d141d4ece09f0c75c2c53d247a3c68edd7fafe8a3520c942a604a407de03ae6dc5f87f27428b25"
    "38873118b7",
    "rtmr1": "0084452c01668329d4bc06acdf58a7205c26743304509973949e5619bf81a6a7aea8c323c173019b3093d"
    "54e579e9378",
    "rtmr2": "d833feef2cd945148aa38ead2c53e9b7f138190aaaebfc551dccd829fc207aa3ba80b70870d733073364"
    "2e01d48c3132",
}


def policy(**sections: Any) -> Policy:
    """A policy in simulation that accepts the machines above; sections may be replaced."""
    usual: dict[str, Any] = {
        "environment": "simulation",
        "max_age_rounds": 5,
        "snp": {"measurements": [MEASUREMENT.hex()]},
        "tdx": {name: [value] for name, value in REGISTERS.items()},
        "simulation": {"roots": [SNP.root, TDX.root_digest, GPUS.root_digest]},
    }
    given = {name: value for name, value in (usual | sections).items() if value is not None}
    return Policy.model_validate(given)


def gpu_rules(**keys: Any) -> dict[str, Any]:
    """The section `[gpu]` for one pretended GPU."""
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in RIMS]
    return {"count": 1, "manifests": digests, "revocation": "not-run", **keys}


def snp(said: RuntimeData = SAID, **changes: Any) -> Evidence:
    """Evidence of a machine of AMD SEV-SNP."""
    data = said.to_bytes()
    report = SNP.report(report_data(data), debug=changes.pop("debug", False))
    own: dict[str, Any] = {"quote": report, "certificates": SNP.certificates}
    return Evidence(**{"runtime_data": data, "tee": "snp", **own, **changes})


def tdx(said: RuntimeData = SAID, **changes: Any) -> Evidence:
    """Evidence of a machine of Intel TDX."""
    data = said.to_bytes()
    quote = TDX.quote(
        report_data(data), debug=changes.pop("debug", False), rtmrs=changes.pop("rtmrs", None)
    )
    own: dict[str, Any] = {"quote": quote, "collateral": TDX.collateral()}
    return Evidence(**{"runtime_data": data, "tee": "tdx", **own, **changes})


def with_gpus(count: int = 1, said: RuntimeData = SAID, **keys: Any) -> Evidence:
    """Evidence of a machine with pretended GPUs, whose reports are bound to it."""
    nonce = gpu_nonce(said.to_bytes())
    gpus = [GPUS.evidence(nonce, **keys) for _ in range(count)]
    return snp(said, gpus=gpus, manifests=RIMS)
