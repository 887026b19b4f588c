"""Measures how fast payloads are cut into pieces and rebuilt, as `[availability]` does.

Each row is a code, k of n, over one content of random bytes, in one thread. `encode` is the erasure
code alone. `cut` is what a site does: the code, the Merkle tree over all n pieces, and its own
piece. `decode` is the code alone, from the last k pieces, which is the slowest choice: the parity
pieces. `rebuild` is what a reader does: the proofs, the code, the digests, and the encoding of the
result, which must give the signed root. Speeds are MB of content per second of the process's CPU
time, so other work on the machine hardly counts: the median over repetitions and its 95 % interval.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from benchmarks import common
from dilocox.record.pieces.content import Content, InMemory
from dilocox.record.pieces.cut import Cut, cut
from dilocox.record.pieces.erasure import decoded, encoded, is_installed
from dilocox.record.pieces.rebuild import rebuild

CODES = ((2, 4), (8, 12))
MEGABYTES, QUICK_MEGABYTES = 100, 10
REPEATS, QUICK_REPEATS = 9, 3


def measured(k: int, n: int, content: bytes, repeats: int) -> common.Row:
    """Return the row of the code k of n."""
    found = cut([content], k, n)
    last = {index: found.pieces[index].data for index in range(n - k, n)}
    row: common.Row = {"k": k, "n": n, "megabytes": len(content) / 1e6}
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: sum(1 for _ in encoded(Content([InMemory(content)]), k, n)),
        "cut": lambda: cut([content], k, n, [n - 1]),
        "decode": lambda: decoded(last, k, n, len(content)),
        "rebuild": lambda: _rebuilt(found, k, n),
    }
    for name, call in calls.items():
        speeds = [len(content) / 1e6 / _seconds(call) for _ in range(repeats)]
        interval = common.median_interval(speeds)
        row[f"{name}_mb_per_second"] = round(interval.median, 1)
        row[f"{name}_low"] = round(interval.low, 1)
        row[f"{name}_high"] = round(interval.high, 1)
    return row


def _rebuilt(found: Cut, k: int, n: int) -> object:
    return rebuild([found.pieces[index] for index in range(n - k, n)], found.root, k)


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    """Run the benchmark, print its rows, and write them with `--json`."""
    options = common.parser(__doc__ or "").parse_args()
    missing = None if is_installed() else "the package zfec is missing"
    if common.cannot("availability", missing):
        sys.exit(common.CANNOT)
    on = common.machine()
    megabytes = QUICK_MEGABYTES if options.quick else MEGABYTES
    repeats = QUICK_REPEATS if options.quick else REPEATS
    content = random.Random(0).randbytes(megabytes * 10**6)
    rows = [measured(k, n, content, repeats) for k, n in CODES]
    for row in rows:
        speeds = ", ".join(
            f"{name} {row[f'{name}_mb_per_second']:.0f}"
            for name in ("encode", "cut", "decode", "rebuild")
        )
        print(f"{row['k']} of {row['n']}: {speeds} MB/s")
    if options.json is not None:
        settings = {"megabytes": megabytes, "repeats": repeats}
        common.write_json(options.json, "availability", on, settings, rows)


if __name__ == "__main__":
    main()
