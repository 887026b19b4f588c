"""Payloads that a rank of a site fetches from another site, after a vote has shown that it lacks
them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from dilocox.compression import FramePart, frame_digest, unpack_frame
from dilocox.coordinator.protocol.verdicts import Fetch
from dilocox.errors import ExchangeError
from dilocox.transport.attempt import Attempt
from dilocox.utils import tracing

log = logging.getLogger(__name__)
FIRST_PHASE = 1000
"""Number of the first message of this kind in an attempt."""


def fetch(
    attempt: Attempt, fetches: Sequence[Fetch], here: Mapping[str, torch.Tensor], part: FramePart
) -> dict[str, torch.Tensor]:
    """Send and receive what `fetches` says; the frames that came, by whose contribution they are.

    All ranks go through `fetches` in the same order, so that none waits in a circle. `here`: frames
    by sender, uint8 [`frame_bytes(part)`] each, in host memory. A frame has the size that the
    codec gives it, and is thrown away unless its payload has the digest that its sender has named.
    Raises `RepeatError` after telling the coordinator whose link broke.
    """
    found: dict[str, torch.Tensor] = {}
    for number, each in enumerate(fetches):
        if attempt.me not in (each.site, each.holder):
            continue
        with tracing.span("fetch a payload", sender=each.sender, holder=each.holder):
            came = attempt.swap(
                outgoing={each.site: here[each.sender]} if each.holder == attempt.me else {},
                incoming={each.holder: part} if each.site == attempt.me else {},
                phase=FIRST_PHASE + number,
            )
        for holder, frame in came.items():
            try:
                _check(frame, part, each.digest)
            except ExchangeError as error:
                what = f"what {each.sender} sent, from {holder}"
                log.warning("%s: %s: %s", attempt.contribution.key.text, what, error)
            else:
                found[each.sender] = frame
    return found


def _check(frame: torch.Tensor, part: FramePart, digest: str) -> None:
    unpack_frame(frame, part)  # its payload is the one that the header names
    if frame_digest(frame).hex() != digest:
        raise ExchangeError("its payload is not the one that was asked for")
