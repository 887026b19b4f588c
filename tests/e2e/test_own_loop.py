"""Sites whose inner steps are taken by loops of their users: stopped, crashed, verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.test_operations import coordinate, flush_digests
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own-loop" / "gpt.py")
SCRIPT = str(Path(__file__).parents[1] / "support" / "own_loop.py")
OWN = ("sites.paris.own_code=true", "sites.lyon.own_code=true")
SETS = (
    "site.stages=1", "site.micro_batch_size=4", "inner.optimizer=sgd", "inner.clip=0",
    "checkpoint.every_rounds=0", PATIENT,
)  # fmt: skip


def loop(
    forge: Forge, workshop: Workshop, name: str, site: str, words: list[str], mode: str = "plain"
) -> ForkedRun:
    """Begin the loop of one site. `words`: run file and overrides of the coordinator."""
    sets = [word for word in words[1:] if word != "--set"]
    return forge.command(workshop, name, "python", SCRIPT, words[0], site, mode, *sets)


def test_a_loop_and_dilocox_train_end_in_the_same_bits(workshop: Workshop, forge: Forge) -> None:
    """The loops are stopped on the way and go on, and the run is verified."""
    usual = forge.train(workshop, "usual", *SETS, "outer.rounds=5", hooks="adamw")
    assert usual.wait() == 0, usual.output()
    words = workshop.run_file("loops", *SETS, *OWN, "outer.rounds=5", "record.states_every=1")
    run = coordinate(forge, workshop, "loops", *words)
    sites = [loop(forge, workshop, "loops", site, words) for site in ("paris", "lyon")]
    run.until_round(1)
    run.interrupt()
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert run.wait() == 130, run.output()
    assert {site.last_line() for site in sites} == {"stopped"}
    run = coordinate(forge, workshop, "loops", *words, "--resume")
    sites = [loop(forge, workshop, "loops", site, words) for site in ("paris", "lyon")]
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert flush_digests(run) == flush_digests(usual)
    assert len(flush_digests(run)) == 1
    summaries = [each.summary() for each in (run, usual)]
    assert summaries[0]["val_loss_last"] == summaries[1]["val_loss_last"]
    # Nobody can repeat the steps of a loop that is not dilocox's own.
    assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    words = ["audit", str(run.folder), "--round", "1", "--site", "lyon", "--json"]
    audit = forge.command(workshop, "loops", *words)
    audit.wait()
    (verdict,) = json.loads(audit.printed())["verdicts"]
    assert verdict["verdict"] == "NOT_RUN"
    assert "the site's own program replaces loop, as the run file allows" in verdict["reason"]


@pytest.mark.slow
def test_a_loop_that_crashes_joins_again(workshop: Workshop, forge: Forge) -> None:
    """Its partner has optimizers, a scaler and data of its own, and goes on alone meanwhile.

    Later the site asks to leave.
    """
    words = workshop.run_file("crash", *SETS, *OWN, "outer.rounds=12", "outer.min_sites=1")
    run = coordinate(forge, workshop, "crash", *words)
    paris = loop(forge, workshop, "crash", "paris", words, "busy")
    lyon = loop(forge, workshop, "crash", "lyon", words, "dies")
    assert lyon.wait() == 1
    assert lyon.last_line() == "ZeroDivisionError: a mistake of the loop"
    run.until(lambda: "its loop ended by ZeroDivisionError: a mistake of the loop" in run.printed())
    before = run.records("round", "lyon")
    lyon = loop(forge, workshop, "crash", "lyon", words, "leaves")
    assert [paris.wait(), lyon.wait()] == [0, 0], paris.printed() + lyon.printed()
    assert (lyon.last_line(), paris.last_line()) == ("left", "finished")
    assert run.wait() == 0, run.output()
    after = run.records("round", "lyon")[len(before) :]
    assert after
    assert {report["anchor_digest"] for report in after} <= {
        report["anchor_digest"] for report in run.records("round", "paris")
    }
    reports = run.records("round", "paris")
    assert {report["tokens"] for report in reports} == {8 * 100}
    assert not verdicts(run.folder)


def test_a_model_that_only_the_sites_know(workshop: Workshop, forge: Forge) -> None:
    """The example. Every site begins with weights of its own; the first site's count."""
    words = workshop.run_file(
        "gpt", *SETS, *OWN, "outer.rounds=3", "evaluation.every_rounds=1",
        model="[model]\nown = true\n",
    )  # fmt: skip
    run = coordinate(forge, workshop, "gpt", *words)
    sets = [word for word in words[1:] if word != "--set"]
    sites = [
        forge.command(workshop, "gpt", "python", EXAMPLE, words[0], site, *sets)
        for site in ("paris", "lyon")
    ]
    assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
    assert run.wait() == 0, run.output()
    ends = {site.last_line() for site in sites}
    assert len(ends) == 1
    assert ends.pop().startswith("finished ")
    assert len(flush_digests(run)) == 1
    summary = run.summary()
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.2
    assert verdicts(run.folder) == {"start": "NOT_RUN"}
    tensors = load_file(run.folder / "model" / "model.safetensors")
    assert tensors["tokens.weight"].shape == (300, 64)
    tensors["tokens.weight"][0, 0] += 1.0
    save_file(tensors, run.folder / "model" / "model.safetensors")
    assert verdicts(run.folder)["model"] == "FAIL"
