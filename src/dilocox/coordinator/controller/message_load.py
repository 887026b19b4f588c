"""What messages to the coordinator take of a declared link, which plans do not count.

The bytes were counted on a link of two sites of one rank (docs/notes/wan.md), with all headers.
They do not depend on the model, so they matter on slow links and in short rounds only.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.coordinator.controller.candidates import INNER_STEPS

EXCHANGE_BYTES, ROUND_BYTES = 1600, 2600
"""Bytes of the messages of a rank per exchange, and per round beside its exchanges."""
MOST = 0.5
"""Largest share of the link that messages may take in the rounds that are proposed."""
FRAGMENTS = 2
"""Largest number of fragments that is proposed: the messages of each fragment are their own."""


@dataclass(frozen=True)
class Keys:
    """Keys of the run file that leave room for messages on a link."""

    link: float
    """Bits per second that messages leave to payloads, rounded to hundreds."""
    latency: float
    """Seconds that the messages of an exchange take."""
    fragments: int


def message_rate(inner_steps: int, fragments: int, step_seconds: float, ranks: int) -> float:
    """Return the bits per second that a site's messages take.

    Args:
        inner_steps: Inner steps of a round.
        fragments: Fragments of a round, so exchanges of a rank.
        step_seconds: Seconds of an inner step.
        ranks: Ranks of the site that exchange.
    """
    sent = ranks * (ROUND_BYTES + fragments * EXCHANGE_BYTES)
    return 8 * sent / (inner_steps * step_seconds)


def proposed(rate: float, fragments: int, step_seconds: float, ranks: int) -> Keys | None:
    """Return keys for the shortest rounds in which messages take at most `MOST` of the link.

    None: no round is long enough. `rate`: bits per second of the link. The other arguments are
    those of `message_rate`.
    """
    fewer = min(fragments, FRAGMENTS)
    for inner_steps in INNER_STEPS:
        taken = message_rate(inner_steps, fewer, step_seconds, ranks)
        if taken <= MOST * rate:
            latency = 8 * ranks * EXCHANGE_BYTES / rate
            return Keys(round(rate - taken, -2), round(latency, 3), fewer)
    return None
