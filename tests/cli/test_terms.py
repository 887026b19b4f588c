"""`dilocox plan --write-terms`, `plan --terms`, and what `join --terms` refuses, in a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from dilocox.cli.main import _parser, main
from dilocox.cli.terms import deposit_by_terms
from dilocox.config.run_config import load_run
from dilocox.errors import ConfigError
from tests.config.test_terms import OWNER, raw_run

Command = Callable[..., tuple[int, str, str]]
SITE = ("--gpu", "l40s:2", "--link", "100mbit")


@pytest.fixture
def dilocox(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    raw = raw_run()
    raw["control"] = {"adapt": "off"}
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


def test_a_sponsor_writes_terms_and_an_owner_plans_and_compares(
    dilocox: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ("plan", run_file, *SITE, "--write-terms", "terms.toml", "--stake", "2")
    code, out, err = dilocox(*write)
    assert (code, err) == (0, "")
    (digest,) = re.findall(r'^terms = "([0-9a-f]{64})"$', out, re.MULTILINE)
    # Named in the run file, the terms stay what they are.
    named = ("--set", f"settlement.terms={digest}")
    assert dilocox(*write, *named)[:2] == (0, out)
    code, _, err = dilocox(*write, "--set", "outer.steps=800")
    assert (code, "exists with other terms" in err) == (1, True)

    address = f"terms.toml#sha256={digest}"
    code, out, _ = dilocox("plan", "--terms", address, *SITE, "--rent", "0.5")
    assert code == 0
    assert "share: 50.0% of the tokens" in out
    assert "these GPUs cost $1.00 an hour" in out
    code, out, _ = dilocox("plan", "--terms", address, *SITE, "--json")
    assert (code, json.loads(out)["terms"]) == (0, digest)

    join = ("join", "127.0.0.1:9", "--run-file", run_file, "--token-file", "token")
    Path("token").write_text("x")
    code, _, err = dilocox(*join, "--site", "lyon", "--terms", "terms.toml")
    assert (code, "the run file names no terms" in err) == (1, True)
    code, _, err = dilocox(*join, *named, "--site", "oslo", "--terms", "terms.toml")
    assert (code, "--site oslo: not in the run file" in err) == (1, True)
    lower = ("--set", "settlement.price=1")
    code, _, err = dilocox(*join, *named, *lower, "--site", "lyon", "--terms", "terms.toml")
    assert code == 1
    assert "settlement.price: the terms say 2000, the run file says 1" in err
    code, _, err = dilocox(*join, "--site", "lyon", "--wallet", "key")
    assert (code, "--wallet: needs --terms" in err) == (1, True)
    # All ranks of a launcher get the same options; the first one compares and stakes.
    for number in ("0", "1"):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, number)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        options = _parser().parse_args([*map(str, join), "--site", "lyon", "--terms", "terms.toml"])
        config = load_run(run_file)
        if number == "1":
            deposit_by_terms(options, config)
        else:
            with pytest.raises(ConfigError, match="names no terms"):
                deposit_by_terms(options, config)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--write-terms", "t", *SITE), "--stake: say how many coins"),
        (("--write-terms", "t", *SITE, "--stake", "0.0000000001"), "--stake: say how many coins"),
        (("--write-terms", "t", "--stake", "1", *SITE, *SITE), "give --gpu and --link once"),
        (("--write-terms", "t", "--stake", "1", *SITE, "--sites", "3"), "--sites: cannot be used"),
        (("--write-terms", "t", "--stake", "1", *SITE, "--table", "x"), "--table: cannot be used"),
        (("--write-terms", "t", "--stake", "1", *SITE, "--window", "0"), "--window 0: give a"),
        (("--terms", "t", *SITE), "a run file: cannot be used with --terms"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    dilocox: Command, run_file: Path, words: tuple[str, ...], match: str
) -> None:
    code, _, err = dilocox("plan", run_file, *words)
    assert code == 1
    assert match in err
    assert not Path("t").exists()


def test_terms_need_a_site_and_a_contract(dilocox: Command, run_file: Path) -> None:
    assert "give --gpu and --link once" in dilocox("plan", "--terms", "t")[2]
    assert "t: cannot be read" in dilocox("plan", "--terms", "t", *SITE)[2]
    run_file.write_text(run_file.read_text().replace(f'owner = "{OWNER}"', ""))
    code, _, err = dilocox("plan", run_file, *SITE, "--write-terms", "t", "--stake", "1")
    assert (code, "chain, contract and owner name one place" in err) == (1, True)
