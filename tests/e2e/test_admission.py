"""Runs with dishonest sites: admission names them, and the model is unharmed."""

from __future__ import annotations

import json

import pytest

from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import read_log
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SITES = ("paris", "lyon", "oslo", "rome")
GATED = (
    "outer.rounds=5",
    "checkpoint.every_rounds=0",
    "admission.aggregation=clip",
    "admission.gate=true",
    PATIENT,
    "record.states_every=2",
)
LIMIT = 600.0
REJECTIONS = {"zero", "loss", "duplicate", "stale", "not-finite", "malformed", "equivocation"}


def named(run: ForkedRun) -> dict[str, set[str]]:
    """Why contributions did not count, by site."""
    found = run.summary()["admission"]
    return {site: set(why) & REJECTIONS for site, why in found.items() if set(why) & REJECTIONS}


def audited(workshop: Workshop, forge: Forge, run: ForkedRun, round_: str) -> dict[str, str]:
    """Verdicts of an audit of all sites' round, by site."""
    arguments = ("audit", str(run.folder), "--round", round_, "--json")
    audit = forge.command(workshop, run.folder.name, *arguments)
    audit.wait(LIMIT)
    text = audit.printed()
    found = json.loads(text[text.index("{") :])["verdicts"]
    return {each["site"]: each["verdict"] for each in found}


def test_a_poisoning_site_is_named_though_no_rank_has_the_whole_model(
    workshop: Workshop, forge: Forge
) -> None:
    sets = (*GATED, "outer.rounds=3")
    run = forge.train(workshop, "poisoned-stages", *sets, hooks="poisoning", sites=SITES[1:])
    assert run.wait(LIMIT) == 0, run.output()
    assert named(run) == {"rome": {"loss"}}
    digests = {r["anchor_digest"] for site in SITES[1:] for r in run.records("flush", site)}
    assert len(digests) == 1
    left_out = [r for r in run.records("admission", "rome") if r["code"] == "loss"]
    assert {r["exchange"].split("/")[2] for r in left_out} == {"0", "1"}, "in both stages"
    assert all(r["cosine"] < 0 and r["gain"] < 0 for r in left_out)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1x1", "2x1", "1x2"])
def test_one_lazy_and_one_poisoning_site_are_named_twice_and_do_no_harm(
    workshop: Workshop, forge: Forge, layout: str
) -> None:
    stages, shards = layout.split("x")
    sets = (*GATED, f"site.stages={stages}", f"site.shards={shards}")
    clean = forge.train(workshop, f"all-honest-{layout}", *sets, sites=SITES)
    assert clean.wait(LIMIT) == 0, clean.output()
    run = forge.train(
        workshop, f"two-dishonest-{layout}", *sets, hooks="lazy-and-poisoning", sites=SITES
    )
    assert run.wait(LIMIT) == 0, run.output()
    assert named(clean) == {}, "nobody is named who is honest"
    assert named(run) == {"oslo": {"zero"}, "rome": {"loss"}}
    assert "rome, round 0: its contribution does not count: loss" in run.printed()
    # Nobody was late, so both runs have taken the same steps.
    assert clean.summary()["tokens"] == run.summary()["tokens"]
    losses = [each.summary()["val_loss_last"] for each in (clean, run)]
    assert losses[1] < 1.02 * losses[0]
    digests = {r["anchor_digest"] for site in SITES for r in run.records("flush", site)}
    assert len(digests) == 1
    # Scores per site, and verdicts in the record, which a stranger replays.
    scores = [r for r in run.records("admission", "rome") if r["code"] == "loss"]
    assert scores
    assert all(r["norm"] > 5000 and r["cosine"] < 0 and r["gain"] < 0 for r in scores)
    # The other way to find them: a round is repeated, whoever was thought to be honest.
    found = audited(workshop, forge, run, "2")
    assert {site for site, verdict in found.items() if verdict == "MISMATCH"} == {"oslo", "rome"}
    assert {found["paris"], found["lyon"]} == {"EXACT"}
    assert set(audited(workshop, forge, clean, "2").values()) == {"EXACT"}
    assert verdicts(clean.folder) == {"beacon": "NOT_RUN"}
    assert verdicts(run.folder) == {"audits": "FAIL", "beacon": "NOT_RUN"}
    entries = [s.opened(line)[0] for line in read_log(run.folder / "record").entries]
    steps = [each.predicate for each in entries if each.kind == s.STEP]
    codes = [{site: v["code"] for site, v in step["verdicts"].items()} for step in steps]
    assert {"paris": "admitted", "lyon": "admitted", "oslo": "zero", "rome": "loss"} in codes
    for step, of_step in zip(steps, codes, strict=True):
        assert step["set"] == [site for site in SITES if of_step[site] == "admitted"]


@pytest.mark.slow
def test_a_site_that_denies_the_others_contributions_takes_nothing_over(
    workshop: Workshop, forge: Forge
) -> None:
    """Its own was the only one that counted, before a majority settled what is held."""
    sets = (*GATED, "site.stages=1", "network.link_timeout=20")
    clean = forge.train(workshop, "nobody-denies", *sets, sites=SITES)
    assert clean.wait(LIMIT) == 0, clean.output()
    for lie in ("censoring", "slandering"):
        run = forge.train(workshop, lie, *sets, hooks=lie, sites=SITES)
        assert run.wait(LIMIT) == 0, run.output()
        said = "rome is left behind: most hold what paris, lyon, oslo sent at outer/0/0/"
        assert said in run.printed()
        opened = [s.opened(line)[0] for line in read_log(run.folder / "record").entries]
        steps = [each.predicate for each in opened if each.kind == s.STEP]
        assert len(steps) == 2 * 6, "of two fragments in five rounds, and the flush"
        assert all(step["set"] == ["paris", "lyon", "oslo"] for step in steps)
        losses = [each.summary()["val_loss_last"] for each in (clean, run)]
        assert losses[1] < 1.02 * losses[0]
        assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}


def test_what_a_site_was_sent_damaged_it_fetches_from_another_and_goes_on(
    workshop: Workshop, forge: Forge
) -> None:
    """It was left behind and fetched the whole state in every round, before it fetched what it
    lacks. All that is sent to lyon by rome alone is damaged."""
    sets = ("outer.rounds=2", "checkpoint.every_rounds=0", "site.stages=1", PATIENT)
    sites = ("lyon", "oslo", "rome")
    run = forge.train(workshop, "slighted", *sets, hooks="slighting", sites=sites)
    assert run.wait(LIMIT) == 0, run.output()
    assert "left behind" not in run.printed()
    assert "what rome sent: lyon alone has denied it 2 times" in run.printed()
    assert len({r["anchor_digest"] for site in sites for r in run.records("flush", site)}) == 1
    opened = [s.opened(line)[0] for line in read_log(run.folder / "record").entries]
    steps = [each.predicate for each in opened if each.kind == s.STEP]
    assert len(steps) == 2 * 3, "of two fragments in two rounds, and the flush"
    assert all(step["set"] == list(sites) for step in steps)
    assert verdicts(run.folder) == {}


def test_a_rule_that_needs_whole_contributions_is_refused_with_reduce(
    workshop: Workshop, forge: Forge
) -> None:
    sets = ("admission.aggregation=rfa", "outer.exchange=reduce")
    run = forge.train(workshop, "rfa-reduce", *sets)
    assert run.wait() == 1, run.output()
    assert 'set outer.exchange = "gather"' in run.printed()
    assert "Traceback" not in run.printed()
