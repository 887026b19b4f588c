"""What the reader asks for is required: if it cannot be judged, the verification is no success."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.record.bundles.fetch import Fetched
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.record.verify.claims import exit_code
from dilocox.record.verify.places import Places
from dilocox.record.verify.published_bundles import verify_fetched
from dilocox.record.verify.verify import verify
from tests.support.older_record import unpacked

ASKED: dict[str, dict[str, Any]] = {
    "anchors": {"chain": ChainHeads("the place", fault="the chain's server failed")},
    "release": {"release_key": Path("none.pem")},
    "audits": {"auditors": ("00" * 32,)},
    "data": {"data": Path("none")},
}


@pytest.mark.parametrize("name", ASKED)
def test_a_claim_that_was_asked_for_and_not_judged_is_no_success(name: str, tmp_path: Path) -> None:
    run = unpacked(tmp_path)
    before = verify(Places(run), lambda what, share: None)
    assert not any(each.claim.required for each in before.findings if each.claim.name == name)
    places = Places(run, **ASKED[name])
    report = verify(places, lambda what, share: None)
    (found,) = (each for each in report.findings if each.claim.name == name)
    assert (found.verdict, exit_code([found])) == ("NOT_RUN", 3)
    # Neither is it one if the run cannot be read at all.
    unread = verify_fetched(Fetched(run, "here", fault="cut"), places, lambda what, share: None)
    (found,) = (each for each in unread.findings if each.claim.name == name)
    assert (found.verdict, exit_code([found])) == ("NOT_RUN", 3)


@pytest.mark.parametrize(
    ("given", "of_adapters", "names"),
    [
        ({"start": Path("model")}, False, ["start"]),
        ({"start": Path("model")}, True, ["base"]),
        ({"adapters": Path("old")}, True, ["start"]),
        ({"adapters": Path("old"), "start": Path("model")}, True, ["start", "base"]),
        ({}, True, []),
    ],
)
def test_a_folder_of_the_start_requires_the_claim_about_it(
    given: dict[str, Path], of_adapters: bool, names: list[str]
) -> None:
    asked = Places(Path("run"), **given).asked(of_adapters)
    assert [claim.name for claim in asked] == names
    assert all(claim.required for claim in asked)


def test_a_start_that_is_named_is_required(tmp_path: Path) -> None:
    run = unpacked(tmp_path)
    places = Places(run, start=tmp_path / "model")
    report = verify(places, lambda what, share: None)
    (found,) = (each for each in report.findings if each.claim.name == "start")
    assert found.claim.required
