"""Merges the timelines of ranks into one file in the Trace Event Format, which browsers display.

In the file, each rank is a process and each thread is a row. Threads whose lifetimes do not overlap
may share a row; otherwise every transfer, which has its own thread, would add a row. Events are
streamed from input to output, so a long timeline need not fit into memory.

In the Trace Event Format, "X" is a complete event, "i" an instant event, and "M" names a process or
a row. `ts` and `dur` are in microseconds; `tdur` is the thread's CPU time in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.utils.tracing import MARK

TRAINING = "training"
"""Title of the main thread's row."""
_FIRST_ROWS = (TRAINING, "exchange")


def part_path(folder: Path, site: str, stage: int, shard: int) -> Path:
    """Returns the file in run folder `folder` in which a rank records its timeline."""
    return folder / "trace" / site / f"stage{stage}-shard{shard}.jsonl"


def merge_run(folder: Path) -> Path | None:
    """Merge the timelines of all ranks in run folder `folder` into `trace.json`.

    Returns the merged file, or None if no rank has recorded. Removes the ranks' own files. Raises
    `OSError` if a file cannot be read or written.
    """
    return _merge(folder / "trace", folder / "trace.json")


def merge_site(folder: Path, site: str) -> Path | None:
    """Merge the timelines of one site's ranks into `trace-SITE.json`. See `merge_run`."""
    return _merge(folder / "trace" / site, folder / f"trace-{site}.json")


def merge_rank(folder: Path, site: str, stage: int, shard: int) -> Path | None:
    """Turn one rank's timeline into `trace-SITE-stageN-shardN.json`. See `merge_run`."""
    name = f"trace-{site}-stage{stage}-shard{shard}.json"
    return _merge(part_path(folder, site, stage, shard), folder / name)


def discard(folder: Path) -> None:
    """Remove the ranks' timelines from run folder `folder`, after a run that did not finish."""
    shutil.rmtree(folder / "trace", ignore_errors=True)


def _merge(parts: Path, target: Path) -> Path | None:
    files = [parts] if parts.is_file() else sorted(parts.rglob("*.jsonl"))
    if not files:
        return None
    ranks = [RankTimeline(file) for file in files]
    part = target.with_name(f".{target.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(chrome_text(ranks))
    part.replace(target)
    for path in files:
        path.unlink()
    for place in (files[0].parent, target.parent / "trace"):
        _remove_empty(place)
    return target


def _remove_empty(folder: Path) -> None:
    """Remove `folder` and its subfolders if they are empty."""
    # Another rank that ends at the same time may remove the same folders.
    with contextlib.suppress(OSError):
        for place in (*folder.iterdir(), folder) if folder.is_dir() else ():
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


@dataclass
class RankTimeline:
    """The timeline that one rank has recorded in `path`.

    Times are nanoseconds of the monotonic clock.
    """

    path: Path
    clock: tuple[int, int] = (0, 0)
    """One moment as (wall clock, monotonic clock), in nanoseconds."""
    threads: dict[int, str] = field(default_factory=dict)
    """Names of the threads, by thread number."""
    extents: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Times of the first begin and the last end of an event, by thread number."""

    def __post_init__(self) -> None:
        for item in self._lines():
            if isinstance(item, list):
                _, thread, began, length, _, _ = item
                first, last = self.extents.get(thread, (began, began))
                self.extents[thread] = (min(first, began), max(last, began + max(length, 0)))
            elif "thread" in item:
                self.threads[item["thread"]] = item["name"]
            else:
                self.clock = (item["clock"][0], item["clock"][1])

    @property
    def name(self) -> str:
        """Name for display, such as `paris stage0 shard0`."""
        return f"{self.path.parent.name} {self.path.stem.replace('-', ' ')}"

    def events(self) -> Iterator[list[Any]]:
        """Yields events as `tracing.Event`, the events of one thread in order of their end."""
        return (item for item in self._lines() if isinstance(item, list))

    def _lines(self) -> Iterator[Any]:
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # the last line of a rank that was killed while writing it

    def rows(self) -> tuple[dict[int, int], list[str]]:
        """Returns the row of each thread, by thread number, and the titles of the rows.

        Threads in one row never overlap in time.
        """
        used: dict[str, list[int]] = {}
        chosen: dict[int, str] = {}
        for thread in sorted(self.extents, key=lambda number: self.extents[number]):
            first, last = self.extents[thread]
            kind = self.threads[thread]
            kind = TRAINING if kind == "MainThread" else kind
            ends = used.setdefault(kind, [])
            row = next((number for number, until in enumerate(ends) if until <= first), len(ends))
            ends[row : row + 1] = [last]
            chosen[thread] = f"{kind} ({row + 1})" if row else kind
        titles = sorted(set(chosen.values()), key=lambda title: (_rank_of(title), title))
        return {thread: titles.index(title) for thread, title in chosen.items()}, titles


def _rank_of(title: str) -> int:
    return _FIRST_ROWS.index(title) if title in _FIRST_ROWS else len(_FIRST_ROWS)


def chrome_text(ranks: Sequence[RankTimeline]) -> Iterator[str]:
    """Yields the text of a Chrome trace of `ranks`, which must be ranks of one machine.

    Time 0 of the trace is the first event.
    """
    starts = [first for rank in ranks for first, _ in rank.extents.values()]
    zero = min(starts, default=0)
    wall, monotonic = ranks[0].clock
    about = {
        "writer": "dilocox",
        # Sites on other machines have their own trace files; this time aligns the files.
        "zero_unix_us": (wall - monotonic + zero) // 1000,
        "ranks": [rank.name for rank in ranks],
    }
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": ['
    separator = "\n"
    for process, rank in enumerate(ranks, start=1):
        for event in _events(process, rank, zero):
            yield separator + json.dumps(event)
            separator = ",\n"
    yield "\n]}\n"


def _events(process: int, rank: RankTimeline, zero: int) -> Iterator[Mapping[str, Any]]:
    rows, titles = rank.rows()
    yield _meta("process_name", process, 0, name=rank.name)
    yield _meta("process_sort_index", process, 0, sort_index=process)
    for row, title in enumerate(titles):
        yield _meta("thread_name", process, row, name=title)
        yield _meta("thread_sort_index", process, row, sort_index=row)
    for what, thread, began, length, work, arguments in rank.events():
        place = {"name": what, "pid": process, "tid": rows[thread], "ts": (began - zero) / 1000}
        if length == MARK:
            told = {**arguments, "process_cpu_us": work / 1000}
            yield {**place, "ph": "i", "s": "p", "args": told}
        else:
            times = {"dur": length / 1000, "tdur": work / 1000}
            yield {**place, "ph": "X", **times, "args": arguments}


def _meta(kind: str, process: int, row: int, **arguments: Any) -> Mapping[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": arguments}
