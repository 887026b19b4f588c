"""Make the virtual environment that the Makefile uses. Standard library only.

PyTorch comes from the one of its indexes that fits the machine (`torch_index`), CPU wheels where
there is no NVIDIA GPU. Where that index cannot be reached the default one has to do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from torch_index import VARIABLE, ask_nvidia_smi, choose, with_torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("hatchling", "editables", "setuptools")
"""What builds dilocox itself, and `SOURCES`."""
SOURCES = ("jsonpath-rw",)
"""What has no wheel anywhere (for the tests alone: mlcroissant needs it)."""


def main() -> None:
    """Create or complete the environment at the given folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dev", action="store_true", help="add what all of the tests need")
    parser.add_argument("--tests", action="store_true", help="add what most of the tests need")
    parser.add_argument("--constraints", default="constraints.txt", help="which versions to take")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit(
            f"dilocox needs Python 3.11 or newer, this is {sys.version.split()[0]}; "
            "set PYTHON, for example: make PYTHON=python3.12 quickstart"
        )
    python = arguments.folder / "bin" / "python"
    if not python.exists():
        say(f"creating {arguments.folder} with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", str(arguments.folder)], check=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",  # what is imported is compiled then; everything takes half a minute
        "--disable-pip-version-check",
        "-c",
        str(ROOT / arguments.constraints),
    ]
    # The system's packages come beside Python's: neither waits for the other.
    system = start_system_packages() if arguments.dev and os.environ.get("CI") else None
    with tempfile.TemporaryDirectory() as folder:
        install_torch(python, pip, Path(folder))
        extra = "[dev]" if arguments.dev else "[tests]" if arguments.tests else ""
        say("installing dilocox and what it needs" + (" for its tests" if extra else ""))
        install_itself(pip, extra)
    if system is not None:
        finish_system_packages(*system)


def install_torch(python: Path, pip: list[str], scratch: Path) -> None:
    """Install the build of PyTorch that this machine can run, unless some PyTorch is there.

    Where no build of the constraints' PyTorch fits, `pip` names changed constraints afterwards.
    """
    have = subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False)
    if have.returncode == 0:
        return
    at = pip.index("-c") + 1
    constraints = Path(pip[at]).read_text()
    pin = re.search(r"^torch[=<]\S+", constraints, re.MULTILINE)
    assert pin, f"{pip[at]} names torch"
    smi, capabilities = ask_nvidia_smi()
    override = os.environ.get(VARIABLE)
    try:
        choice = choose(smi, capabilities, override, sys.platform == "linux")
    except ValueError as error:
        sys.exit(f"setup: {error}")
    wanted = choice.requirement or pin[0]
    if choice.requirement is not None:
        pip[at] = str(scratch / "constraints.txt")
        Path(pip[at]).write_text(with_torch(constraints, choice.requirement))
    if choice.index is not None and (override or reachable(f"{choice.index}/torch/")):
        say(f"installing {wanted} from {choice.index} ({choice.why})")
        plain = [*pip[: at - 1], *pip[at + 1 :]]
        done = subprocess.run([*plain, wanted, "--index-url", choice.index], check=False)
        if done.returncode == 0:
            return
        if override:
            sys.exit(f"setup: {VARIABLE}={override}: {wanted} cannot be installed from there")
    if choice.index is not None:
        say(f"{choice.index} does not answer or lacks {wanted}; taking the default index")
        if smi is not None:
            say(f"its build needs a driver for CUDA 13; set {VARIABLE} if yours is older")
    say(f"installing {wanted}")
    subprocess.run([*pip, wanted], check=True)


def install_itself(pip: list[str], extra: str) -> None:
    """Install dilocox with what it needs, from wheels, built by the constraints' build tools.

    A build in isolation takes the newest tools, whatever the constraints say. Where some package
    has no wheel for this machine it is built from its source like that.
    """
    subprocess.run([*pip, *BUILD], check=True)
    itself = ["-e", f"{ROOT}{extra}"]
    strict = [*pip, "--no-build-isolation", "--only-binary", ":all:"]
    strict += ["--no-binary", ",".join(SOURCES), *itself]
    if subprocess.run(strict, check=False).returncode != 0:
        say("not everything is there as a wheel for this machine; building from sources, too")
        subprocess.run([*pip, *itself], check=True)


def reachable(url: str) -> bool:
    """True if `url` answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def start_system_packages() -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    """Begin to install what the system lacks; its output goes to a file.

    The network tests use `ip` and `tc`, those of the run page a browser; elsewhere than in CI they
    skip and say so. None if nothing is missing, or this user may not install it.
    """
    wanted = {"tc": "iproute2", "chromium": "chromium"}
    packages = [package for command, package in wanted.items() if not shutil.which(command)]
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return None
    say(f"installing {' and '.join(packages)} of the system")
    install = f"apt-get install -y -qq --no-install-recommends {' '.join(packages)}"
    output = tempfile.TemporaryFile()  # noqa: SIM115
    shell = ["sh", "-c", f"apt-get update -qq; {install}"]
    return subprocess.Popen(shell, stdout=output, stderr=subprocess.STDOUT), output


def finish_system_packages(installing: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    """Wait for what `start_system_packages` began; exit with its output if it failed."""
    if installing.wait() != 0:
        output.seek(0)
        said = output.read().decode(errors="replace")
        sys.exit(f"setup: the system's packages could not be installed:\n{said}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
