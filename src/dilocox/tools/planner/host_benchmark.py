"""Measures the speeds of this machine that exchanges depend on: codecs, outer step, loopback."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dilocox.compression import Geometry, LowRank, compressor
from dilocox.config.codec_kinds import BUILT_IN
from dilocox.config.codec_spec import parse_spec
from dilocox.errors import TrainingError
from dilocox.outer.averaging import average
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.outer_step import Rule

SECONDS = 1.0
"""Approximate duration of each measurement."""
VALUES = 1 << 22
"""fp32 values that codecs and the outer step are timed on."""
CODECS = [parse_spec(kind.name).text for kind in BUILT_IN if not kind.agrees_first]
RANKS = (8, 64)
"""Ranks of the low-rank codec that are timed: two, to separate costs that grow with the rank."""


def measure_host() -> dict[str, Any]:
    """Measure codecs, averaging, digest and outer step in one thread, as keys of a `host` entry.

    The caller must set `torch.set_num_threads(1)` before.
    """
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)) * 1e-3
    geometry = Geometry(((VALUES // 1024, 1024),), (0,), VALUES)
    size = values.nbytes / 1e9
    encode, decode = {}, {}
    for spec in CODECS:
        part = compressor(spec, geometry).part(0, VALUES, seed=1)
        payload = part.encode(values)
        kind = spec.partition(":")[0]
        encode[kind] = size / timed(partial(part.encode, values))
        decode[kind] = size / timed(partial(part.decode, payload))
    low = _low_rank(values, geometry)
    encode["lowrank"], decode["lowrank"] = low["encode"], low["decode"]
    other = values.flip(0)
    digest = timed(lambda: hashlib.sha256(values.numpy().data).digest())
    adding = timed(lambda: average(iter([values, other]), [1.0, 1.0]))
    return {
        "encode_gb_s": encode,
        "decode_gb_s": decode,
        "lowrank_gmacs": low["gmacs"],
        "sha256_gb_s": size / digest,
        "average_gb_s": 2 * size / adding,
        "outer_ns": 1e9 * timed(_outer_step(values)) / VALUES,
    }


def _low_rank(values: torch.Tensor, geometry: Geometry) -> dict[str, float]:
    """Return the low-rank codec's GB/s at rank 0 (extrapolated), and 10^9 multiply-adds/s."""
    encoding, decoding = [], []
    for rank in RANKS:
        made = LowRank(geometry, rank)
        warm = made.first_warm()
        basis = made.orthonormalise([made.project(values, warm)] * 2)
        payload = made.encode(values, basis)
        encoding.append(
            timed(partial(made.project, values, warm)) + timed(partial(made.encode, values, basis))
        )
        decoding.append(timed(partial(made.decode, payload, basis)))
    few, many = RANKS
    n, size = values.numel(), values.nbytes / 1e9
    each = max(1e-15, (encoding[1] - encoding[0]) / (2.0 * n * (many - few)))
    rest = max(1e-6, encoding[0] - 2.0 * n * few * each)
    left = max(1e-6, decoding[0] - n * few * each)
    return {"encode": size / rest, "decode": size / left, "gmacs": 1e-9 / each}


def _outer_step(values: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs one fragment's boundary and landing, as training does."""
    live = {"w": values.clone().view(-1, 1024)}
    state = FragmentState(Layout.of({"w": live["w"].shape}), live, error_feedback=True)
    sent, mean = values * 0.5, values * 0.1
    rule = Rule(overlap="keep", learning_rate=0.8, momentum=0.5)

    def act() -> None:
        u, _ = state.boundary(live, 1.0, 1.0)
        state.committed(u, sent)
        state.land(live, mean, rule)

    return act


def measure_loopback(size: int = 1 << 26) -> float:
    """Return the bytes per second of one TCP connection from this machine to itself.

    Sends `size` bytes. Raises `TrainingError` if the connection breaks.
    """
    payload = bytes(size)
    received = 0
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as out:
                out.sendall(payload)

        sender = threading.Thread(target=send, daemon=True)
        start = time.monotonic()
        sender.start()
        connection, _ = server.accept()
        with connection:
            while received < size:
                some = len(connection.recv(1 << 20))
                if not some:
                    break
                received += some
        seconds = time.monotonic() - start
        sender.join()
    if received < size:
        raise TrainingError("calibration: the loopback connection broke; try again")
    return size / seconds


def timed(act: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the shortest time of `act`, in seconds.

    `act` is called once to warm up, then for about `SECONDS`, at least three times. The default
    `clock` is processor time. The shortest time counts, because other work on the machine can
    only add to it.
    """
    act()
    times: list[float] = []
    until = time.monotonic() + SECONDS
    while len(times) < 3 or (time.monotonic() < until and len(times) < 200):
        start = clock()
        act()
        times.append(clock() - start)
    return max(1e-9, min(times))
