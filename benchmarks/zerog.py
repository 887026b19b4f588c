"""Measures how fast bundles go into 0G Storage and come back, through its own protocol.

An emulator of a storage node and a chain with 0G's genuine contracts run in another process of this
machine. Nothing leaves the machine, so the figures are those of dilocox's own work and of the
emulator's, not of a network. Both processes share the processors. Each repetition takes random
bytes of its own:

- `hash_mb_s`: the root of a file alone, which a contract is told.
- `up_mb_s`: from a bundle on disk to a file that the node has whole: root, transaction, proofs,
  upload. The node checks every proof.
- `down_mb_s`: from the root of the index to verified files on disk, as `dilocox verify` fetches
  them: digests of parts, root and tar file.

`…_cpu_mb_s` are the same bytes by the processor time of dilocox's own process. They hardly change
when other work shares the processors, which the other figures do. MB are 10^6 bytes.

It takes about two minutes, and needs the packages safe-pysha3, web3, eth-tester and zg-storage;
otherwise it prints one line and exits with code 3.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.record.log.audit_verdicts import Prefix

RESULTS = common.RESULTS / "zerog-cpu.json"
SIZE, QUICK_SIZE = 64_000_000, 8_000_000
"""Bytes of a bundle's file."""
REPEATS, QUICK_REPEATS = 11, 2
AIM = 30.0
"""MB/s, the published figure of the network."""
NEEDED = ("sha3", "web3", "eth_tester", "zg_storage")
RATES = ("hash", "up", "down")


@contextmanager
def network(address: str) -> Iterator[dict[str, Any]]:
    """Chain, contracts and node in a process of its own; yields their places.

    Raises `CommandError` if the process does not start.
    """
    command = [sys.executable, "-m", "tests.support.zerog_network", address]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        started = process.stdout.readline()
        if not started:
            raise common.CommandError(f"the emulator has ended with code {process.wait()}")
        places: dict[str, Any] = json.loads(started)
        yield places
    finally:
        process.stdin.close()
        process.wait()


def measure(root: Path, places: dict[str, Any], account: Any, size: int, number: int) -> common.Row:
    """Measure one file. `account` pays; `number` names the repetition."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from dilocox.record.bundles.fetch import fetched, open_bundles
    from dilocox.record.bundles.publication import Publication
    from dilocox.record.bundles.zerog_node import ZerogUrl
    from dilocox.record.bundles.zerog_root import RootBuilder
    from dilocox.record.log import statements as s
    from dilocox.record.log.signed_note import NoteKey
    from dilocox.tools.storage.bundle_file import BundleFile
    from dilocox.tools.storage.uplink import Uplink
    from dilocox.tools.storage.zerog_destination import ZerogAccess, ZerogDestination

    url = ZerogUrl.parse(f"zerog://127.0.0.1:{places['node']}")
    rpc = f"http://127.0.0.1:{places['rpc']}"
    access = ZerogAccess(url, rpc, places["contract"], account, 10**18)
    destination = ZerogDestination(access, root / str(number))
    private = Ed25519PrivateKey.generate()
    log = NoteKey("benchmark", private.public_key().public_bytes_raw())
    data = os.urandom(size)
    with BundleFile(root) as file:
        file.add("model/model.safetensors", size, iter((data,)))
        bundle = file.finish(0, Prefix(0, "00" * 32), last=True)
        begin = _clocks()
        builder = RootBuilder()
        for part in file.parts():
            builder.update(part)
        builder.finish()
        hashed = _clocks()
        sent, count = destination.send(file, bundle, Uplink(None))
        up = _clocks()
    if count != bundle.size:
        raise RuntimeError(f"{count:,} bytes were uploaded, not {bundle.size:,}")
    index = Publication(log, "benchmark")
    index.add(sent, s.Signer(private))
    destination.send_index(index.text, True, Uplink(None))
    destination.finish(index.text, Uplink(None))
    stored = _clocks()
    with fetched(open_bundles(destination.published), str(log)) as found:
        down = _clocks()
        if found.fault or (found.folder / "model/model.safetensors").read_bytes() != data:
            raise RuntimeError(f"other bytes came back: {found.fault}")
    row: common.Row = {"repetition": number, "bytes": bundle.size}
    spans = ((begin, hashed), (hashed, up), (stored, down))
    for name, (first, last) in zip(RATES, spans, strict=True):
        for kind in first:
            row[f"{name}_{kind}"] = round(bundle.size / 1e6 / (last[kind] - first[kind]), 1)
    return row


def _clocks() -> dict[str, float]:
    """Return seconds by the clock, and of this process's processor time."""
    return {"mb_s": time.monotonic(), "cpu_mb_s": time.process_time()}


def main() -> int:
    """Measure, print and write."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if common.cannot("zerog", f"not installed: {', '.join(missing)}" if missing else None):
        return common.CANNOT
    from eth_account import Account

    on = common.machine()
    account = Account.create()
    size, repeats = (QUICK_SIZE, QUICK_REPEATS) if options.quick else (SIZE, REPEATS)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dilocox-zerog-") as folder,
            network(account.address) as places,
        ):
            root = Path(folder)
            measure(root, places, account, 1_000_000, -1)  # what is loaded at the first use
            rows = [measure(root, places, account, size, n) for n in range(repeats)]
    except common.CommandError as error:
        common.say(f"zerog: {error}")
        return 1
    names = [name for name in rows[0] if name.endswith("mb_s")]
    print(common.table(rows, {"repetition": "d", "bytes": ",d", **dict.fromkeys(names, ".1f")}))
    for name in names:
        values = [row[name] for row in rows]
        middle = common.median_interval(values).median
        print(f"{name}: median {middle:.1f}, {min(values):.1f} to {max(values):.1f}; aim {AIM:g}")
    path = options.json or (None if options.quick else RESULTS)
    if path:
        settings = {"size": size, "repeats": repeats, "aim_mb_s": AIM}
        common.write_json(path, "zerog", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
