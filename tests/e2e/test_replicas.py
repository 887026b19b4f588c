"""Sites of several replicas in real runs: hybrid sharding, of which other sites know nothing."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_engine import largest_difference, model_of
from tests.support.forge import Forge
from tests.support.harness import LIMIT, PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SETS = (
    "site.batch_size=8",
    "outer.rounds=2",
    "compression.codec=none",
    "admission.aggregation=clip",
    "admission.gate=true",
    "admission.gate_sequences=8",
    "record.states_every=1",
    "checkpoint.every_rounds=1",
    PATIENT,
)
REPLICAS = ("site.replicas=2", "site.stages=2", *SETS)


def test_replicas_are_trained_and_audited(workshop: Workshop, forge: Forge) -> None:
    plain = workshop.train("replicas-1", "site.stages=2", *SETS)
    through = workshop.train("replicas-2", *REPLICAS)
    assert "2 sites x 2 replicas x 2 stages x 1 shard" in through.printed()
    assert largest_difference(model_of(plain), model_of(through)) < 2e-4
    assert verdicts(through.folder) == {"beacon": "NOT_RUN", "audits": "NOT_RUN"}
    logs = sorted(path.name for path in (through.folder / "logs").glob("paris-*.log"))
    assert len(logs) == 4
    assert "paris-stage1-shard0-replica1.log" in logs

    audit = forge.command(
        workshop, "replicas-2", "audit", str(through.folder), "--round", "1", "--json"
    )
    assert audit.wait(LIMIT) == 0, audit.output()
    found = json.loads(audit.printed())["verdicts"]
    assert {each["verdict"] for each in found} == {"EXACT"}, found
    rounds = {(each["site"], each["round"]) for each in found}
    assert rounds == {("paris", 1), ("lyon", 1)}


@pytest.mark.slow
def test_a_killed_replica_takes_its_site_down_which_comes_back(
    workshop: Workshop, forge: Forge
) -> None:
    run = forge.train(
        workshop,
        "replica-dies",
        "site.replicas=2",
        "site.stages=1",
        *SETS,
        "outer.rounds=12",
        hooks="replica-dies",
    )
    assert run.wait() == 0, run.output()
    said = run.printed()
    assert "lyon-stage0-shard0-replica1 was killed" in said
    assert "lyon enters" in said
    assert verdicts(run.folder).get("replay") is None


@pytest.mark.slow
def test_a_stopped_run_of_replicas_goes_on_bit_for_bit(workshop: Workshop, forge: Forge) -> None:
    """Its ranks end with the run, all of them, and go on with the same random numbers."""
    sets = ("site.replicas=2", "site.stages=1", *SETS, "outer.rounds=6", "network.heartbeat=5")
    through = workshop.train("replicas-through", *sets)
    cut = forge.train(workshop, "replicas-cut", *sets, hooks="slow-steps")
    cut.until(lambda: len(cut.records("round")) >= 2)
    cut.ctrl_c()
    assert cut.wait() == 130, cut.output()
    assert cut.left_behind() == {}
    again = workshop.start("replicas-cut", *sets, flags=("--resume",))
    assert again.wait() == 0, again.output()
    assert largest_difference(model_of(through), model_of(again)) == 0.0
