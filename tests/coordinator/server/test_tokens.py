"""A join token admits one name, and is nothing that another site's could be made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dilocox.coordinator.identity import OPERATOR as OPERATOR_NAME
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.tokens import SiteTokens
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

OPERATOR = Caller(OPERATOR_NAME, 0)


def retirement(site: str) -> m.RetireRequest:
    return m.RetireRequest(site=site, reason="asked to by the operator", now=True)


def test_a_member_cannot_enrol_under_a_name_that_it_has_put_out(driver: Driver) -> None:
    """By false reports of broken links, c puts b out of the run, and then takes its name."""
    driver.start()
    driver.core.departures.retire(retirement("b"), OPERATOR)
    assert driver.core.state.sites["b"].role == "gone"
    with pytest.raises(Refused, match="token: belongs to site c, not to site b;") as refused:
        driver.enrol("b", token=driver.token("c"))
    assert refused.value.kind == "join"
    assert "coordinator/tokens/b" in str(refused.value)
    assert driver.core.state.sites["b"].role == "gone"
    assert driver.enrol("b").incarnation == 2


def test_tokens_differ_by_site_by_issue_and_by_run(tmp_path: Path) -> None:
    runs = [SiteTokens(folder(tmp_path / name), "f" * 64) for name in ("one", "other")]
    made = {str(run.of(site, issue)) for run in runs for site in ("a", "b") for issue in (0, 1)}
    assert len(made) == 8
    again = SiteTokens(tmp_path / "one", "f" * 64)
    assert again.of("a") == runs[0].of("a")
    assert JoinToken.parse(str(again.of("a"))).fingerprint == "f" * 64
    secret = (tmp_path / "one" / "token-secret").read_text()
    assert all(token.split("-")[2] not in secret for token in made)


def test_files_are_for_their_owner_and_one_site_each(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", run_config("ab"))
    tokens = driver.core.hand_out()
    place = tmp_path / "run" / "tokens"
    assert {path.name: path.read_text().strip() for path in place.iterdir()} == tokens
    assert tokens == {site: driver.token(site) for site in "ab"}
    private = [place, tmp_path / "run" / "token-secret", *place.iterdir()]
    assert [path.stat().st_mode & 0o077 for path in private] == [0] * 4
    driver.core.close()


def test_a_folder_with_one_token_for_all_goes_on_and_admits_no_holder_of_it(
    tmp_path: Path,
) -> None:
    """What every site knows is no secret to derive tokens from."""
    first = Driver(tmp_path / "run", run_config("ab"))
    first.start()
    first.core.close()
    # As a dilocox before it had tokens by site left it.
    place = tmp_path / "run"
    (place / "token-secret").unlink()
    shutil.rmtree(place / "tokens", ignore_errors=True)
    (place / "secret").write_text("1234" * 8)
    old = f"dilocox1-{first.core.authority.fingerprint}-{'1234' * 8}"
    (place / "token").write_text(old)
    driver = Driver(place, run_config("ab"))
    assert driver.core.state.live == ["a", "b"]
    assert driver.core.authority.fingerprint == first.core.authority.fingerprint
    driver.incarnations = {"a": 1, "b": 1}
    driver.beat("a")
    driver.core.departures.retire(retirement("b"), OPERATOR)
    with pytest.raises(Refused, match=r"shared token of an earlier dilocox; .*copy the .*tokens/b"):
        driver.enrol("b", token=old)
    driver.core.hand_out()
    assert not (place / "token").exists()
    assert driver.enrol("b").incarnation == 2
    driver.core.close()
    # What is derived does not hang on the shared secret.
    (place / "secret").unlink()
    later = Coordinator(run_config("ab"), place)
    assert str(later.tokens.of("b")) == driver.token("b")
    later.close()


def test_strangers_learn_nothing_of_the_run(driver: Driver) -> None:
    rubbish = f"dilocox1-{'0' * 64}-{'0' * 32}"
    for site in ("a", "x"):
        with pytest.raises(Refused) as refused:
            driver.enrol(site, token=rubbish)
        said = str(refused.value).replace(f"tokens/{site}", "")
        assert said == (
            "token: not a token of this run, or no longer valid; copy the file coordinator/ from "
            "the coordinator's run folder"
        )


def folder(path: Path) -> Path:
    path.mkdir()
    return path
