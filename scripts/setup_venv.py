"""Make the virtual environment that the Makefile uses. Standard library only.

PyTorch comes from the one of its indexes that fits the machine (`torch_index`), CPU wheels where
there is no NVIDIA GPU. Where that index cannot be reached the default one has to do.

Everything else is installed by uv, in a quarter of the time that pip takes. pip does it where uv
cannot.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from torch_index import VARIABLE, ask_nvidia_smi, choose, with_torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("hatchling", "editables", "setuptools")
"""Packages that build dilocox itself and `SOURCES`."""
SOURCES = ("jsonpath-rw", "rouge-score", "sqlitedict", "word2number")
"""Packages without any wheel. Only tests need them: jsonpath-rw is needed by mlcroissant, the
others by lm-eval."""
LOG = "setup.log"
"""File in the environment's folder with the output of pip and uv."""
TOLD = frozenset(("cert", "constraint", "index-url"))
"""Settings of pip that uv is told."""
WITHOUT_EFFECT = frozenset((
    "cache-dir", "config-file", "default-timeout", "disable-pip-version-check", "extra-index-url",
    "find-links", "no-color", "no-input", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "timeout",
))  # fmt: skip
"""Settings of pip without which uv installs the same, as versions are pinned. What only a further
index or a link has, pip installs, since uv does not find it."""
SHOWN = 15
"""Last lines of the log that are shown if pip fails."""


