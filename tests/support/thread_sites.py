"""Sites as forked processes, with certificates and a rendezvous store, for tests of links."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.rendezvous import MemoryStore

from dilocox.config.network import NetworkSection
from dilocox.coordinator.identity import Authority, Identity, new_request
from dilocox.coordinator.protocol.timeouts import Timeouts

TIMEOUTS = Timeouts.derive(NetworkSection())
CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Keys:
    """[sites.NAME] of a run file."""

    advertise: str | None = None
    ports: str | None = None


@contextmanager
def shared_store() -> Iterator[MemoryStore]:
    """A store for processes that are forked while it is open."""
    with CONTEXT.Manager() as manager:
        yield MemoryStore(manager.dict())


def identity_of(authority: Authority, site: str, incarnation: int = 1) -> Identity:
    """What the coordinator would hand to a site."""
    key, csr = new_request(site)
    certificate = authority.sign(csr, site, incarnation)
    return Identity(site, incarnation, key, certificate, authority.pem, authority.fingerprint)


def authority_in(folder: Path) -> Authority:
    """A run's certificate authority."""
    return Authority(folder, ["localhost"])


def until(condition: Callable[[], bool], limit: float = 40.0) -> bool:
    """Wait for a condition; whether it came true."""
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def run_each(functions: Mapping[str, Callable[[], Any]], limit: float = 60.0) -> dict[str, Any]:
    """Run every function in a process of its own; what they returned.

    An exception that one raised is returned in its place, as text. No process is left behind.
    """
    processes, pipes = {}, {}
    try:
        for name, function in functions.items():
            pipes[name], theirs = CONTEXT.Pipe(duplex=False)
            processes[name] = CONTEXT.Process(
                target=run_and_tell, args=(function, theirs), name=name
            )
            processes[name].start()
            theirs.close()
        results = {}
        end = time.monotonic() + limit
        for name, pipe in pipes.items():
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"{name} has not ended within {limit:g} s")
            results[name] = pipe.recv()
        return results
    finally:
        for process in processes.values():
            process.join(2.0)
            process.kill()
            process.join()


def run_and_tell(function: Callable[[], Any], pipe: Connection) -> None:
    """In a forked process: send what `function` returns, or what it raised as text, and end."""
    torch.set_num_threads(1)
    gc.freeze()  # a collection of what was inherited would copy all of its pages
    try:
        result = function()
    except BaseException as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    pipe.send(result)
    pipe.close()
    # Nothing of what the test process had open is to be closed from here.
    os._exit(0)
