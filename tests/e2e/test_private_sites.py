"""A whole run of two sites with text of their own, whose contributions are clipped and noised."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dilocox.cli.status import lines
from dilocox.config.run_config import load_run
from dilocox.coordinator.metrics.privacy import epsilon
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.tools.report.status import status_of
from dilocox.training.launch.data_preparation import prepare_data
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs
CLIP, NOISE = 0.01, 10.0
ROUNDS = 3


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_two_private_sites(workshop: Workshop) -> None:
    """Every contribution is noised on the wire, is counted, and can be replayed by everybody."""
    pytest.importorskip("dp_accounting")
    own = [f"sites.{site}.data={workshop.root / f'own-{site}'}" for site in ("paris", "lyon")]
    path, *sets = workshop.run_file("private-sites")
    config = load_run(path, sets[1::2])
    prepare_data(config, None)
    for site in ("paris", "lyon"):
        shutil.copytree(config.data_folder, workshop.root / f"own-{site}")
    run = workshop.train(
        "private-sites", *own, PATIENT, f"outer.rounds={ROUNDS}", f"privacy.clip={CLIP}",
        f"privacy.noise={NOISE}", "compression.codec=bf16", "admission.scores=true",
        "compression.error_feedback=false", "outer.learning_rate=1.0", "outer.momentum=0.0",
    )  # fmt: skip

    expected = epsilon(NOISE, 1e-6, ROUNDS + 1)
    figures = {"contributions": ROUNDS + 1, "epsilon": expected, "delta": 1e-6}
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["privacy"] == {"paris": figures, "lyon": figures}
    said = f"epsilon {expected:.3g} at delta 1e-06 after {ROUNDS + 1} contributions"
    assert f"privacy           lyon: {said}" in run.output()
    assert f"privacy        lyon: {said}" in list(lines(status_of(run.folder, 0.0), 0.0))
    page = build(read_run(run.folder), 0.0)
    assert ("privacy of the text of paris", said) in page.totals

    # With an outer learning rate of 1, the anchor moves by the mean of the two sites' noise in each
    # exchange. What they have learned is at most CLIP long altogether. Qwen3 begins with 0.02.
    parts = [load_file(file).values() for file in (run.folder / "model").glob("*.safetensors")]
    values = torch.cat([each.flatten() for part in parts for each in part if each.ndim == 2])
    deviation = math.sqrt(0.02**2 + (ROUNDS + 1) * (NOISE * CLIP) ** 2 / 2)
    assert float(values.std()) == pytest.approx(deviation, rel=0.03)
    scores = [each for each in metrics_of(run.folder) if each["kind"] == "admission"]
    assert len(scores) == 4 * 2 * (ROUNDS + 1), "two fragments of two stages, of two sites"
    assert all(abs(each["cosine"]) < 150 for each in scores), "nobody shares the noise"
    assert verdicts(run.folder) == {}, "every outer step is replayed"
