"""Which skips fail in CI."""

from __future__ import annotations

import sys

import pytest

from tests.support.skips import as_in_ci, need


def report(reason: str, outcome: str = "skipped") -> pytest.TestReport:
    longrepr = ("tests/test_some.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_some", ("", 1, ""), {}, outcome, longrepr, "call")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reason",
    [
        "torchft is not installed (extra: peers)",
        "could not import 'datasets': No module named 'datasets'",
        "no Chromium on this machine (Debian: apt-get install chromium)",
    ],
)
def test_what_the_setup_brings_may_not_be_missing(reason: str) -> None:
    assert as_in_ci(report(reason)).outcome == "failed"


@pytest.mark.parametrize(
    "reason", ["this processor has no AVX512", "network namespaces need root and `ip`"]
)
def test_what_a_machine_lacks_is_skipped(reason: str) -> None:
    assert as_in_ci(report(reason)).outcome == "skipped"


def test_a_test_that_passes_stays_so() -> None:
    assert as_in_ci(report("torchft is not installed", "passed")).outcome == "passed"


def test_a_needed_package_is_not_imported() -> None:
    need("tabnanny")
    assert "tabnanny" not in sys.modules
    with pytest.raises(pytest.skip.Exception, match=r"^no_such_package is not installed$"):
        need("tabnanny", "no_such_package")
