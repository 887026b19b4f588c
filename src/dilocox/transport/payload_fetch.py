"""Transfer of payloads that a rank lacks from another site that holds them, after a vote."""

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
"""Phase number of the first fetched payload of an attempt; each further one adds 1."""


def fetch(
    attempt: Attempt, fetches: Sequence[Fetch], here: Mapping[str, torch.Tensor], part: FramePart
) -> dict[str, torch.Tensor]:
    """Send and receive the payloads that the coordinator's `fetches` name.

    All ranks go through `fetches` in the same order, so that ranks cannot deadlock. A received
    frame is discarded unless its payload has the digest that the original sender named.

    Args:
        attempt: The attempt in which the vote was taken.
        fetches: Which site fetches the payload of which sender from which holder.
        here: Frames that this rank holds, by original sender, uint8 [`frame_bytes(part)`] each, in
            host memory.
        part: Content and encoding of each payload.

    Returns:
        The received frames by original sender.

    Raises:
        RepeatError: A link broke, and the coordinator has been told.
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
                what = f"payload of {each.sender}, fetched from {holder}"
                log.warning("%s: %s: %s", attempt.contribution.key.text, what, error)
            else:
                found[each.sender] = frame
    return found


def _check(frame: torch.Tensor, part: FramePart, digest: str) -> None:
    unpack_frame(frame, part)  # raises unless the payload matches the frame's header
    if frame_digest(frame).hex() != digest:
        raise ExchangeError("the payload does not have the requested digest")
