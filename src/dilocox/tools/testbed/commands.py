"""Runs the system commands that make a lab, and turns their failures into `LabError`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from dilocox.errors import DilocoxError

PREFIX = "dilocox-"
"""Prefix of the name of every namespace and control group; the owner's process id follows."""


class LabError(DilocoxError):
    """A lab that cannot be made, or whose links or quotas are not as requested."""


def call(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Run a short command with `lines` as its input, and return its output.

    Raises `LabError` with the command and its last line of error output if it fails.
    """
    done = subprocess.run(  # noqa: S603 - fixed commands of the lab
        command,
        capture_output=True,
        text=True,
        input="".join(f"{line}\n" for line in lines),
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        # The last line of `tc -batch` only gives the number of the input line that failed.
        said = [line for line in said if not line.startswith("Command failed")] or said
        why = said[-1].strip() if said else f"exit code {done.returncode}"
        raise LabError(f"{' '.join(command[:12])}: {why}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Run `ip`, and return its output. Raises `LabError` if it fails."""
    return call(["ip", *arguments])


def tc(namespace: str, lines: Sequence[str]) -> None:
    """Run `tc` commands in a network namespace, in order. Raises `LabError` if one fails."""
    if lines:
        call(["tc", "-n", namespace, "-batch", "-"], lines)
