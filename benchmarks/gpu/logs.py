"""Collects the output of parts and their runs in one file beside the results.

A machine with a GPU may be at hand once, and its files are gone afterwards.
"""

from __future__ import annotations

from pathlib import Path

LAST = 3000
"""Number of bytes at the end of a log in which its last line is looked for."""
OF_PART = 40_000
"""Number of bytes of a part's log in the file."""
OF_RUN = 6_000
"""Number of bytes of each log of a run in the file."""
OF_STACKS = 30_000
"""Number of bytes of the stacks of a killed process in the file."""
_STACKS = "Fatal Python error"
_MODULES = "Extension modules:"
RUNS = 24
"""Largest number of logs of runs in the file, for each part."""
LARGEST = 8_000_000
"""Largest size of the file, in bytes."""


def tail(log: Path, size: int) -> str:
    """Return the last `size` bytes of a log, from the beginning of a line."""
    try:
        content = log.read_bytes()
    except OSError:
        return ""
    text = content[-size:]
    if len(content) > size:
        text = text.partition(b"\n")[2] or text
    return text.decode(errors="replace").strip()


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = tail(log, LAST).splitlines()
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def stacks(log: Path) -> str:
    """Return the stacks of the threads of killed processes, if a log has them."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    begin = text.find(_STACKS)
    if begin < 0:
        return ""
    lines = [each for each in text[begin:].splitlines() if not each.startswith(_MODULES)]
    return "\n".join(lines)[:OF_STACKS]


def append(file: Path, part: str, folder: Path) -> None:
    """Append the ends of a part's logs, and of the logs of its runs, to `file`."""
    if file.exists() and file.stat().st_size > LARGEST:
        return
    own = folder / "log.txt"
    others = sorted(each for each in folder.rglob("*.log") if each.is_file())
    sizes = [(own, OF_PART), *((each, OF_RUN) for each in others[:RUNS])]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for log, size in sizes:
            text = stacks(log) or tail(log, size)
            if text:
                out.write(f"===== {part}: {log.relative_to(folder)}\n{text}\n\n")
