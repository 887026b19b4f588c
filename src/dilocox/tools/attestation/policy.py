"""The policy of a run: which machines its sites may be. A TOML file, known by its SHA-256."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dilocox.config.base import Section
from dilocox.errors import AttestationError
from dilocox.tools.attestation.tdx import Status

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Register = Annotated[str, Field(pattern=r"^[0-9a-f]{96}$")]
Version = Annotated[int, Field(ge=0, le=255)]


class TdxRules(Section):
    """`[tdx]`: accepted guests of Intel TDX. A guest that can be debugged is never accepted."""

    mrtd: Annotated[list[Register], Field(min_length=1)]
    """Accepted values of MRTD (the guest's firmware), 96 hex digits."""
    rtmr0: list[Register] = Field(default=[])
    """Accepted values of RTMR 0 (the virtual hardware). Empty: any."""
    rtmr1: Annotated[list[Register], Field(min_length=1)]
    """Accepted values of RTMR 1 (the kernel)."""
    rtmr2: Annotated[list[Register], Field(min_length=1)]
    """Accepted values of RTMR 2 (command line and first file system)."""
    rtmr3: list[Register] = Field(default=[])
    """Accepted values of RTMR 3 (what the guest itself measures). Empty: any."""
    compose_hashes: list[Digest] = Field(default=[])
    """Accepted applications of dstack: SHA-256 of the compose file, which the event log of RTMR 3
    must name. Empty: any, and machines need no event log."""
    tcb: list[Status] = Field(default=[])
    """Statuses of the platform that are accepted beside "UpToDate"."""


class SnpRules(Section):
    """`[snp]`: accepted guests of AMD SEV-SNP. Debugging and migration are never accepted."""

    measurements: Annotated[list[Register], Field(min_length=1)]
    """Accepted measurements of the launch, 96 hex digits."""
    min_tcb: dict[Literal["fmc", "bootloader", "tee", "snp", "microcode"], Version] = Field(
        default={}
    )
    """Least security version of parts of the platform."""
    smt: bool = True
    """Whether a guest may allow simultaneous multithreading."""
    max_vmpl: Annotated[int, Field(ge=0, le=3)] = 0
    """Largest number of the privilege level from which a report may be asked; 0 is the highest."""


class GpuRules(Section):
    """`[gpu]`: the NVIDIA GPUs of every machine. Without the section GPUs are not looked at."""

    count: Annotated[int, Field(ge=1, le=64)]
    """Number of different GPUs of a machine."""
    manifests: Annotated[list[Digest], Field(min_length=1)]
    """SHA-256 of NVIDIA's reference manifests (RIM) for driver and VBIOS. A GPU without
    confidential computing, or in the mode for developers, has other measurements."""
    drivers: list[str] = Field(default=[])
    """Accepted versions of the driver. Empty: any that the manifests fit."""
    vbios: list[str] = Field(default=[])
    """Accepted versions of the VBIOS. Empty: any that the manifests fit."""
    revocation: Literal["required", "not-run"]
    """"required": without an answer on revoked certificates the verdict is NOT_RUN. dilocox asks
    nobody, so it always is. "not-run": revoked certificates are not looked for, and the line of
    the claim says so."""


class SimulationRules(Section):
    """`[simulation]`: authorities that pretend to be makers of processors."""

    roots: Annotated[list[Digest], Field(min_length=1)]
    """SHA-256 of root certificates (DER) that are accepted beside those of the makers."""


class Policy(Section):
    """A policy file."""

    environment: Literal["production", "simulation"]
    """"simulation" accepts roots of `[simulation]`, and the verdict is never PASS."""
    max_age_rounds: Annotated[int, Field(ge=1, le=10**6)]
    """Rounds that may pass without new evidence of a machine."""
    tdx: TdxRules | None = None
    snp: SnpRules | None = None
    gpu: GpuRules | None = None
    simulation: SimulationRules | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tdx is None and self.snp is None:
            raise ValueError("name accepted machines: add [tdx] or [snp]")
        if self.simulation is not None and self.environment == "production":
            raise ValueError(
                "[simulation] names authorities of pretended machines, and the environment is "
                'production: remove the section, or set environment = "simulation"'
            )
        return self

    @property
    def simulated_roots(self) -> tuple[str, ...]:
        """SHA-256 of the roots that are accepted in simulation; empty in production."""
        return () if self.simulation is None else tuple(self.simulation.roots)


@dataclass(frozen=True)
class PolicyFile:
    """A policy with its digest, which the run file names."""

    policy: Policy
    digest: str
    """SHA-256 of the file's bytes, hex."""

    @classmethod
    def read(cls, path: Path) -> PolicyFile:
        """Read a policy file. Raises `AttestationError` with the key, the reason and the remedy."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise AttestationError(f"{path}: cannot be read ({error.strerror})") from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, where: str) -> PolicyFile:
        """Parse the bytes of a policy file; `where` names it in errors. Raises like `read`."""
        try:
            raw = tomllib.loads(data.decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise AttestationError(f"{where}: not valid TOML: {error}") from None
        except RecursionError:
            raise AttestationError(f"{where}: not a policy: nested too deeply") from None
        try:
            return cls(Policy.model_validate(raw), hashlib.sha256(data).hexdigest())
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            text = first["msg"].removeprefix("Value error, ")
            raise AttestationError(f"{where}: {key + ': ' if key else ''}{text}") from None
