"""Runs a tunnel's carrier in a process of its own.

In the rank's process it would share Python's one lock with the training, and move a TLS record
(16 KiB) each time that the training lets go of it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING

from dilocox.errors import ConfigError
from dilocox.outer.coordinator.identity import Identity
from dilocox.outer.coordinator.timeouts import Timeouts
from dilocox.outer.tunnel_carrier import Carrier

_PR_SET_PDEATHSIG = 1


class CarrierProcess(BaseManager):
    """The process; calls reach it over a socket with a secret of this process."""

    if TYPE_CHECKING:

        def Carrier(  # noqa: N802
            self, identity: Identity, timeouts: Timeouts, congestion: str | None
        ) -> Carrier:
            """A `Carrier` over there."""

    @property
    def pid(self) -> int:
        """The process's id."""
        return int(self._process.pid)  # type: ignore[attr-defined]


CarrierProcess.register("Carrier", Carrier)


def start_carrier(
    identity: Identity, timeouts: Timeouts, congestion: str | None = None
) -> tuple[CarrierProcess, Carrier]:
    """A `Carrier` in a new process, which ends with this one; end it by `shutdown`.

    To be called before this process has threads or a CUDA context. Raises `ConfigError` where
    there are no such processes.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "sites.*.advertise and sites.*.ports need Linux at every site; leave them out, or run "
            f"the sites that are on {sys.platform} elsewhere"
        )
    # An abstract socket leaves no file behind, however the process ends.
    process = CarrierProcess(
        f"\0dilocox-{secrets.token_hex(16)}",
        secrets.token_bytes(32),
        ctx=multiprocessing.get_context("fork"),
    )
    process.start(_end_with, (os.getpid(),))
    return process, process.Carrier(identity, timeouts, congestion)


def _end_with(parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `processes.start`: its parent ends it
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
