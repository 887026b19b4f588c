"""A declared link that does not hold is told once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.metrics.declared_link import ROUNDS
from dilocox.coordinator.metrics.run_metrics import CHOSEN, RunMetrics
from tests.coordinator.metrics.test_run_metrics import row

BOTH = {"link": "63kbit", "step_seconds": 0.88}
PLAN = {
    **dict.fromkeys(CHOSEN, 1), "kind": "round", "round": 0, "first_step": 0, "reason": "r",
}  # fmt: skip


def lines(
    folder: Path,
    control: dict[str, Any],
    waits: list[tuple[float, float]],
    plan: dict[str, Any] | None = None,
) -> list[str]:
    """Report rounds in which two sites wait so long; return the messages about the link."""
    config = resolve_run(
        {
            "run": {"name": "r"}, "model": {"path": "x"}, "outer": {"method": "dilocox"},
            "control": control, "sites": {"paris": {}, "lyon": {}},
        }
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    metrics = RunMetrics(config, folder, lambda _: None)
    if plan is not None:
        metrics.plan({**PLAN, **plan})
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


def test_the_line_names_keys_if_messages_fill_the_link(tmp_path: Path) -> None:
    waits, short = [(0.7, 0.7)] * ROUNDS, {"inner_steps": 1, "fragments": 4}
    (line,) = lines(tmp_path / "a", BOTH, waits, short)
    assert line.endswith(
        ". Messages to the coordinator take some 82 kbit/s of the link in these rounds, and plans "
        'do not count them; this would: control.link = "36.6kbit", control.latency = 0.203, '
        "outer.fragments = 2"
    )
    for control, plan in ((BOTH, {**short, "inner_steps": 50}), ({**BOTH, "link": "1gbit"}, short)):
        folder = tmp_path / control["link"]
        (line,) = lines(folder, control, waits, plan)
        assert line.endswith("measures both")
    told = BOTH | {"latency": 0.2}  # the run file has counted messages
    (line,) = lines(tmp_path / "told", told, waits, short)
    assert line.endswith("measures both")


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
