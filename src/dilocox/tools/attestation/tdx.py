"""Intel TDX quotes, verified by dcap-qvl with archived collateral."""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.hazmat.primitives.serialization import Encoding

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import INTEL, fingerprint, read_certificates

MISSING = "TDX quotes need dcap-qvl: pip install 'dilocox[tee]'"
Status = Literal[
    "UpToDate",
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
]
"""TCB statuses that a policy may accept; "Revoked" is never accepted."""
_NO_LIMIT = 1 << 33
"""Seconds: a policy that accepts platforms that are out of date sets no limit in time."""


class MissingLibraryError(AttestationError):
    """This machine cannot judge the evidence, which may be sound."""


@dataclass(frozen=True)
class TdxQuote:
    """What a verified quote says. Registers are SHA-384, hex."""

    report_data: bytes
    """64 bytes."""
    mrtd: str
    rtmrs: tuple[str, str, str, str]
    status: str
    """TCB status of the platform by the collateral."""
    advisories: tuple[str, ...]
    root: str
    """SHA-256 of the root certificate, hex."""
    expires: datetime.datetime
    """Moment at which the first part of the collateral expires."""


def verify_tdx(
    quote: bytes,
    collateral: Mapping[str, str],
    when: datetime.datetime,
    statuses: Sequence[str] = (),
    further_roots: Collection[str] = (),
) -> TdxQuote:
    """Check a quote as of `when`.

    Args:
        quote: The quote, version 4 or 5.
        collateral: What Intel publishes about the platform, in dcap-qvl's form; binary values are
            hex.
        when: Moment at which the collateral must be valid.
        statuses: TCB statuses that are accepted beside "UpToDate".
        further_roots: SHA-256, hex, of roots that are accepted beside Intel's.

    Raises:
        AttestationError: The quote or the collateral is not authentic, the guest can be debugged,
            the status is not accepted.
        MissingLibraryError: dcap-qvl is not installed.
    """
    if importlib.util.find_spec("dcap_qvl") is None:
        raise MissingLibraryError(MISSING)
    import dcap_qvl

    root, authority = _root(collateral, further_roots)
    now = int(when.timestamp())
    # Facts of nearly all servers, about which a policy here has no say.
    policy = dcap_qvl.QuotePolicy.strict(now).accepted_sgx_types([0, 1, 2])
    policy = policy.allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    for each in statuses:
        policy = policy.allow_status(each)
    if any(each.startswith("OutOfDate") for each in statuses):
        policy = policy.platform_grace_period(_NO_LIMIT).qe_grace_period(_NO_LIMIT)
    try:
        found = dcap_qvl.QuoteVerifier(authority).verify_with_policy(
            quote, dcap_qvl.QuoteCollateralV3.from_json(json.dumps(collateral)), now, policy
        )
        said: dict[str, Any] = json.loads(found.to_json())
    except (ValueError, RuntimeError) as error:
        raise AttestationError(f"TDX quote: {' '.join(str(error).split())}") from None
    report = dcap_qvl.Quote.parse(quote).report
    if isinstance(report, dcap_qvl.SgxEnclaveReport):
        raise AttestationError("TDX quote: it is a quote of an SGX enclave")
    first, second, third, fourth = (
        each.hex() for each in (report.rt_mr0, report.rt_mr1, report.rt_mr2, report.rt_mr3)
    )
    return TdxQuote(
        report_data=report.report_data,
        mrtd=report.mr_td.hex(),
        rtmrs=(first, second, third, fourth),
        status=str(said["tcb"]["status"]),
        advisories=tuple(said["tcb"]["advisory_ids"]),
        root=root,
        expires=datetime.datetime.fromtimestamp(
            min(said["earliest_expiration_date"], said["qe_iden_earliest_expiration_date"]),
            datetime.UTC,
        ),
    )


def _root(
    collateral: Mapping[str, str], further_roots: Collection[str]
) -> tuple[str, bytes | None]:
    """Return the SHA-256 of the root to verify with, and its DER; None: Intel's, in dcap-qvl."""
    text = str(collateral.get("tcb_info_issuer_chain", ""))
    last = read_certificates(text.encode(), "TDX collateral")[-1]
    root = fingerprint(last)
    if root == INTEL:
        return root, None
    if root not in further_roots:
        raise AttestationError(
            f"TDX quote: its root {last.subject.rfc4514_string()} ({root[:12]}…) is not accepted"
        )
    return root, last.public_bytes(Encoding.DER)
