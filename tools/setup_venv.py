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
import urllib.error
import urllib.request
from pathlib import Path

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
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    install_torch(python, pip)
    target = f"{ROOT}[dev]" if arguments.dev else str(ROOT)
    say("installing dilocox and what it needs" + (" for its tests" if arguments.dev else ""))
    subprocess.run([*pip, "-e", target], check=True)
    if arguments.dev and os.environ.get("CI"):
        install_system_packages()


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


def install_system_packages() -> None:
    """The network tests use `ip` and `tc`, those of the run page a browser; elsewhere than in CI
    they skip and say so."""
    wanted = {"tc": "iproute2", "chromium": "chromium"}
    packages = [package for command, package in wanted.items() if not shutil.which(command)]
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    say(f"installing {' and '.join(packages)}")
    subprocess.run(["apt-get", "update", "-qq"], check=False)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], check=True
    )


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
