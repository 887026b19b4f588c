"""Files of deploy/ that need no cluster: units of systemd, and what batch scripts refuse."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_again_after_a_crash_and_not_after_a_stop(unit: Path) -> None:
    assert len(UNITS) == 2
    said = service(unit)
    assert said["Restart"] == "on-failure"
    assert said["RestartPreventExitStatus"] == "130"
    assert said["KillMode"] == "mixed"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_one_that_dilocox_takes(unit: Path) -> None:
    from dilocox.cli.main import _parser

    words = service(unit)["ExecStart"].split()
    assert words[0].endswith("/dilocox")
    options = _parser().parse_args([word.replace("${", "").strip("}") for word in words[1:]])
    assert callable(options.call)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("this machine has no systemd-analyze")
    text = unit.read_text(encoding="utf-8")
    command = service(unit)["ExecStart"].split()[0]
    copy = tmp_path / unit.name.replace("@", "@one")
    copy.write_text(text.replace(command, shutil.which("true") or ""), encoding="utf-8")
    done = subprocess.run(
        [checker, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert unit.name.replace("@", "@one") not in done.stderr, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    "script", sorted((DEPLOY / "slurm").glob("*.sbatch")), ids=lambda s: s.stem
)
def test_a_batch_script_is_sound_and_says_what_it_needs(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: sbatch {script.name} ")
