"""Skips that CI does not allow."""

from __future__ import annotations

import importlib.util
import re

import pytest

AVOIDABLE = re.compile(r"not installed|could not import|No module named|no Chromium")
"""Reasons of skips for a package or a program that the setup brings. Other reasons are of the
machine: its processor, its kernel, the rights of its user."""


def as_in_ci(report: pytest.TestReport) -> pytest.TestReport:
    """Return a test's report as CI counts it: a skip fails if `make setup-dev` installs the missing
    package or program."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    if AVOIDABLE.search(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}: in CI nothing that the setup brings may be missing"
    return report


def need(*packages: str) -> None:
    """Skip the module's tests if a package is not installed. No package is imported.

    `pytest.importorskip` imports, in each process that collects the module: seconds for some.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
