"""web3 is imported without its limit of recursion."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from dilocox.errors import SettlementError
from dilocox.tools.settlement.web3_package import load_web3

NESTED = """
import sys
from dilocox.tools.settlement.web3_package import load_web3
from dilocox.utils.json_lines import object_of

before = sys.getrecursionlimit()
load_web3()
import web3
assert sys.getrecursionlimit() == before
assert object_of("[" * 1_000_000) is None
"""


@pytest.mark.slow
def test_json_of_a_stranger_cannot_end_a_process_that_has_web3() -> None:
    """A process of its own, because a limit that is raised stays, and a fault ends the process."""
    pytest.importorskip("web3")
    done = subprocess.run(
        [sys.executable, "-c", NESTED], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SettlementError, match=r"web3 is not installed: pip install 'dilocox\[chain"
    ):
        load_web3()
