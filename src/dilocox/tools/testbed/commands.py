"""The commands that a lab is made with, and what it says when one fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from dilocox.errors import DilocoxError

PREFIX = "dilocox-"
"""Begins the name of every namespace and control group; the maker's process number follows."""


class LabError(DilocoxError):
    """A network that cannot be made, or is not what it should be."""


def call(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Run a short command with `lines` as its input; what it prints.

    Raises `LabError` with the command and the last line of what it complained about.
    """
    done = subprocess.run(  # noqa: S603 - fixed commands of the lab
        command,
        capture_output=True,
        text=True,
        input="".join(f"{line}\n" for line in lines),
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        # `tc -batch` ends with a line that only says which line of its input failed.
        said = [line for line in said if not line.startswith("Command failed")] or said
        why = said[-1].strip() if said else f"exit code {done.returncode}"
        raise LabError(f"{' '.join(command[:12])}: {why}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Run `ip`; what it prints. Raises `LabError`."""
    return call(["ip", *arguments])


def tc(namespace: str, lines: Sequence[str]) -> None:
    """Run `tc` commands in a network namespace, in this order. Raises `LabError`."""
    if lines:
        call(["tc", "-n", namespace, "-batch", "-"], lines)
