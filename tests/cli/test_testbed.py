"""`dilocox lab`: what it takes, what it refuses in one line, what it prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilocox.cli import main, testbed
from dilocox.errors import DilocoxError
from dilocox.tools.testbed import registry, shaping
from dilocox.tools.testbed.link_measurement import Measured
from dilocox.tools.testbed.link_spec import Links
from dilocox.tools.testbed.report import describe_run, link_lines, round_trip
from dilocox.tools.testbed.testbed import Checked
from tests.support.lab_needs import needs_linux
from tests.tools.testbed.test_results import result

pytestmark = [pytest.mark.alone, needs_linux]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(["lab", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_run_may_be_left_out() -> None:
    words = ["run.toml", "--link", "1gbit", "--links", "a=1mbit", "a-b=2mbit", "--delay", "30ms"]
    for options in (
        main._parser().parse_args(["lab", *words]),
        main._parser().parse_args(["lab", "run", *words]),
    ):
        assert options.call is testbed._run
        assert (options.run, options.link) == (Path("run.toml"), "1gbit")
        assert (options.links, options.delay) == (["a=1mbit", "a-b=2mbit"], 0.03)
    assert main._parser().parse_args(["lab", "set", "a=1mbit"]).call is testbed._set
    assert main._parser().parse_args(["lab", "clean"]).call is testbed._clean


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.toml"], "required: --link"),
        (["run.toml", "--link", "1mbit", "--delay", "30"], "'30': write it as 30ms or 0.1s"),
        ([], "required: ACTION"),
    ],
)
def test_what_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    code, _, err = said(capsys, *words)
    assert code == 2
    assert expected in err


def test_help_names_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for name in ("run", "set", "clean"):
        assert f"\n    {name} " in out
    assert "--debug" in said(capsys, "run", "--help")[1]


@pytest.mark.parametrize("words", [["run.toml", "--link", "1gbit"], ["set", "a=1mbit"], ["clean"]])
def test_without_root_there_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = said(capsys, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "root" in err


@pytest.fixture
def one_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has a lab, as far as the list of labs goes."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "labs")
    monkeypatch.setattr(shaping, "tc", lambda *_: None)
    registry.enter(["paris", "lyon", "hub"], ["paris", "lyon"])


@pytest.mark.usefixtures("one_lab")
def test_set_changes_the_one_lab_and_prints_its_links(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "set", "--all", "20mbit/100mbit", "paris-lyon=5mbit")
    assert (code, err) == (0, "")
    line = "20 Mbit/s up, 100 Mbit/s down"
    assert out.splitlines() == [
        f"paris             {line}",
        f"lyon              {line}",
        "lyon-paris        5 Mbit/s",
    ]
    assert registry.read(os.getpid()).links.pair("paris", "lyon") == 5e6


@pytest.mark.usefixtures("one_lab")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["set"], "nothing to set: give SITE=RATE"),
        (["set", "oslo=1mbit"], "oslo names no site and no two sites; the lab has paris, lyon"),
        (["set", "hub=1mbit"], "hub names no site"),
        (["set", "paris=fast"], 'rate "fast": write it as 200kbit'),
        (["set", "--lab", "1", "paris=1mbit"], "process 1 has no lab; there are: "),
    ],
)
def test_what_cannot_be_set_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert expected in err
    assert registry.read(os.getpid()).links == Links()


def test_without_a_lab_there_is_nothing_to_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    assert said(capsys, "set", "a=1mbit")[2] == "dilocox: labs that are going on: none\n"


def test_errors_of_the_lab_are_errors_of_dilocox() -> None:
    with pytest.raises(DilocoxError):
        Links().changed(["a"], ["a"])


def test_a_run_is_described_with_its_round_trip_and_every_unit() -> None:
    links = [Measured("paris up", "paris", "hub", 20e6, 19.9e6)]
    trips = {("a", "b"): 0.0612, ("a", "c"): 0.0601, ("b", "c"): 0.0608}
    checked = Checked(links, trips, {"paris": 0.4})
    assert round_trip(checked) == "60.80 ms between sites, links idle (60.10 to 61.20)"
    assert link_lines(checked)[1].split() == [
        *("paris", "up", "20", "Mbit/s", "19.9", "Mbit/s", "-0.5%"),
    ]
    text = "\n".join(describe_run(result(), checked))
    assert "1.0k tokens/s over rounds 2 to 4 (6.0 s), round trip 60.80 ms" in text
    assert "paris                650 B     1.2 kB    1.2 kB     50 B     200 B" in text
    assert "1.3 kB of payload, 3.5 kB on the wire, 167.7% more" in text
