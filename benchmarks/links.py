"""Measures speed and processor time of links between two ranks, over this machine's loopback.

Two processes send a tensor of 256 MiB repeatedly, in one direction (`one`) or in both at once
(`both`). They use the links of dilocox (TLS 1.3, both ends certified) and, for comparison, Gloo,
which does not encrypt. The two take turns, so that a busy machine slows both. Figures are medians
over turns: `gbit_per_s` is the rate of one direction, `cpu_s_per_gb` the processor time of both
ends together per GB received. A full run takes about two minutes on two cores, --quick twenty
seconds.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.rendezvous import MemoryStore
from dilocox.config.network import NetworkSection
from dilocox.coordinator.identity import Authority, Identity, new_request
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import ExchangeError
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.addresses import Door
from dilocox.transport.link.endpoint import LinkEndpoint

CONTEXT = multiprocessing.get_context("fork")
SITES = ("a", "b")
TENSOR_BYTES = 256 << 20
LIMIT = 120.0
COLUMNS: dict[str, Callable[[Any], str] | str] = {
    "over": "s",
    "way": "s",
    "gbit_per_s": ".2f",
    "cpu_s_per_gb": ".2f",
}
Move = Callable[[torch.Tensor | None, torch.Tensor | None, int], None]
"""(tensor to send, tensor to fill, number). Returns when both transfers are complete."""


def over_links(identity: Identity, store: MemoryStore, _: Path) -> Move:
    """Return a function that moves tensors over a link."""
    timeouts = Timeouts.derive(NetworkSection())
    endpoint = LinkEndpoint(identity, Door(0, None, None, False), "127.0.0.1", timeouts)
    group = PeerGroup(endpoint, store, "g", SITES, LIMIT, LIMIT, lambda: False)
    other = next(site for site in SITES if site != identity.site)

    def move(out: torch.Tensor | None, into: torch.Tensor | None, number: int) -> None:
        transfers = [] if into is None else [group.receive(into, other, number)]
        transfers += [] if out is None else [group.send(out, other, number)]
        for each in transfers:
            while not each.poll(LIMIT):
                continue

    return move


def over_gloo(identity: Identity, _: MemoryStore, folder: Path) -> Move:
    """Return a function that moves tensors over Gloo."""
    me = SITES.index(identity.site)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=me, world_size=len(SITES)
    )

    def move(out: torch.Tensor | None, into: torch.Tensor | None, number: int) -> None:
        works = [] if into is None else [dist.irecv(into, 1 - me, tag=number)]
        works += [] if out is None else [dist.isend(out, 1 - me, tag=number)]
        for work in works:
            assert work is not None
            work.wait()

    return move


def side(
    make: Callable[[Identity, MemoryStore, Path], Move],
    identity: Identity,
    store: MemoryStore,
    folder: Path,
    both: bool,
    times: int,
    pipe: Connection,
) -> None:
    """Run one end: move `times` tensors, and send (wall-clock, CPU) seconds to `pipe`.

    `both`: tensors travel in both directions at once; otherwise only the first site sends.
    """
    torch.set_num_threads(1)
    move = make(identity, store, folder)
    first = identity.site == SITES[0]
    out = torch.zeros(TENSOR_BYTES, dtype=torch.uint8) if first or both else None
    into = torch.empty(TENSOR_BYTES, dtype=torch.uint8) if both or not first else None
    move(out, into, 1)
    used, began = _used(), time.monotonic()
    for number in range(times):
        move(out, into, 2 + number)
    pipe.send((time.monotonic() - began, _used() - used))
    store.kv_set(f"done/{identity.site}", b"")
    store.kv_get([f"done/{site}" for site in SITES], LIMIT)


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


WAYS: dict[str, Callable[[Identity, MemoryStore, Path], Move]] = {
    "links": over_links,
    "gloo": over_gloo,
}


def measure(over: str, both: bool, times: int, identities: Sequence[Identity]) -> dict[str, float]:
    """Run one measurement. Returns Gbit/s of one direction, and CPU seconds per GB.

    Raises `ExchangeError` if a process fails, or does not end.
    """
    with CONTEXT.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        store, pipes, started = MemoryStore(manager.dict()), [], []
        for identity in identities:
            ours, theirs = CONTEXT.Pipe(duplex=False)
            arguments = (WAYS[over], identity, store, Path(folder), both, times, theirs)
            started.append(CONTEXT.Process(target=side, args=arguments))
            started[-1].start()
            # A pipe of a process that has failed ends only when no process can write to it.
            theirs.close()
            pipes.append(ours)
        try:
            found = answers(over, pipes)
            for process in started:
                process.join(5.0)
        finally:
            for process in started:
                process.kill()
    gigabytes = times * TENSOR_BYTES / 1e9
    seconds = max(seconds for seconds, _ in found)
    return {
        "gbit_per_s": gigabytes * 8 / seconds,
        "cpu_s_per_gb": sum(used for _, used in found) / (gigabytes * (2 if both else 1)),
    }


def answers(over: str, pipes: Sequence[Connection]) -> list[tuple[float, float]]:
    """Return what the processes send at their ends, in any order.

    Raises `ExchangeError` as soon as a process has failed, or after `LIMIT` seconds.
    """
    found: dict[Connection, tuple[float, float]] = {}
    end = time.monotonic() + LIMIT
    while len(found) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in found]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise ExchangeError(f"{over}: no end within {LIMIT:g} s")
        for pipe in waiting:
            if pipe in ready:
                try:
                    found[pipe] = pipe.recv()
                except EOFError:
                    raise ExchangeError(f"{over}: a process has failed") from None
    return list(found.values())


def identities_in(folder: Path) -> list[Identity]:
    """Return the certificates of the two sites, from an authority in `folder`."""
    authority = Authority(folder, ["localhost"])
    found = []
    for site in SITES:
        key, request = new_request(site)
        certificate = authority.sign(request, site, 1)
        found.append(Identity(site, 1, key, certificate, authority.pem, authority.fingerprint))
    return found


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    on, turns, times = common.machine(), 1 if options.quick else 5, 2 if options.quick else 8
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        identities = identities_in(Path(folder))
        for both in (False, True):
            taken: dict[str, list[dict[str, float]]] = {over: [] for over in WAYS}
            try:
                for _ in range(turns):
                    for over in WAYS:
                        taken[over].append(measure(over, both, times, identities))
            except ExchangeError as error:
                print(f"links: {error}", file=sys.stderr)
                return 1
            for over, found in taken.items():
                medians = {
                    name: round(statistics.median(each[name] for each in found), 3)
                    for name in found[0]
                }
                rows.append({"over": over, "way": "both" if both else "one", **medians})
                common.say(common.table(rows[-1:], COLUMNS).splitlines()[1])
    print(common.table(rows, COLUMNS))
    if options.json:
        common.write_json(options.json, "links", on, {"tensor_bytes": TENSOR_BYTES}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
