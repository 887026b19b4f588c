"""GPU reports of this machine, by NVIDIA's command `nvattest`.

Source: NVIDIA Attestation SDK CLI, command reference, `nvattest collect-evidence`.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess

from dilocox.errors import AttestationError
from dilocox.tools.attestation.evidence import GpuEvidence

SECONDS = 120.0
"""Time limit of the command."""
_FORMATS: tuple[list[str], ...] = (["--format", "json"], [])
"""Older versions know no `--format`, and print JSON without it."""


def collect_gpus(nonce: bytes, command: str = "nvattest") -> list[GpuEvidence]:
    """Return the reports of all GPUs of this machine.

    Args:
        nonce: 32 bytes that each report names.
        command: The command, with further words if it needs them.

    Raises:
        AttestationError: The command fails, or prints something else.
    """
    words = shlex.split(command)
    asked = ["collect-evidence", "--device", "gpu", "--nonce", nonce.hex()]
    reason = ""
    for more in _FORMATS:
        try:
            found = subprocess.run(  # noqa: S603 - the operator names the command
                [*words, *asked, *more], capture_output=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AttestationError(f"{command}: no GPU reports ({error})") from None
        if found.returncode == 0:
            return _parsed(found.stdout, command)
        lines = found.stderr.decode("utf-8", "replace").split("\n")
        reason = next(filter(None, (line.strip() for line in reversed(lines))), "no reason given")
    raise AttestationError(f"{command}: no GPU reports (exit code {found.returncode}: {reason})")


def _parsed(data: bytes, command: str) -> list[GpuEvidence]:
    try:
        said = json.loads(data)
        return [
            GpuEvidence(
                base64.b64decode(each["evidence"], validate=True),
                base64.b64decode(each["certificate"], validate=True).decode("ascii"),
            )
            for each in said["evidences"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AttestationError(f"{command}: prints something else than GPU reports") from None