class Pip:
    """pip and uv of an environment. Their output goes to a log file."""

    def __init__(self, python: Path, log: Path, constraints: Path) -> None:
        self.constraints, self.log = constraints, log
        self._python = python
        log.write_bytes(b"")

    def install(self, *words: str, constrained: bool = True) -> bool:
        """Install packages, and return whether that succeeded."""
        return self._run(
            "pip",
            "install",
            "--quiet",
            "--no-compile",  # compiling all modules takes half a minute; imports do it later
            "--disable-pip-version-check",
            *(["-c", str(self.constraints)] if constrained else []),
            *words,
        )

    def install_by_uv(self, *words: str) -> bool:
        """Install packages by uv, and return whether that succeeded.

        uv reads no settings of pip, so those of `TOLD` are passed on. With others, and in an
        environment that has the packages of the system, pip has to install: False.
        """
        settings = self.settings()
        if settings.keys() - TOLD - WITHOUT_EFFECT or self._has_packages_of_the_system():
            return False
        constraints = [str(self.constraints), *settings.get("constraint", "").split()]
        variables = {  # not arguments, which other users see: an address may hold a password
            "SSL_CERT_FILE": settings.get("cert"),
            "UV_DEFAULT_INDEX": settings.get("index-url"),
        }
        return self.install("uv") and self._run(
            *("uv", "--quiet", "--no-config", "pip", "install", "--python", str(self._python)),
            *(word for each in constraints for word in ("-c", each)),
            *words,
            variables={name: value for name, value in variables.items() if value},
        )

    def settings(self) -> dict[str, str]:
        """Return the values of pip's files of settings and variables for `pip install` by name."""
        asked = [str(self._python), "-m", "pip", "config", "list"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        found = re.findall(r"^(\S+?)\.([\w-]+)='(.*)'$", said, re.MULTILINE)
        return {
            name: value.replace("\\n", " ").strip()
            for section in ("global", "install", ":env:")  # the last one counts
            for where, name, value in found
            if where == section
        }

    def _has_packages_of_the_system(self) -> bool:
        """Return whether the environment also has the packages beside it, which uv ignores."""
        file = self.log.parent / "pyvenv.cfg"
        told = file.read_text(encoding="utf-8").lower() if file.exists() else ""
        return (
            re.search(r"^include-system-site-packages\s*=\s*true", told, re.MULTILINE) is not None
        )

    def _run(self, *words: str, variables: dict[str, str] | None = None) -> bool:
        command = [str(self._python), "-m", *words]
        environment = {**os.environ, **(variables or {})}
        with self.log.open("ab") as out:
            done = subprocess.run(command, stdout=out, stderr=out, env=environment, check=False)
        return done.returncode == 0

    def need(self, *words: str) -> None:
        """Install packages. If that fails, print the end of the log and exit."""
        if not self.install(*words):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            told = "\n".join(lines[-SHOWN:])
            sys.exit(f"{told}\nsetup: pip failed; all that it said: {self.log}")


def main() -> None:
    """Create or complete the environment at the given folder."""
    arguments = parser().parse_args()
    if sys.version_info < (3, 11):
        sys.exit(
            f"dilocox needs Python 3.11 or newer, this is {sys.version.split()[0]}; "
            "set PYTHON, for example: make PYTHON=python3.12 quickstart"
        )
    began = time.monotonic()
    python = make_environment(arguments.folder)
    pip = Pip(python, arguments.folder / LOG, ROOT / arguments.constraints)
    # Packages of the system and of Python are installed in parallel.
    system = start_system_packages() if arguments.dev and os.environ.get("CI") else None
    with tempfile.TemporaryDirectory() as folder:
        install_torch(python, pip, Path(folder))
        extra = "[dev]" if arguments.dev else "[tests]" if arguments.tests else ""
        say("installing dilocox and what it needs" + (" for its tests" if extra else ""))
        install_itself(pip, extra)
    if system is not None:
        finish_system_packages(*system)
    say(
        f"ready in {time.monotonic() - began:.0f} s; what pip and uv said: {arguments.folder / LOG}"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("folder", type=Path)
    made.add_argument("--dev", action="store_true", help="add what all of the tests need")
    made.add_argument("--tests", action="store_true", help="add what most of the tests need")
    made.add_argument("--constraints", default="constraints.txt", help="which versions to take")
    return made


def make_environment(folder: Path) -> Path:
    """Make the virtual environment at `folder` if it lacks a working pip, and return its Python.

    The making may have been interrupted before, or Python may lack its module `ensurepip`. Such an
    environment is made anew. If that fails, exit with one line.
    """
    python = folder / "bin" / "python"
    if python.exists():
        asked = [str(python), "-m", "pip", "--version"]
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return python
    anew = (folder / "pyvenv.cfg").exists()
    if anew and Path(sys.prefix).resolve() == folder.resolve():
        sys.exit(f"setup: {folder} has no pip, and runs this script; run it by another Python")
    say(f"creating {folder} with Python {sys.version.split()[0]}")
    clear = ["--clear"] if anew else []
    made = subprocess.run(
        [sys.executable, "-m", "venv", *clear, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        reason = " ".join(made.stdout.split()) or f"exit code {made.returncode}"
        sys.exit(
            f"setup: {folder} cannot be made ({reason}); Debian and Ubuntu have the missing part "
            "of Python in the package python3-venv"
        )
    return python


def install_torch(python: Path, pip: Pip, scratch: Path) -> None:
    """Install the build of PyTorch that this machine can run, unless some PyTorch is there.

    Where no build of the constraints' PyTorch fits, `pip` names changed constraints afterwards.
    """
    have = subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False)
    if have.returncode == 0:
        return
    constraints = pip.constraints.read_text()
    pin = re.search(r"^torch[=<]\S+", constraints, re.MULTILINE)
    assert pin, f"{pip.constraints} names torch"
    smi, capabilities = ask_nvidia_smi()
    override = os.environ.get(VARIABLE)
    try:
        choice = choose(smi, capabilities, override, sys.platform == "linux")
    except ValueError as error:
        sys.exit(f"setup: {error}")
    wanted = choice.requirement or pin[0]
    if choice.requirement is not None:
        pip.constraints = scratch / "constraints.txt"
        pip.constraints.write_text(with_torch(constraints, choice.requirement))
    trouble = f"{choice.index} does not answer"
    if choice.index is not None and (override or reachable(f"{choice.index}/torch/")):
        say(f"installing {wanted} from {choice.index} ({choice.why})")
        if pip.install(wanted, "--index-url", choice.index, constrained=False):
            return
        if override:
            sys.exit(f"setup: {VARIABLE}={override}: {wanted} cannot be installed from there")
        trouble = f"pip cannot install it from {choice.index} ({pip.log})"
    if choice.index is not None:
        say(f"{trouble}; taking the default index")
        if smi is not None:
            say(f"its build needs a driver for CUDA 13; set {VARIABLE} if yours is older")
    say(f"installing {wanted}")
    pip.need(wanted)


def install_itself(pip: Pip, extra: str) -> None:
    """Install dilocox with what it needs, from wheels, built by the constraints' build tools.

    A build in isolation takes the newest tools, whatever the constraints say. Where some package
    has no wheel for this machine pip builds it from its source like that.
    """
    pip.need(*BUILD)
    itself = ("--no-build-isolation", "-e", f"{ROOT}{extra}")
    if pip.install_by_uv(*itself):
        return
    say(f"uv does not install it here ({pip.log}); pip takes a few minutes")
    wheels = ("--only-binary", ":all:", "--no-binary", ",".join(SOURCES))
    if not pip.install(*wheels, *itself):
        say("not everything is there as a wheel for this machine; building from sources, too")
        pip.need("-e", f"{ROOT}{extra}")


def reachable(url: str) -> bool:
    """Return whether `url` answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False  # the last for a proxy whose address, or answer, is malformed


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
    """Wait for the process of `start_system_packages`, and exit with its output if it failed."""
    if installing.wait() != 0:
        output.seek(0)
        said = output.read().decode(errors="replace")
        sys.exit(f"setup: the system's packages could not be installed:\n{said}")


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
