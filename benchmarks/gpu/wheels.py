"""Packages that a machine with PyTorch may lack: their download line and installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (
    "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "rfc8785",
    "securesystemslib", "cryptography", "cffi", "pycparser", "tomli_w", "typing_extensions",
)  # fmt: skip
"""Packages that dilocox needs, and that common images with PyTorch, transformers and aiohttp
lack."""
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt, by name in lower case with hyphens."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.split("#")[0].strip().partition("==")
        if equals:
            found[_plain(name)] = version.split(";")[0].strip()
    return found


def line(python: str = "3.12") -> str:
    """Return the command that downloads the wheels for x86-64 Linux."""
    known = pinned()
    wanted = " ".join(
        f"'{name}=={known[_plain(name)]}'" if _plain(name) in known else name for name in NAMES
    )
    platforms = " ".join(f"--platform {each}_x86_64" for each in PLATFORMS)
    return (
        f"python3 -m pip download --no-deps --only-binary=:all: --implementation cp "
        f"--python-version {python} {platforms} -d .whl {wanted}"
    )


def install(wheels: Path, target: Path) -> None:
    """Install all wheels of a folder into `target`, without a network.

    Raises `SystemExit` if the folder has no wheel, or if pip refuses a wheel.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels}: no wheel is there; --wheels-line prints the download")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
         "--no-cache-dir", "--target", str(target), *map(str, files)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip() or "pip failed").splitlines()[-1]
        raise SystemExit(f"--wheels {wheels}: {last}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
