"""The result of `dilocox verify` as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dilocox.record.verify.verify import Report


def as_json(report: Report) -> dict[str, Any]:
    """Return the values that `--json` prints."""
    return {
        "run": report.run,
        "log": report.log,
        "checkpoint": report.checkpoint,
        "statements": report.statements,
        "rounds": report.rounds,
        "exit_code": report.exit_code,
        "claims": [
            {
                "verdict": finding.verdict,
                "reason": finding.reason,
                **asdict(finding.claim),
            }
            for finding in report.findings
        ],
    }
