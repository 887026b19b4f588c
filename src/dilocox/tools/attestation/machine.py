"""Judges the evidence of one machine by a policy, offline, as of a given moment. Pure."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import read_certificates
from dilocox.tools.attestation.event_log import compose_hash, replay
from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.gpu import check_measurements, verify_gpu
from dilocox.tools.attestation.policy import GpuRules, Policy, SnpRules, TdxRules
from dilocox.tools.attestation.runtime_data import RuntimeData, gpu_nonce, report_data
from dilocox.tools.attestation.snp import SnpReport, verify_snp
from dilocox.tools.attestation.tdx import TdxQuote, verify_tdx


@dataclass
class Machine:
    """What evidence shows of a machine, if no rule of the policy is broken."""

    said: RuntimeData
    """The facts that the quote vouches for. The caller compares them with the log."""
    expires: datetime.datetime
    """Moment from which the same evidence is no longer accepted."""
    notes: list[str] = field(default_factory=list)
    """Phrases for the line of the claim."""
    simulated: bool = False
    """True if a root is not one of a maker of processors."""
    not_run: str = ""
    """Why a rule could not be judged; empty if all were."""


def judge_machine(evidence: Evidence, policy: Policy, when: datetime.datetime) -> Machine:
    """Check evidence by a policy.

    Args:
        evidence: The evidence.
        policy: The policy.
        when: Moment at which certificates and collateral must be valid.

    Raises:
        AttestationError: The evidence is not authentic, is bound to something else than its
            `runtime_data`, or breaks a rule of the policy.
    """
    simulated: set[str] = set()
    if evidence.tee == "tdx":
        if policy.tdx is None:
            raise AttestationError("a machine of Intel TDX: the policy has no [tdx]")
        quote = verify_tdx(
            evidence.quote, evidence.collateral or {}, when, policy.tdx.tcb, policy.simulated_roots
        )
        bound, expires, roots = quote.report_data, quote.expires, [quote.root]
    else:
        if policy.snp is None:
            raise AttestationError("a machine of AMD SEV-SNP: the policy has no [snp]")
        chain = read_certificates(evidence.certificates.encode(), "SNP report")
        report = verify_snp(evidence.quote, chain, when, policy.simulated_roots)
        bound, expires, roots = report.report_data, report.expires, [report.root]
    # The binding comes before any field: until then `runtime_data` is anybody's.
    if bound != report_data(evidence.runtime_data):
        raise AttestationError("the quote is not bound to this runtime_data")
    machine = Machine(RuntimeData.from_bytes(evidence.runtime_data), expires)
    if evidence.tee == "tdx":
        assert policy.tdx is not None
        machine.notes.append(_check_tdx(quote, evidence, policy.tdx))
    else:
        assert policy.snp is not None
        machine.notes.append(_check_snp(report, policy.snp))
    if policy.gpu is not None:
        roots += _check_gpus(evidence, policy.gpu, policy.simulated_roots, when, machine)
    simulated.update(set(roots) & set(policy.simulated_roots))
    machine.simulated = bool(simulated)
    return machine


def _check_tdx(quote: TdxQuote, evidence: Evidence, rules: TdxRules) -> str:
    if quote.mrtd not in rules.mrtd:
        raise AttestationError(f"TDX: MRTD {quote.mrtd[:16]}… is not accepted")
    accepted = (rules.rtmr0, rules.rtmr1, rules.rtmr2, rules.rtmr3)
    for number, (own, values) in enumerate(zip(quote.rtmrs, accepted, strict=True)):
        if values and own not in values:
            raise AttestationError(f"TDX: RTMR{number} {own[:16]}… is not accepted")
    _check_events(quote, evidence, rules)
    advisories = f" ({', '.join(quote.advisories)})" if quote.advisories else ""
    return f"TDX {quote.status}{advisories}"


def _check_events(quote: TdxQuote, evidence: Evidence, rules: TdxRules) -> None:
    if evidence.event_log is None:
        if rules.compose_hashes:
            raise AttestationError("TDX: no event log, so the application is not known")
        return
    for number, (own, made) in enumerate(zip(quote.rtmrs, replay(evidence.event_log), strict=True)):
        if own != made:
            raise AttestationError(f"TDX: the event log does not lead to the quote's RTMR{number}")
    found = compose_hash(evidence.event_log)
    if rules.compose_hashes and found not in rules.compose_hashes:
        raise AttestationError(f"TDX: application {(found or '(none)')[:16]} is not accepted")


def _check_snp(report: SnpReport, rules: SnpRules) -> str:
    if report.debug:
        raise AttestationError("SNP: the guest can be debugged, so its memory can be read")
    if report.migration:
        raise AttestationError("SNP: the guest can be migrated by an agent")
    if report.smt and not rules.smt:
        raise AttestationError("SNP: the guest allows simultaneous multithreading")
    if report.vmpl > rules.max_vmpl:
        raise AttestationError(f"SNP: asked for from privilege level {report.vmpl}")
    if report.measurement not in rules.measurements:
        raise AttestationError(f"SNP: measurement {report.measurement[:16]}… is not accepted")
    for part, least in rules.min_tcb.items():
        if report.tcb.get(part, -1) < least:
            raise AttestationError(
                f"SNP: {part} has security version {report.tcb.get(part, 'none')}, not {least}"
            )
    return "SNP"


def _check_gpus(
    evidence: Evidence,
    rules: GpuRules,
    further_roots: Collection[str],
    when: datetime.datetime,
    machine: Machine,
) -> list[str]:
    """Check all GPUs of a machine; return the SHA-256 of their roots."""
    manifests = [each.encode() for each in evidence.manifests]
    for each in manifests:
        digest = hashlib.sha256(each).hexdigest()
        if digest not in rules.manifests:
            raise AttestationError(f"GPU: reference manifest {digest[:12]}… is not accepted")
    if not manifests:
        raise AttestationError("GPU: no reference manifest is in the evidence")
    roots, keys = [], set()
    for number, own in enumerate(evidence.gpus):
        chain = read_certificates(own.certificates.encode(), f"GPU {number}")
        report = verify_gpu(own.report, chain, when, further_roots)
        if report.nonce != gpu_nonce(evidence.runtime_data):
            raise AttestationError(f"GPU {number}: its report is not bound to this machine")
        for what, value, accepted in (
            ("driver", report.driver, rules.drivers),
            ("VBIOS", report.vbios, rules.vbios),
        ):
            if accepted and value not in accepted:
                raise AttestationError(f"GPU {number}: {what} {value!r} is not accepted")
        check_measurements(report, manifests)
        roots.append(report.root)
        keys.add(report.key)
        machine.expires = min(machine.expires, report.expires)
    if len(keys) != rules.count or len(evidence.gpus) != rules.count:
        raise AttestationError(
            f"GPU: {len(keys)} different GPUs in {len(evidence.gpus)} reports instead of "
            f"{rules.count}"
        )
    machine.notes.append(f"{rules.count} GPUs, revocation NOT_RUN")
    if rules.revocation == "required":
        machine.not_run = "whether GPU certificates are revoked is not known offline"
    return roots
