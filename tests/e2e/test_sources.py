"""A run on two sources with weights: stopped, resumed, verified, repeated."""

from __future__ import annotations

import json

import pytest

from tests.support.harness import ARCHITECTURE, RUN, Workshop, verdicts

pytestmark = [pytest.mark.stops, pytest.mark.slow]

SITES = ("nice", "brest")
SOURCES = """
[[data.sources]]
name = "first"
source = "{text}"
weight = 3
[[data.sources]]
name = "second"
source = "{other}"
weight = 1
epochs = 1.5
"""


def write_run_file(workshop: Workshop) -> None:
    """The run file that the workshop's runs of `SITES` use, with sources in place of one text."""
    other = workshop.root / "other.jsonl"
    notes = [{"text": f"note {n}: all is well at the place with number {n}"} for n in range(400)]
    other.write_text("".join(json.dumps(note) + "\n" for note in notes))
    text = RUN.format(
        name="run",
        root=workshop.root,
        model=ARCHITECTURE,
        text=workshop.text,
        sites="\n".join(f"[sites.{site}]" for site in SITES),
    )
    tables = SOURCES.format(text=workshop.text, other=other)
    text = text.replace(f'source = "{workshop.text}"\n', "").replace(
        "[site]\n", f"{tables}[site]\n"
    )
    (workshop.root / f"run-{'-'.join(SITES)}.toml").write_text(text)


def test_weighted_sources_are_resumed_verified_and_repeated(workshop: Workshop) -> None:
    write_run_file(workshop)
    sets = (
        f"data.folder={workshop.root / 'sources-data'}",
        "record.states_every=1",
        "checkpoint.every_rounds=0",
        "network.heartbeat=5",
        "outer.rounds=16",
        "outer.inner_steps=24",
    )
    whole = workshop.train("sources-whole", *sets, sites=SITES)
    cut = workshop.start("sources-cut", *sets, sites=SITES)
    cut.until_round(2)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()
    again = workshop.start("sources-cut", *sets, flags=("--resume",), sites=SITES)
    assert again.wait() == 0, again.output()
    for file in sorted((whole.folder / "model").glob("*.safetensors")):
        assert file.read_bytes() == (cut.folder / "model" / file.name).read_bytes()
    evaluations = [
        line
        for line in map(json.loads, (cut.folder / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "evaluation"
    ]
    for line in evaluations:
        assert list(line["val_loss_by_source"]) == ["first", "second"], line
    first, last = (
        each["val_loss_by_source"]["second"] for each in evaluations[:: len(evaluations) - 1]
    )
    assert last < first
    assert verdicts(cut.folder) == {"beacon": "NOT_RUN", "audits": "NOT_RUN"}
    found = workshop.ask("audit", str(cut.folder), "--round", "1")
    assert [each["verdict"] for each in found["verdicts"]] == ["EXACT"] * 2, found
    documents = workshop.ask("data", "show", str(cut.folder))["documents"]
    seen = [sum(each["seen"] for each in documents if each["source"] == n) for n in (0, 1)]
    # Less than its quarter: it has reached `epochs` and has dropped out.
    assert 0.05 < seen[1] / sum(seen) < 0.2, seen
