"""Each command makes the checks that apply to it, before it starts anything: the cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import DilocoxError
from dilocox.tools.testbed.run import check as check_lab
from dilocox.training.builder import Hooks
from dilocox.training.launch import coordinator_process, preflight
from dilocox.training.launch.preflight import Role
from dilocox.training.payload_sizes import payload_sizes
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils import versions
from tests.support.process_starts import config, prepared, refusal

pytestmark = pytest.mark.waits

JOIN = Role("join", site="paris", url="https://localhost:1")
RANK = replace(JOIN, command="rank")
MACHINE = ["check_versions", "check_driver", "stay_forkable"]
STATE = ["check_handover", "check_handed_tokenizer"]
FILES = ["check_handed_momentum", "fetch_weights", "prepare_data", "check_run"]
CHECKS: dict[str, tuple[Role, list[str]]] = {
    "train": (
        Role("train"),
        [*MACHINE, "check_folder", "check_coordinator", "check_congestion", "check_ports",
         "check_ports", "check_place", "check_tokenizer_keys", *STATE, "check_model",
         "check_tokenizer", *FILES, "payload_sizes", "headline"],
    ),
    "join": (
        JOIN,
        [*MACHINE, "check_writable", "check_congestion", "check_place", *STATE, "check_model",
         *FILES, "check_data"],
    ),
    "rank": (RANK, [*MACHINE, "check_writable", "check_congestion", "fetch_weights"]),
    "coordinator": (
        Role("coordinator"),
        ["check_versions", "check_folder", "check_coordinator", "check_trained_tokenizer", *STATE,
         "model_vocabulary", "payload_sizes"],
    ),
    "lab": (
        Role("lab"),
        [*MACHINE, "check_congestion", "check_place", "check_tokenizer_keys", *STATE,
         "check_model", "check_tokenizer", *FILES],
    ),
}  # fmt: skip
"""Checks by command, in their order."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files, shared by the tests of this module."""
    return prepared(tmp_path_factory.mktemp("roles"))


