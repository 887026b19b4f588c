"""What a plan advises holds: a plan of the changed run says what the advice has promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.support.planned_runs import ARCHITECTURE, FREE, device, link, run

from dilocox.config.run_config import RunConfig, load_run
from dilocox.tools.planner.advice import SHORT
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.options import loss_rise
from dilocox.tools.planner.plan import RunPlan, plan_run
from dilocox.tools.planner.render import as_text

FAST, SLOW, FABRIC = 1e9, 1e6, 1e10
LARGE = {"batch_size": 8, "micro_batch_size": 8}
LONG = {"sequence_length": 64, "tokenizer": "given"}
LONGER = {**ARCHITECTURE, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Case:
    """A run at sites whose GPUs have `share` of the memory that the run needs."""

    sections: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.5
    rate: float = FAST
    """Bytes per second of the sites' links."""
    sizes: tuple[float, ...] = (1.0, 1.0)
    """Memory of each site's GPUs, as a factor."""
    nodes: int = 1
    host: float | None = None
    """Host memory of a machine, as a factor of what the run needs; None: unknown."""
    tokens: float | None = None
    pcie: float = 1e18
    """Bytes per second between a GPU and host memory."""

    def plan(self, folder: Path, text: str = "") -> RunPlan:
        """Plan the run as the command does with the arguments `text`, `--set KEY=VALUE ...`."""
        enough, host = self._enough, None
        if self.host is not None and enough.host is not None:
            host = int(self.host * enough.host.needed)
        file = folder / "run.toml"
        file.write_text(run(**self.sections).to_toml(), encoding="utf-8")
        config = load_run(file, text.split()[1::2])
        return self._of(config, int(self.share * enough.needed), host)

    @cached_property
    def _enough(self) -> RunPlan:
        """The run's plan where there is more memory than it needs."""
        return self._of(run(**self.sections), 10**12, None)

    def _of(self, config: RunConfig, memory: int, host: int | None) -> RunPlan:
        machine = replace(FREE, memory=host)
        places = [
            GpuPlacement(
                device(memory=int(size * memory), pcie_rate=self.pcie, host=machine),
                8 // self.nodes,
                self.nodes,
            )
            for size in self.sizes
        ]
        links = [link(self.rate)] * len(places)
        return plan_run(config, places, links, FABRIC, self.tokens, methods=())


TIGHT = {
    "activations": Case({"site": LARGE, "data": LONG}, 0.7),
    "a slow link": Case({"site": LARGE, "data": LONG}, 0.7, SLOW),
    "outer state on the GPU": Case(
        {"site": LARGE, "data": LONG, "outer": {"steps": 4000, "device": "model"}}, 0.9
    ),
    "exchanges": Case({"outer": {"steps": 4000, "device": "model"}}, 0.95),
    "shards": Case({"site": {"shards": 4, "batch_size": 32, "micro_batch_size": 8}}, 0.8),
    "stages": Case({"site": {"stages": 2, "batch_size": 16, "micro_batch_size": 4}}, 0.8),
    "several changes": Case({"site": LARGE, "data": LONG}, 0.12),
    "nothing helps": Case({"site": LARGE, "data": LONG}, 0.01),
    "another site is smaller": Case({"site": LARGE, "data": LONG}, 0.8, sizes=(1.0, 0.8)),
    "another site has less to do": Case(
        {"site": LARGE, "data": LONG, "sites": {"lyon": {"batch_size": 16}, "paris": {}}},
        0.8,
        sizes=(1.0, 0.9),
    ),
    "as many tokens": Case(
        {
            "model": {"architecture": LONGER},
            "site": {"batch_size": 1, "micro_batch_size": 1},
            "data": {"sequence_length": 2 * SHORT, "tokenizer": "given"},
        },
        0.6,
        tokens=1e7,
    ),
    "little host memory": Case(
        {"site": LARGE, "data": LONG, "outer": {"steps": 4000, "device": "model"}}, 0.9, host=1.01
    ),
    "too little host memory": Case(
        {"site": LARGE, "data": LONG, "outer": {"steps": 4000, "device": "model"}}, 0.9, host=0.5
    ),
}  # fmt: skip
"""Runs that do not fit their GPUs."""


@pytest.mark.parametrize("name", TIGHT)
def test_advice_that_is_followed_plans_to_what_it_promised(name: str, tmp_path: Path) -> None:
    case = TIGHT[name]
    own = case.plan(tmp_path)
    assert not own.fits_devices
    assert own.advice
    for change in own.advice:
        followed = case.plan(tmp_path, change.text)
        assert followed.needed == change.needed, change.text
        assert followed.fits_devices is change.fits, change.text
        verdict = "fits" if change.fits else "still does not fit"
        assert (followed.available, followed.fullest.device.name) == (
            change.available, change.device
        )  # fmt: skip
        need = f"{change.needed / 2**30:.1f} of {change.available / 2**30:.1f} GiB of plain"
        assert f"  {change.text}: {need}, {verdict}\n" in as_text(own)
        assert own.host is not None
        assert followed.host is not None
        assert followed.host.fits or not own.host.fits, change.text
    assert any(change.fits for change in own.advice) is (name != "nothing helps")


OPTIONS = {
    "outer.device": Case({}, 3.0, 1e5, pcie=1e8),
    "outer.exchange": Case(
        {"sites": {"lyon": {}, "paris": {}, "rome": {}}, "outer": {"steps": 4000}},
        3.0, 1e5, (1.0, 1.0, 1.0),
    ),
    "as many tokens": Case({}, 3.0, 1e5, tokens=1e6, pcie=1e8),
}  # fmt: skip
"""Runs that a change of the run file makes faster or better."""


@pytest.mark.parametrize("name", OPTIONS)
def test_what_fits_too_plans_to_what_it_promised(name: str, tmp_path: Path) -> None:
    case = OPTIONS[name]
    own = case.plan(tmp_path)
    assert own.options
    for option in own.options:
        followed = case.plan(tmp_path, option.text)
        found, promised = followed.prediction, option.prediction
        assert found.tokens_per_second == promised.tokens_per_second
        assert found.choice == promised.choice
        assert found.payload_bytes == promised.payload_bytes
        assert loss_rise(followed.config, found.choice) == option.loss
        assert (followed.needed, followed.available) == (option.needed, option.available)
        assert followed.fits


def test_a_hybrid_layout_takes_the_step_that_was_promised(tmp_path: Path) -> None:
    """Also where the GPUs of the sites differ."""
    site = {"shards": 8, "batch_size": 32, "micro_batch_size": 2, "gradient_sync": "micro-batch"}
    for sizes in ((1.0, 1.0), (1.0, 0.9)):
        case = Case({"site": site}, 4.0, FAST, sizes, nodes=2)
        own = case.plan(tmp_path)
        assert own.hybrid is not None
        layout = own.hybrid
        text = f"--set site.replicas={layout.replicas} --set site.shards={layout.shards}"
        assert f"({text})" in as_text(own)
        followed = case.plan(tmp_path, text)
        assert followed.step == own.hybrid.step
        assert followed.fits
