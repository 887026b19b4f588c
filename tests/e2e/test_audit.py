"""Real runs whose rounds are repeated: in a fresh process, beside the run, of ranks in stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import paths_of, read_all
from dilocox.record.log.transparency_log import read_log
from tests.support.harness import PATIENT, Run, Workshop, verdicts

pytestmark = [pytest.mark.runs, pytest.mark.slow]
KEPT = ("record.states_every=1", "checkpoint.every_rounds=0", PATIENT)
SOON = "network.heartbeat=5"
"""A stop takes effect two beats later, which is not to be after the run."""


def audited(workshop: Workshop, folder: Path, *more: str, code: int = 0) -> str:
    """`dilocox audit`, or what `more` begins with, to its end; what it printed."""
    command = more if more and more[0] == "auditor" else ("audit", *more)
    run = Run([command[0], str(folder), *command[1:]], folder)
    workshop.runs.append(run)
    assert run.wait() == code, run.printed()
    return run.printed()


@pytest.mark.parametrize(
    "sets",
    [
        (),
        (
            "site.stages=1",
            "compression.codec=topk:64",
            "outer.overlap=eager",
            "outer.slots=1",
            "outer.fragments=1",
        ),
        (
            "outer.momentum_dtype=bf16",
            "compression.codec=lowrank:4",
            "site.stages=1",
            "outer.fragments=1",
        ),
        ("outer.exchange=reduce", "site.stages=1", "site.shards=2"),
    ],
    ids=["stages", "eager-topk", "lowrank", "reduce-shards"],
)
def test_a_run_is_repeated_bit_for_bit(
    workshop: Workshop, sets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = f"audited-{request.node.callspec.id}"
    run = workshop.train(name, *KEPT, *sets)
    found = json.loads(audited(workshop, run.folder, "--json"))
    assert {(each["round"], each["site"]) for each in found["verdicts"]} == {
        (round_, site)
        for round_ in range(4)  # the flush is the last
        for site in ("paris", "lyon")
    }
    assert {each["verdict"] for each in found["verdicts"]} == {"EXACT"}, found
    # What was repeated is in the table of claims; without public randomness nothing is said of it.
    assert verdicts(run.folder) == {"beacon": "NOT_RUN"}


def test_an_auditor_beside_a_run(workshop: Workshop) -> None:
    """It ends with the run, has audited all that was selected, the log names it, and the run is not
    disturbed."""
    run = workshop.start("beside", *KEPT, "record.audit_rate=1.0", "outer.rounds=6")
    run.until(lambda: (run.folder / "record" / "checkpoint").exists())
    run.until(lambda: (run.folder / "run.toml").exists())
    text = audited(workshop, run.folder, "auditor", "--hand-in")
    assert run.wait() == 0, run.output()
    assert text.count("EXACT") == 14, text
    assert "named in the run's log: 14" in text
    identity = s.opened(read_log(run.folder / "record").entries[0])[0].run
    first = min(read_all(run.folder, identity), key=lambda each: each.selection.size)
    assert first.selection.by == "beacon"
    assert verdicts(run.folder) == {"beacon": "NOT_RUN"}
    paths_of(run.folder)[0].unlink()
    assert verdicts(run.folder) == {"beacon": "NOT_RUN", "audits": "NOT_RUN"}


def test_a_resumed_run_is_repeated(workshop: Workshop) -> None:
    """What was trained before the stop and what was trained after it."""
    run = workshop.start("again", *KEPT, SOON, "outer.rounds=14", "outer.inner_steps=24")
    run.until_round(2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    again = workshop.start("again", *KEPT, SOON, "outer.rounds=14", "outer.inner_steps=24",
                           flags=("--resume",))  # fmt: skip
    assert again.wait() == 0, again.output()
    found = json.loads(audited(workshop, run.folder, "--site", "lyon", "--json"))
    assert [each["verdict"] for each in found["verdicts"]] == ["EXACT"] * 15, found


def test_private_text_stays(workshop: Workshop) -> None:
    """A site with text of its own signs its states and keeps none; the other is audited."""
    first = workshop.train("tokens", "outer.rounds=1", "checkpoint.every_rounds=0")
    own = first.folder.parent / "data"
    run = workshop.train("private", *KEPT, f"sites.lyon.data={own}")
    text = audited(workshop, run.folder, "--round", "1", code=3)
    assert "EXACT       round 1    paris" in text
    assert "NOT_RUN     round 1    lyon: the site trains on text of its own" in text
    assert verdicts(run.folder) == {"beacon": "NOT_RUN"}