@pytest.fixture
def without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that reads text or weights fails."""

    def later(*_: object, **__: object) -> NoReturn:
        raise AssertionError("text or weights are read")

    monkeypatch.setattr(preflight, "fetch_weights", later)
    monkeypatch.setattr(preflight, "prepare_data", later)


@pytest.mark.parametrize("command", CHECKS)
def test_the_cheapest_checks_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    role, expected = CHECKS[command]
    done: list[str] = []

    class Files:
        vocabulary_size = 270

    def step(name: str) -> Callable[..., Any]:
        def noted(*_: object, **__: object) -> Any:
            done.append(name)
            return Files() if name == "prepare_data" else name

        return noted

    for name in {name for _, names in CHECKS.values() for name in names}:
        monkeypatch.setattr(preflight, name, step(name))
    found = preflight.check(config(tmp_path), role)
    assert done == expected
    assert found.headline == ("headline" if command == "train" else "")
    assert found.payloads == ("payload_sizes" if role.serves else None)


def test_a_coordinator_plans_with_the_vocabulary_of_the_sites(
    place: Path, tmp_path: Path, without_text: None
) -> None:
    """A type's own default is another model's: payloads would be many times too large."""
    given = config(tmp_path, data={"tokenizer": str(place / "tokens" / "tokenizer")})
    assert given.control.adapt == "link"
    found = preflight.check(given, Role("coordinator")).payloads
    assert found == payload_sizes(given, 270)
    assert found != payload_sizes(given, None)


@pytest.mark.parametrize("command", ["train", "coordinator"])
def test_a_run_that_goes_on_keeps_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, without_text: None
) -> None:
    """The weights of such a run know its tokens, whichever they were before."""
    role = replace(CHECKS[command][0], resume=True)
    run = config(tmp_path)
    run.folder.mkdir()
    (run.folder / "run.toml").write_text(run.to_toml(), encoding="utf-8")

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("asked for the tokenizer of a new run")

    for name in ("check_tokenizer", "check_tokenizer_keys", "check_trained_tokenizer"):
        monkeypatch.setattr(preflight, name, refuse)

    class StopError(DilocoxError):
        pass

    def stop(*_: object) -> NoReturn:
        raise StopError("as far as this test goes")

    monkeypatch.setattr(preflight, "check_handed_momentum", stop)
    if role.trains:
        with pytest.raises(StopError):
            preflight.check(run, role)
    else:
        assert preflight.check(run, role).begun


@pytest.mark.parametrize("role", [JOIN, RANK], ids=["join", "rank"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run": {"folder": "/proc/{name}"}}, "cannot be written to"),
        ({"network": {"congestion": "nosuch"}}, 'network.congestion: "nosuch" cannot be used'),
    ],
)
def test_a_site_asks_for_folder_and_congestion_control_before_text(
    place: Path, without_text: None, role: Role, change: dict[str, Any], expected: str
) -> None:
    """At every machine of the site."""
    assert expected in refusal(preflight.check, config(place, **change), role)


def test_a_join_names_a_site_and_an_address(tmp_path: Path) -> None:
    run = config(tmp_path)
    text = refusal(preflight.check, run, replace(JOIN, site="oslo"))
    assert text == "site 'oslo': not in the run file, which names: paris, lyon"
    assert "not an address" in refusal(preflight.check, run, replace(JOIN, url="https://here"))


def coordinate(run: RunConfig) -> int:
    file = Path("run.toml")
    return coordinator_process.coordinate(
        run, run_file=file, overrides=[], wait_for=None, resume=False
    )


def test_a_coordinator_asks_for_versions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sites need the same versions, so none could join it."""
    monkeypatch.setattr(versions, "missing_name", lambda: ("torch.K._name", "stages > 1"))
    run = config(tmp_path)
    assert "torch.K._name, which dilocox needs for stages > 1" in refusal(coordinate, run)
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run": {"seed": 1}}, "model.handover: run.seed is 1, but run old had 0"),
        ({"outer": {"rounds": 1}}, "4 inner steps in all, and run old has taken 4 already"),
        ({"data": {"vocabulary_size": 300}}, "the tokenizer of run old has 270"),
        ({"model": {"path": "/nowhere"}}, "/nowhere/handover.json: cannot be read"),
    ],
)
def test_a_coordinator_asks_for_what_is_handed_over(
    place: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """Every site would refuse the run that it waits for."""
    tokenizer = (place / "tokens" / "tokenizer" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    Handover(
        run="old", tick=3, steps=4, seed=0, sequence_length=16, data_digest="", momentum="",
        ledger={},
    ).write(tmp_path)  # fmt: skip
    model = {"architecture": None, "path": str(tmp_path), "handover": True}
    model |= change.pop("model", {})
    run = config(place, "handed", model=model, **change)
    assert expected in refusal(coordinate, run)
    assert not run.folder.exists()


def test_a_lab_asks_for_the_functions_that_the_run_file_names(
    place: Path, without_text: None
) -> None:
    """The lab has none, and would train another run."""
    run = config(place, run={"code": "a" * 64})
    assert "this run trains with the user's own functions" in refusal(check_lab, run)


def sequences(start: int, count: int) -> NoReturn:
    raise AssertionError((start, count))


def test_a_single_site_with_sequences_of_its_own_has_as_many_as_it_likes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = config(place, site={"batch_size": 40000}).model_dump(mode="json", exclude_none=True)
    raw["sites"] = {"paris": {}}
    monkeypatch.setattr(Hooks, "check", lambda *_, **__: None)
    role = replace(JOIN, hooks=Hooks(dataset=sequences))
    preflight.check(resolve_run(raw), role)
    text = refusal(preflight.check, resolve_run(raw), JOIN)
    assert text.startswith("site.batch_size 40000 is above the ")


def test_a_model_that_is_not_there_is_named_by_its_own_key_at_a_start(
    tmp_path: Path, without_text: None
) -> None:
    model = {"architecture": None, "path": str(tmp_path / "missing")}
    text = refusal(preflight.check, config(tmp_path, model=model), Role("train"))
    assert text.startswith(f"model.path {tmp_path / 'missing'}: no such folder; ")
