"""`dilocox availability`, on a run without training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.cli.main import main
from tests.support.dispersed import KEY, NEXT, Town
from tests.support.record_scene import Scene


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Town:
    town = Town(tmp_path_factory.mktemp("town"))
    town.exchange(KEY, NEXT)
    town.folder()
    return town


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of a call."""
    with pytest.raises(SystemExit) as end:
        main(["availability", *arguments])
    found = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, found.out + found.err


def places(town: Town, sites: str) -> list[str]:
    return [text for store in town.stores(sites) for text in ("--store", store)]


def test_a_sample_passes(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(town.scene.config.folder)
    code, text = said(capsys, run, *places(town, "abc"))
    assert code == 0
    assert "PASS  30 of 30 samples of 2 cuts answered" in text
    assert "2 of 3 pieces give a cut back" in text
    assert "chance of at most 4.9e-15" in text


def test_a_sample_fails_by_name(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(town.scene.config.folder)
    code, text = said(capsys, run, *places(town, "a"), "--round", "0")
    assert code == 1
    assert "FAIL" in text
    assert f"lost: {KEY.text}: 2 pieces are needed, 1 are there (a)" in text


def test_the_result_as_json(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(town.scene.config.folder)
    code, text = said(capsys, run, *places(town, "ab"), "--samples", "5", "--json")
    found = json.loads(text)
    assert (code, found["verdict"], found["samples"]) == (0, "PASS", 5)
    assert found["run"] == town.scene.notary.run


def test_payloads_are_rebuilt_from_a_url_of_the_run(
    town: Town, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`file://` stands for any storage: the log is fetched, and the run's own store is asked."""
    run = f"file://{town.scene.config.folder}"
    target = tmp_path / "rebuilt"
    code, text = said(capsys, run, *places(town, "bc"), "--rebuild", str(target))
    assert (code, "payloads of 2 of 2 cuts" in text) == (0, True)
    assert sum(path.is_file() for path in target.rglob("*")) == 6


@pytest.mark.parametrize(("arguments", "why"), [
    (["--samples", "0"], "give at least 1"),
    (["--timeout", "0"], "seconds above 0"), (["--timeout", "nan"], "seconds above 0"),
    (["--rebuild", "x", "--samples", "3"], "leave --samples and --round out"),
    (["--key", "nobody"], "not a log key"),
    (["--round", "9"], "no cut of round 9 has a certificate"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line(
    town: Town, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    code, text = said(capsys, str(town.scene.config.folder), *arguments)
    assert (code, text.count("\n")) == (1, 1)
    assert why in text


def test_a_run_without_pieces_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scene = Scene(tmp_path)
    scene.enrol()
    scene.notary.close()
    code, text = said(capsys, str(scene.config.folder))
    assert code == 1
    assert "the run has no [availability]" in text
