"""Endpoints of sites on this machine, for tests of links."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.addresses import Door
from dilocox.transport.link.endpoint import LinkEndpoint
from tests.support.thread_sites import TIMEOUTS, Authority, authority_in, identity_of

HERE = "127.0.0.1"
_FOLDER = Path(tempfile.mkdtemp(prefix="dilocox-authority-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# Made at import: processes that are forked later share it.
AUTHORITY: Authority = authority_in(_FOLDER)
CLOSED_DOOR = Door(0, None, None, False)
"""Of a site without keys in the run file."""


def endpoint_of(
    site: str,
    address: str = HERE,
    door: Door = CLOSED_DOOR,
    timeouts: Timeouts = TIMEOUTS,
    congestion: str | None = None,
) -> LinkEndpoint:
    """The endpoint of a site's only rank, with a certificate of the tests' authority."""
    return LinkEndpoint(identity_of(AUTHORITY, site), door, address, timeouts, congestion)


def group_of(
    store: Any,
    name: str,
    sites: Sequence[str],
    me: str,
    timeout: float = 60.0,
    silence: float = 60.0,
    cancelled: Callable[[], bool] = lambda: False,
    address: str = HERE,
) -> PeerGroup:
    """A group of a rank that has no other."""
    return PeerGroup(endpoint_of(me, address), store, name, sites, timeout, silence, cancelled)
