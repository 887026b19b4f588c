"""Sites that name a file of functions, by commands alone: they train as `dilocox.train` does with
the same functions, another file is refused, and an audit with the file repeats the rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_operations import coordinate, flush_digests, join_lines
from tests.support import own_functions
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SETS = (
    "outer.rounds=2", "site.stages=1", "inner.optimizer=sgd", "record.states_every=1", PATIENT,
)  # fmt: skip


def audited(workshop: Workshop, forge: Forge, run: ForkedRun, *more: str) -> dict[str, str]:
    """Verdicts on round 1, by site, and their reasons."""
    words = ("audit", str(run.folder), "--round", "1", "--json", *more)
    audit = forge.command(workshop, run.folder.name, *words)
    audit.wait()
    return {v["site"]: v["verdict"] for v in json.loads(audit.printed())["verdicts"]}


def test_sites_with_one_file(workshop: Workshop, forge: Forge) -> None:
    text = Path(own_functions.__file__).read_text().replace("def enough", "def _enough")
    places = [workshop.root / f"code-{name}" / "hooks.py" for name in ("a", "b", "other")]
    for path in places:
        path.parent.mkdir()
        path.write_text(text)
    places[2].write_text(f"{text}\n")
    named = [("--set", f"site.code={path}") for path in places]

    words = workshop.run_file("code", *SETS)
    run = coordinate(forge, workshop, "code", *words, *named[0])
    lines = join_lines(run)
    stranger = forge.command(workshop, "code", *lines["lyon"], *named[2])
    assert stranger.wait() == 1
    assert "copy the same file to the coordinator and to every site" in stranger.printed()
    sites = [
        forge.command(workshop, "code", *lines["paris"]),
        forge.command(workshop, "code", *lines["lyon"], *named[1]),
    ]
    assert [site.wait() for site in sites] == [0, 0], sites[0].output()
    assert run.wait() == 0, run.output()
    assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    assert audited(workshop, forge, run) == {"lyon": "NOT_RUN", "paris": "NOT_RUN"}
    found = audited(workshop, forge, run, "--code", str(places[1]))
    assert found == {"lyon": "EXACT", "paris": "EXACT"}
    assert verdicts(run.folder) == {"beacon": "NOT_RUN"}

    plain = forge.train(workshop, "code-train", *SETS, hooks="own-functions")
    assert plain.wait() == 0, plain.output()
    assert flush_digests(run) == flush_digests(plain)
    assert len(flush_digests(run)) == 1
