"""The benchmark of links, on a small tensor and where one end fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks import links
from dilocox.errors import ExchangeError


def fails(_identity: Any, _store: Any, _folder: Path) -> NoReturn:
    """Stands for a way to connect the two ends that does not work here."""
    raise OSError(98, "Address already in use")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WAYS", {"links": fails})
    monkeypatch.setattr(links, "LIMIT", 20.0)


@pytest.mark.parametrize("both", [False, True])
def test_a_tensor_arrives_and_all_bytes_count(
    both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TENSOR_BYTES", 1 << 20)
    found = links.measure("links", both, 2, links.identities_in(tmp_path))
    assert found["gbit_per_s"] > 0
    assert found["cpu_s_per_gb"] > 0


@pytest.mark.usefixtures("broken")
def test_an_end_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    """For 120 s, until the failure was told as a lack of time."""
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="links: a process has failed"):
        links.measure("links", False, 1, links.identities_in(tmp_path))
    assert time.monotonic() - began < links.LIMIT


@pytest.mark.usefixtures("broken")
def test_a_failure_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(sys, "argv", ["links.py", "--quick"])
    assert links.main() == 1
    assert "links: links: a process has failed" in capsys.readouterr().err
