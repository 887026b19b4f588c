"""Site processes of a run on one machine: one that cannot take part ends a run that waits."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import TrainingError
from dilocox.training.launch import local_sites
from dilocox.training.launch.local_sites import LocalSites

RUN = resolve_run(
    {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"paris": {}, "lyon": {}}}
)


def with_least(sites: int) -> RunConfig:
    return RUN.model_copy(update={"outer": RUN.outer.model_copy(update={"min_sites": sites})})


class Process:
    def __init__(self) -> None:
        self.exitcode: int | None = None
        self.sentinel = 7

    def is_alive(self) -> bool:
        return self.exitcode is None


class Scene:
    """Two sites, and a coordinator that answers with `phase`; None: not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, least: int = 1) -> None:
        self.phase: str | None = "enrolling"
        self.roles = ["active", "active"]
        self.stops: list[str] = []
        self.processes = {"paris": Process(), "lyon": Process()}
        self.reasons: Any = SimpleQueue()
        monkeypatch.setattr(local_sites.Identity, "load", lambda _: None)
        monkeypatch.setattr(local_sites, "CoordinatorClient", lambda *_: self)
        endpoint = Endpoint("https://x:1", {}, str(Path("operator")))
        self.sites = LocalSites(with_least(least), endpoint, self.processes, self.reasons)  # type: ignore[arg-type]

    def status(self) -> Any:
        if self.phase is None:
            raise TrainingError("no answer")
        sites = [SimpleNamespace(role=role) for role in self.roles]
        return SimpleNamespace(phase=self.phase, sites=sites)

    def stop(self, reason: str) -> None:
        self.stops.append(reason)

    def close(self) -> None:
        pass

    def ends(self, site: str, code: int, refusal: str = "") -> None:
        self.processes[site].exitcode = code
        if refusal:
            self.reasons.put((site, refusal))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_refused_site_ends_a_run_that_waits_for_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.sites.look(False, 0.0)
    scene.ends("lyon", 1, "site lyon: its token files differ")
    with pytest.raises(TrainingError, match=r"^site lyon: its token files differ$"):
        scene.sites.look(False, 0.0)
    assert scene.stops == ["site lyon cannot take part"]
    scene.ends("paris", 1, "site paris: its token files differ")
    scene.sites.say_rest()
    assert capsys.readouterr().err == ""


def test_a_site_that_was_killed_ends_it_too(scene: Scene) -> None:
    scene.ends("paris", -9)
    with pytest.raises(TrainingError, match="site paris: its process ended with code -9"):
        scene.sites.look(False, 0.0)


@pytest.mark.parametrize("phase", ["running", "stopping", "finished", None])
def test_in_a_run_that_has_begun_the_refusal_is_a_line(
    scene: Scene, phase: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.phase = phase
    scene.ends("lyon", 1, "site lyon: the run is finished")
    scene.sites.look(False, 0.0)
    assert scene.stops == []
    assert capsys.readouterr().err == "dilocox: site lyon: the run is finished\n"
    assert scene.sites.sentinels == [7]
    scene.sites.look(False, 0.0)
    assert capsys.readouterr().err == ""
    scene.ends("paris", 1, "site paris: the run is finished")
    scene.sites.say_rest()
    assert capsys.readouterr().err == "dilocox: site paris: the run is finished\n"


def test_a_run_with_too_few_sites_left_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, least=2)
    scene.phase = "running"
    scene.sites.check_end()
    scene.ends("lyon", 1, "site lyon: failed 5 times in a row")
    # The coordinator has not noticed yet.
    scene.sites.look(False, 10.0)
    scene.roles = ["active", "gone"]
    scene.sites.look(False, 10.5)
    assert scene.stops == []
    scene.sites.look(False, 12.0)
    assert scene.stops == ["too few sites are left"]
    scene.ends("paris", 1, "site paris: the run is stopped")
    scene.sites.look(False, 20.0)
    assert len(scene.stops) == 1
    with pytest.raises(TrainingError, match=r"than outer.min_sites 2 are left \(site lyon: failed"):
        scene.sites.check_end()


@pytest.mark.parametrize("phase", ["enrolling", "running"])
def test_a_reason_may_arrive_long_before_the_end_of_its_process(
    monkeypatch: pytest.MonkeyPatch, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(monkeypatch, least=2)
    scene.phase, scene.roles = phase, ["active", "gone"]
    scene.reasons.put(("lyon", "site lyon: its GPU is out of memory"))
    scene.sites.look(False, 0.0)
    assert capsys.readouterr().err == ""
    scene.ends("lyon", 1)
    if phase == "enrolling":
        with pytest.raises(TrainingError, match=r"^site lyon: its GPU is out of memory"):
            scene.sites.look(False, 1.0)
    else:
        scene.sites.look(False, 1.0)
        assert capsys.readouterr().err == "dilocox: site lyon: its GPU is out of memory\n"
        with pytest.raises(TrainingError, match=r"\(site lyon: its GPU is out of memory\)"):
            scene.sites.check_end()
    scene.sites.say_rest()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("least", "phase", "roles"),
    [
        (1, "running", ["active", "gone"]),
        (2, "finished", ["finished", "gone"]),
        (2, "running", ["finished", "gone"]),
        (2, "stopping", ["active", "gone"]),
    ],
)
def test_a_run_that_goes_on_or_ends_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, least: int, phase: str, roles: list[str]
) -> None:
    scene = Scene(monkeypatch, least=least)
    scene.phase, scene.roles = phase, roles
    scene.ends("lyon", 1, "site lyon: failed")
    scene.sites.look(False, 0.0)
    scene.sites.look(False, 9.0)
    scene.sites.check_end()
    assert scene.stops == []


def test_sites_that_end_well_or_with_the_user_s_stop_end_nothing(scene: Scene) -> None:
    scene.ends("paris", 0)
    scene.sites.look(False, 0.0)
    scene.ends("lyon", 1)
    scene.sites.look(True, 0.0)
    assert scene.stops == []
    assert scene.sites.sentinels == []
