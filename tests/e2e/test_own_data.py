"""A run that has no text: the sites' loops bring model, batches and held-out losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.config.run_config import load_run
from dilocox.errors import CheckpointError, ConfigError, DataError
from dilocox.record.verify.consumed_data import seen_by
from dilocox.training.launch.data_preparation import prepare_data
from dilocox.training.launch.preflight import Role, check
from dilocox.training.portable_checkpoint_export import hand_over
from tests.e2e.test_operations import coordinate, flush_digests
from tests.e2e.test_own_loop import OWN
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SCRIPT = str(Path(__file__).parents[1] / "support" / "own_data_loop.py")
RUN = """[run]
folder = "{folder}"
[model]
own = true
[data]
own = true
[inner]
optimizer = "sgd"
[site]
batch_size = 16
[outer]
inner_steps = 8
fragments = 2
[evaluation]
every_rounds = 1
[sites.paris]
[sites.lyon]
"""


def test_a_classifier_of_numbers(workshop: Workshop, forge: Forge) -> None:
    file = workshop.root / "numbers.toml"
    file.write_text(RUN.format(folder=workshop.folder("numbers")), encoding="utf-8")
    sets = [*OWN, "outer.rounds=5", PATIENT]
    words = [str(file), *(word for item in sets for word in ("--set", item))]
    run = coordinate(forge, workshop, "numbers", *words)
    sites = [
        forge.command(workshop, "numbers", "python", SCRIPT, str(file), site, *sets)
        for site in ("paris", "lyon")
    ]
    assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert len(flush_digests(run)) == 1
    summary = run.summary()
    assert summary["val_loss_last"] < summary["val_loss_first"] / 2
    assert len(run.records("evaluation", "paris")) == 6
    assert not run.records("evaluation", "lyon")
    assert {each["tokens"] for each in run.records("round", "paris")} == {8 * 16}
    assert verdicts(run.folder) == {"start": "NOT_RUN", "data": "NOT_RUN"}
    report = forge.command(workshop, "numbers", "report", str(run.folder))
    assert report.wait() == 0, report.output()
    published = forge.command(
        workshop,
        "numbers",
        "publish",
        str(run.folder),
        "--to",
        f"file://{workshop.root}/numbers-at",
    )
    assert published.wait() == 0, published.output()
    again = forge.command(workshop, "numbers", "verify", f"file://{workshop.root}/numbers-at")
    assert again.wait() == 0, again.output()
    refused(file, run.folder)


def test_running_means_go_on_after_a_stop(workshop: Workshop, forge: Forge) -> None:
    """They are in the checkpoint of their site, although sites do not exchange them."""
    file = workshop.root / "means.toml"
    file.write_text(RUN.format(folder=workshop.folder("means")), encoding="utf-8")
    sets = [*OWN, "outer.rounds=30", PATIENT]
    words = [str(file), *(word for item in sets for word in ("--set", item))]
    ends: list[str] = []
    for outcome, code in (("stopped", 130), ("finished", 0)):
        again = ["--resume"] if ends else []
        run = coordinate(forge, workshop, "means", *words, *again)
        sites = [
            forge.command(workshop, "means", "python", SCRIPT, str(file), site, *sets)
            for site in ("paris", "lyon")
        ]
        if not ends:
            run.until_round(1)
            run.interrupt()
        assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
        assert run.wait() == code, run.output()
        assert {site.last_line() for site in sites} == {outcome}
        begins = [said(site, "begins with ") for site in sites]
        assert begins == ends or not ends
        ends = [said(site, "ends with ") for site in sites]
        assert ends[0] != ends[1]
        assert begins[0] != ends[0]


def said(site: ForkedRun, begin: str) -> str:
    """What a line of a loop says after `begin`."""
    lines = [line for line in site.printed().splitlines() if line.startswith(begin)]
    assert len(lines) == 1
    return lines[0].removeprefix(begin)


def refused(file: Path, folder: Path) -> None:
    """What needs text is refused, each by one line."""
    config = load_run(file, [*OWN, "outer.rounds=5"])
    with pytest.raises(ConfigError, match=r"data\.own: the run has no text"):
        prepare_data(config)
    for role in (Role("train"), Role("join", site="paris", url="https://127.0.0.1:1")):
        with pytest.raises(ConfigError, match=r"data\.own: the run has no text"):
            check(config, role)
    with pytest.raises(DataError, match="brought the data"):
        seen_by(folder, rounds=None, tick=None)
    with pytest.raises(CheckpointError, match="continues token ranges of text, and the run has"):
        hand_over(folder, folder / "handed")
