"""Small file systems, where a test may mount them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def need_mounts(folder: Path) -> None:
    """Skip the test unless this process may mount a file system at `folder`."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    subprocess.run(["umount", str(folder)], check=True)
