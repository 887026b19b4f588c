"""A chain's server that is dead or hangs, asked at every checkpoint, holds up no round."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("web3")

from dilocox.tools.settlement import keystore
from dilocox.tools.settlement.run_on_chain import RunOnChain
from tests.support.harness import PATIENT, Run, Workshop

pytestmark = [pytest.mark.slow, pytest.mark.alone]
SIZE = ("outer.rounds=8", "outer.inner_steps=20", "site.stages=1", "checkpoint.every_rounds=0",
        "evaluation.every_rounds=0", PATIENT)  # fmt: skip
LEAST = 0.2
"""Least share of the tokens per second. Rounds that waited for the chain would leave a hundredth.

Equal runs differ by more than twice on a machine that computes other things, too. What is printed
says more on a quiet machine.
"""
KINDS = ("none", "dead", "hanging")


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    """URL of a server that refuses connections, or takes them and never answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        if kind == "hanging":
            found.listen(100)
        yield f"http://127.0.0.1:{found.getsockname()[1]}"


def trained(workshop: Workshop, kind: str, number: int) -> Run:
    """A run whose log is to be anchored on a chain with such a server, to its end."""
    name = f"beside-{kind}-{number}"
    sets, folder = list(SIZE), workshop.folder(name)
    keys = workshop.root / f"keys-{name}"
    keys.mkdir()
    keystore.create_key(keys / "own.key", "geheim", rounds=2)
    (keys / "password").write_text("geheim")
    (keys / "password").chmod(0o600)
    hook = [sys.executable, "-m", "dilocox", "chain", "anchor", str(folder), "--key",
            str(keys / "own.key"), "--password-file", str(keys / "password")]  # fmt: skip
    if kind != "none":
        sets.append(f"record.anchor={json.dumps(hook)}")
    with server(kind) as url:
        run = workshop.start(name, *sets)
        run.until(lambda: (folder / "record" / "log.pub").exists())
        address = "0x" + "22" * 20
        RunOnChain(url, 7, address, address, "33" * 32, 0, (address,)).write(folder)
        assert run.wait() == 0, run.output()
    return run


def speed(run: Run) -> float:
    """Median of the tokens per second of the rounds; the first one has the set-up."""
    return statistics.median(each["tokens_per_second"] for each in run.records()[1:])


def test_training_is_as_fast_beside_a_dead_or_hanging_chain(workshop: Workshop) -> None:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(2):
        for kind in KINDS:
            run = trained(workshop, kind, number)
            found[kind].append(speed(run))
            said = run.printed().count("record.anchor: ")
            assert said == (kind != "none"), run.printed()
    best = {kind: max(each) for kind, each in found.items()}
    shares = {kind: best[kind] / best["none"] for kind in KINDS[1:]}
    print(f"tokens/s: {found}; shares of the best: {shares}")
    assert all(share > LEAST for share in shares.values()), found
