"""A declared link that does not hold is told once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.metrics.declared_link import ROUNDS
from dilocox.coordinator.metrics.run_metrics import RunMetrics
from tests.coordinator.metrics.test_run_metrics import row

BOTH = {"link": "63kbit", "step_seconds": 0.88}


def lines(folder: Path, control: dict[str, Any], waits: list[tuple[float, float]]) -> list[str]:
    """Report rounds in which two sites wait so long; return the messages about the link."""
    config = resolve_run(
        {
            "run": {"name": "r"}, "model": {"path": "x"}, "outer": {"method": "dilocox"},
            "control": control, "sites": {"paris": {}, "lyon": {}},
        }
    )  # fmt: skip
    metrics = RunMetrics(config, folder, lambda _: None)
    for number, shares in enumerate(waits):
        for site, share in zip(("paris", "lyon"), shares, strict=True):
            metrics.report(site, number, "round", row(number, wait_share=share))
    metrics.sync()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    texts = [each["text"] for each in records if each["kind"] == "message"]
    return [text for text in texts if "control.link" in text]


def test_rounds_that_wait_are_told_once(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, BOTH, [(0.76, 0.74)] * (3 * ROUNDS))
    assert line.startswith(f"all sites waited 74% of the last {ROUNDS} rounds, though")
    assert line.endswith("without the two keys dilocox measures both")


@pytest.mark.parametrize(
    ("control", "waits"),
    [
        (BOTH, [(0.74, 0.74)] * (ROUNDS - 1)),
        (BOTH, ([(0.74, 0.74)] * (ROUNDS - 1) + [(0.1, 0.1)]) * 2),
        (BOTH, [(0.74, 0.01)] * ROUNDS),  # paris waits for lyon, which is slow
        ({"link": "63kbit"}, [(0.74, 0.74)] * ROUNDS),
        ({}, [(0.74, 0.74)] * ROUNDS),
        ({**BOTH, "adapt": "off"}, [(0.74, 0.74)] * ROUNDS),  # no plan follows from the two keys
    ],
    ids=["few", "a pause", "a slow site", "step time is measured", "both are measured", "off"],
)
def test_nothing_else_is_told(
    tmp_path: Path, control: dict[str, Any], waits: list[tuple[float, float]]
) -> None:
    assert lines(tmp_path, control, waits) == []
