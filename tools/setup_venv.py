"""Make the virtual environment that the Makefile uses. Standard library only.

A machine without an NVIDIA GPU gets PyTorch's own CPU wheels where they can be reached, and
whatever the default index gives where not, so that nobody downloads gigabytes of CUDA for a test.
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

ROOT = Path(__file__).resolve().parent.parent
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Create or complete the environment at the given folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dev", action="store_true", help="add what the tests need")
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
        str(ROOT / "constraints.txt"),
    ]
    # The system's packages come beside Python's: neither waits for the other.
    system = start_system_packages() if arguments.dev and os.environ.get("CI") else None
    install_torch(python, pip)
    target = f"{ROOT}[dev]" if arguments.dev else str(ROOT)
    say("installing dilocox and what it needs" + (" for its tests" if arguments.dev else ""))
    subprocess.run([*pip, "-e", target], check=True)
    if system is not None:
        finish_system_packages(*system)


def install_torch(python: Path, pip: list[str]) -> None:
    """Install the pinned PyTorch, as a CPU build unless this machine has an NVIDIA GPU."""
    have = subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False)
    if have.returncode == 0:
        return
    pin = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin, "constraints.txt pins torch"
    cpu = sys.platform == "linux" and shutil.which("nvidia-smi") is None
    if cpu and reachable(CPU_WHEELS + "/torch/"):
        say(f"installing {pin[0]} (CPU build)")
        plain = [part for part in pip if part not in ("-c", str(ROOT / "constraints.txt"))]
        done = subprocess.run([*plain, pin[0], "--index-url", CPU_WHEELS], check=False)
        if done.returncode == 0:
            return
        say("that did not work; taking the default index")
    say(f"installing {pin[0]}")
    subprocess.run([*pip, pin[0]], check=True)


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
