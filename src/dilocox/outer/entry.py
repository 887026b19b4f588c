"""How a site enters a run: fragment by fragment, from one peer, as safetensors and JSON.

The donor copies what all sites agree on of a fragment (anchor, outer momentum and, with a low-rank
codec, Q) at a slot end, after its landings, and sends the copy beside its own training. The
entering rank checks every fragment's digest. At the
start of a run the founder is the donor of all: a rank that already holds the same theta_0 is told
so and receives no tensors.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch

from dilocox.errors import ExchangeError, JoinError
from dilocox.outer.groups import PeerGroup, Transfer

HEADER_BYTES = 4096
"""Every JSON header is padded to this size."""
HEADER_TAG, BODY_TAG = 1, 2


@dataclass(frozen=True)
class Snapshot:
    """One fragment's agreed state after the landings of `tick`."""

    fragment: int
    tick: int
    tensors: Mapping[str, torch.Tensor]
    """What all sites agree on, flat fp32 on the CPU; empty if the receiver has the same."""
    codec: str = ""
    """Low-rank codec that `warm` among the tensors is of."""


def digest_of(anchor: torch.Tensor) -> str:
    """sha256 of a flat anchor's bytes, hex."""
    return hashlib.sha256(anchor.contiguous().numpy().data).hexdigest()


class Donor:
    """Serves one entering rank from a thread of its own.

    The training loop calls `offer` for each fragment when the entering site may take it over.
    A receiver that dies harms nobody: the thread ends and says so in the log.
    """

    def __init__(
        self, form_group: Callable[[], PeerGroup], site: str, fragments: int, timeout: float
    ) -> None:
        self._form_group = form_group
        self._site = site
        self._timeout = timeout
        self._offers: queue.Queue[Snapshot] = queue.Queue()
        self.waiting = set(range(fragments))
        """Fragments not offered yet."""
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._serve, name=f"donor-{site}", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Hand over copies of one fragment's tensors; they must not change afterwards."""
        self.waiting.discard(snapshot.fragment)
        self._offers.put(snapshot)

    @property
    def done(self) -> bool:
        """True when everything is sent or the receiver is gone."""
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            group = self._form_group()
            known = _receive_json(group, self._site, self._timeout)["anchors"]
            for _ in range(len(known)):
                snapshot = self._offers.get()
                anchor = digest_of(snapshot.tensors["anchor"])
                fresh = not snapshot.codec and not bool(snapshot.tensors["momentum"].any())
                same = fresh and known[snapshot.fragment] == anchor
                body = b"" if same else safetensors.torch.save(dict(snapshot.tensors))
                header = {
                    "fragment": snapshot.fragment,
                    "tick": snapshot.tick,
                    "codec": snapshot.codec,
                    "bytes": len(body),
                    "sha256": hashlib.sha256(body).hexdigest(),
                }
                _send_json(group, self._site, header, self._timeout)
                if body:
                    data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
                    _wait(group.send(data, self._site, BODY_TAG), self._timeout)
            _receive_json(group, self._site, self._timeout)
        except ExchangeError as error:
            self.failure = str(error)


def fetch(
    form_group: Callable[[], PeerGroup],
    donor: str,
    anchors: list[str],
    on_fragment: Callable[[Snapshot], None],
    timeout: float,
) -> None:
    """Receive all fragments from `donor`.

    `anchors`: digests of what this rank holds (`digest_of`), one per fragment. `on_fragment` is
    called once for each. Raises `ExchangeError` if the donor goes silent and `JoinError` if what
    came is not what its digest says.
    """
    group = form_group()
    _send_json(group, donor, {"anchors": anchors}, timeout)
    for _ in range(len(anchors)):
        header = _receive_json(group, donor, timeout)
        tensors: dict[str, torch.Tensor] = {}
        if header["bytes"]:
            data = torch.empty(int(header["bytes"]), dtype=torch.uint8)
            _wait(group.receive(data, donor, BODY_TAG), timeout)
            body = data.numpy().tobytes()
            if hashlib.sha256(body).hexdigest() != header["sha256"]:
                raise JoinError(
                    f"fragment {header['fragment']} from {donor} does not match its digest; "
                    "join again"
                )
            tensors = safetensors.torch.load(body)
        codec = str(header["codec"])
        on_fragment(Snapshot(int(header["fragment"]), int(header["tick"]), tensors, codec))
    _send_json(group, donor, {"done": True}, timeout)


def _header(content: Mapping[str, Any]) -> torch.Tensor:
    text = json.dumps(content).encode()
    if len(text) > HEADER_BYTES:
        raise ExchangeError(f"an entry header has {len(text)} B, the limit is {HEADER_BYTES} B")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _receive_json(group: PeerGroup, site: str, timeout: float) -> dict[str, Any]:
    data = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    _wait(group.receive(data, site, HEADER_TAG), timeout)
    try:
        content = json.loads(data.numpy().tobytes().decode())
    except ValueError:
        raise ExchangeError(f"{site} sent a header that is not JSON") from None
    if not isinstance(content, dict):
        raise ExchangeError(f"{site} sent a header that is not an object")
    return content


def _send_json(group: PeerGroup, site: str, content: Mapping[str, Any], timeout: float) -> None:
    _wait(group.send(_header(content), site, HEADER_TAG), timeout)


def _wait(transfer: Transfer, timeout: float) -> None:
    """A donor's offers come at its slot ends, so a header may be long in coming."""
    if not transfer.poll(timeout):
        raise ExchangeError(f"{transfer.site} was silent for {timeout:g} s")
