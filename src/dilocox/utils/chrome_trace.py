"""From the timelines of ranks to one file in the Trace Event Format, which browsers show.

Every rank is a process there, every thread of it a row. Threads that were never alive together
share a row, since each transfer has a thread of its own. Events are written as they are read: what
a long run has recorded need not fit into memory.
(Trace Event Format: "X" is a complete event, "i" a mark, "M" names a process or a row; `ts` and
`dur` are in microseconds, `tdur` is the thread's processor time.)
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
"""Row of the main thread."""
_FIRST_ROWS = (TRAINING, "exchange")


def part_path(folder: Path, site: str, stage: int, shard: int) -> Path:
    """Where a rank records its timeline, in the run folder."""
    return folder / "trace" / site / f"stage{stage}-shard{shard}.jsonl"


def merge_run(folder: Path) -> Path | None:
    """One file, `trace.json`, of all that ranks have recorded in the run folder `folder`.

    What was recorded is removed. None if there is nothing. Raises `OSError`.
    """
    return _merge(folder / "trace", folder / "trace.json")


def merge_site(folder: Path, site: str) -> Path | None:
    """As `merge_run`, for the ranks of one site: `trace-SITE.json`."""
    return _merge(folder / "trace" / site, folder / f"trace-{site}.json")


def merge_rank(folder: Path, site: str, stage: int, shard: int) -> Path | None:
    """As `merge_run`, for one rank: `trace-SITE-stageN-shardN.json`."""
    name = f"trace-{site}-stage{stage}-shard{shard}.json"
    return _merge(part_path(folder, site, stage, shard), folder / name)


def discard(folder: Path) -> None:
    """Remove what ranks have recorded, of a run that did not come to its end."""
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
    """What another rank that ends at the same time removes first is no matter."""
    with contextlib.suppress(OSError):
        for place in (*folder.iterdir(), folder) if folder.is_dir() else ():
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


@dataclass
class RankTimeline:
    """What one rank has recorded in `path`. Times in nanoseconds, by the monotonic clock."""

    path: Path
    clock: tuple[int, int] = (0, 0)
    """The same moment by the wall clock and by the monotonic one."""
    threads: dict[int, str] = field(default_factory=dict)
    extents: dict[int, tuple[int, int]] = field(default_factory=dict)
    """First and last moment of each thread."""

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
        """For people: `paris stage0 shard0`."""
        return f"{self.path.parent.name} {self.path.stem.replace('-', ' ')}"

    def events(self) -> Iterator[list[Any]]:
        """Events as `timeline.Event`, in the order of their ends within a thread."""
        return (item for item in self._lines() if isinstance(item, list))

    def _lines(self) -> Iterator[Any]:
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # the last line of a rank that was killed while writing it

    def rows(self) -> tuple[dict[int, int], list[str]]:
        """Thread to row, and the rows' titles: threads of one row never overlap in time."""
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
    """A Chrome trace of one machine's `ranks`, in pieces of text. Time 0 is the first event."""
    starts = [first for rank in ranks for first, _ in rank.extents.values()]
    zero = min(starts, default=0)
    wall, monotonic = ranks[0].clock
    about = {
        "writer": "dilocox",
        # Sites on other machines have files of their own: by it they can be laid beside each other.
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
