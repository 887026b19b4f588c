"""Write requirements-hashed.txt: the tested versions of all dependencies, with SHA-256 hashes.

    pip install uv
    python scripts/lock_requirements.py

`uv` resolves pyproject.toml under constraints.txt for all platforms, from wheels only, and takes
the hashes from the package index. Machines that need a build from PyTorch's own index use
`make setup` instead: those builds have other hashes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-hashed.txt"
HEADER = """\
# Every file that `pip install --require-hashes` may take, for all platforms (docs/install.md).
# Written by scripts/lock_requirements.py from pyproject.toml and constraints.txt; do not edit.
"""
OPTIONS = (
    "--universal", "--python-version", "3.11", "--generate-hashes", "--no-build", "--no-config",
    "--no-header", "--no-annotate", "--constraints", "constraints.txt", "--group", "build",
    "--quiet",
)  # fmt: skip


def main() -> None:
    """Resolve the dependencies, and replace the file if that succeeds."""
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("lock: uv is not installed; install it (pip install uv) and run this again")
    done = subprocess.run(
        [uv, "pip", "compile", *OPTIONS, "pyproject.toml"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(
            "lock: pyproject.toml and constraints.txt contradict each other; see uv's lines above"
        )
    (ROOT / LOCK).write_text(HEADER + done.stdout, encoding="utf-8")
    packages = re.findall(r"^\S+==", done.stdout, re.MULTILINE)
    print(f"lock: wrote {LOCK}, {len(packages)} packages")


if __name__ == "__main__":
    main()
