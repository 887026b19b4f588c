"""Code of a site's own is written into the agreed run file, by `dilocox.train` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.api import train
from dilocox.config.run_config import RunConfig, load_written
from dilocox.training.builder import Hooks
from dilocox.training.launch import local
from tests.training.launch.test_preflight import config

pytestmark = pytest.mark.waits


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Run files of the runs that were to be trained."""
    found: list[RunConfig] = []

    def train_here(config: RunConfig, hooks: Hooks, **more: Any) -> None:
        found.append(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        if not more["resume"]:
            (config.folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")

    monkeypatch.setattr(local, "train_here", train_here)
    return found


def own(logits: Any, labels: Any) -> Any:
    """A loss."""


def allowed(config: RunConfig) -> set[bool]:
    return {site.own_code for site in config.sites.values()}


def test_own_code_is_in_the_run_file(tmp_path: Path, begun: list[RunConfig]) -> None:
    run = config(tmp_path, "run")
    train(run)
    train(run, on_evaluation=lambda round_, loss: None)
    assert [allowed(each) for each in begun] == [{False}, {False}]
    assert begun[0] == run
    for more in ({"loss": own}, {"dataset": own}):
        train(run, **more)  # type: ignore[arg-type]
        assert allowed(begun[-1]) == {True}
        assert allowed(load_written(run.folder / "run.toml")) == {True}
    assert begun[-1].digest() != run.digest(), "the sites agree on it"


def test_a_run_goes_on_with_the_permissions_that_it_was_begun_with(
    tmp_path: Path, begun: list[RunConfig]
) -> None:
    run = config(tmp_path, "run")
    train(run, loss=own)
    train(run, loss=own, resume=True)
    train(run, resume=True)
    assert [allowed(each) for each in begun] == [{True}] * 3
    assert len({each.digest() for each in begun}) == 1, "a resumed run has the same run file"
    # Of an earlier version, which had no such key, or with own code only from here on.
    train(run)
    train(run, loss=own, resume=True)
    assert allowed(begun[-1]) == {False}
