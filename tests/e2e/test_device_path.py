"""A real run whose outer state is on a device with streams, as far as a CPU can play one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_engine import largest_difference, model_of
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Run, Workshop, verdicts

pytestmark = [pytest.mark.stops, pytest.mark.slow]
SETS = ("record.states_every=1", "checkpoint.every_rounds=1", "site.stages=1", PATIENT)


@pytest.mark.parametrize(
    "sets",
    [
        ("compression.codec=topk:64", "outer.fragments=2"),
        ("compression.codec=lowrank:4", "outer.fragments=1"),
        ("compression.codec=int4", "outer.exchange=reduce", "outer.fragments=1"),
    ],
    ids=["topk", "lowrank", "reduce"],
)
def test_the_same_model_and_the_same_record(
    workshop: Workshop, forge: Forge, sets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    plain = workshop.train(f"plain-{name}", *SETS, *sets)
    played = forge.train(workshop, f"played-{name}", *SETS, *sets, hooks="played-device")
    assert played.wait() == 0, played.output()
    assert largest_difference(model_of(plain), model_of(played)) == 0.0
    # States that were copied beside training, and commitments to what was read in blocks.
    assert audited(workshop, played.folder) == {"EXACT"}
    assert verdicts(played.folder) == {"beacon": "NOT_RUN"}


def audited(workshop: Workshop, folder: Path) -> set[str]:
    """What `dilocox audit`, on a plain CPU, says of all rounds."""
    run = Run(["audit", str(folder), "--json"], folder)
    workshop.runs.append(run)
    assert run.wait() == 0, run.printed()
    return {each["verdict"] for each in json.loads(run.printed())["verdicts"]}
