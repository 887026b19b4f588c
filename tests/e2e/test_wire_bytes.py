"""Invariant 7: payload bytes computed = bytes handed to the network = interface counters.

A real run, every site and the coordinator in a network namespace of its own. The coordinator's
interface sees control traffic alone and every byte of it, so what the sites' interfaces sent
beyond that is the exchange. It may exceed the payloads by no more than

- the headers of every packet (Ethernet, IPv4, TCP: 66 bytes per 1,448 of payload, 4.6 %),
- an acknowledgement of 66 bytes per packet at most (another 4.6 %; the kernel sends fewer),
- 30 kB per pair and direction: handshakes, TLS records, frames, address resolution, what the sites
  say to each other on entry,
- what TCP sends again where a machine is too busy to acknowledge in time: the kernel counts the
  segments.

The TLS control traffic itself stays below 45 kB per site and round, entry and end included; of it
the signed statement under every payload is 1 kB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from dilocox.tools.testbed import unsupported_reason
from dilocox.tools.testbed.netns import SEGMENT_BYTES
from tests.support.forge import Forge
from tests.support.harness import Workshop
from tests.support.wire_run import counted_run

REASON = unsupported_reason()
pytestmark = [pytest.mark.runs, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

ROUNDS = 2
PACKET_HEADER = 66
"""Ethernet, IP and TCP with time stamps."""
HEADERS = PACKET_HEADER / SEGMENT_BYTES
FIXED_PER_PEER = 30_000
"""What a site sends another besides payloads: handshakes, TLS records and frames of messages."""
CONTROL_PER_SITE_AND_ROUND = 45_000
FRAME_HEADER = 64
BITS = {"int4": 4, "int8": 8}


def tensor_sizes() -> list[int]:
    """Tensors of the run's model, written down by hand: Qwen3, tied."""
    hidden, inner, heads, kv, size = 128, 256, 4, 2, 32
    layer = [
        heads * size * hidden,
        kv * size * hidden,
        kv * size * hidden,
        hidden * heads * size,
        size,
        size,
        *[hidden * inner] * 3,
        hidden,
        hidden,
    ]
    return [4096 * hidden, *layer * 4, hidden]


def values() -> int:
    """fp32 values that travel per exchange of the whole model: tensors in whole blocks of 128."""
    return sum(math.ceil(count / 128) * 128 for count in tensor_sizes())


def due_rows() -> int:
    """Rows of matrices of which a round says the mean of the second moments: one in 32."""
    hidden, inner, heads, kv, size = 128, 256, 4, 2, 32
    layer = [heads * size, kv * size, kv * size, hidden, inner, inner, hidden]
    return sum(rows // 32 for rows in [4096, *layer * 4])


def payload(count: int, bits: int) -> int:
    """Codes, and an fp16 scale for every 128 of them."""
    return count * bits // 8 + count // 128 * 2


def expected(exchange: str, sites: int, codec: str, fragments: int) -> int:
    """Bytes that all sites together hand to the network for one exchange of the whole model."""
    whole = payload(values(), BITS[codec])
    if exchange == "gather":
        return sites * (sites - 1) * (whole + fragments * FRAME_HEADER)
    # Every site sends each chunk but its own to its owner, and its own mean to all others.
    frames = fragments * 2 * sites * (sites - 1)
    return 2 * (sites - 1) * whole + frames * FRAME_HEADER


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gather", 2), id="gather"),
        pytest.param(("reduce", 3), id="reduce", marks=pytest.mark.slow),
    ],
)
def ran(
    request: pytest.FixtureRequest, shared_workshop: Workshop, forge: Forge
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    exchange, sites = request.param
    try:
        yield exchange, sites, counted_run(shared_workshop, forge, exchange, "int4", sites)
    finally:
        shared_workshop.end_all()


def test_reported_bytes_are_the_computed_ones(ran: tuple[str, int, dict[str, Any]]) -> None:
    exchange, sites, result = ran
    rounds = [r for r in result["records"] if r["kind"] == "round"]
    flushes = [r for r in result["records"] if r["kind"] == "flush"]
    assert len(rounds) == ROUNDS * sites
    assert len(flushes) == sites
    assert all(r["repeated_exchanges"] == 0 for r in result["records"])
    sent = sum(r["payload_bytes"] for r in result["records"])
    in_rounds = ROUNDS * expected(exchange, sites, "int4", fragments=2)
    if exchange == "gather":
        in_rounds += ROUNDS * sites * (sites - 1) * due_rows()
    assert sent == in_rounds + expected(exchange, sites, "int8", fragments=2)


def test_interfaces_count_the_same(ran: tuple[str, int, dict[str, Any]]) -> None:
    _, sites, result = ran
    counters = result["counters"]
    payloads = sum(r["payload_bytes"] for r in result["records"])
    control = counters["hub"]["received_bytes"] + counters["hub"]["sent_bytes"]
    own = [counter for host, counter in counters.items() if host != "hub"]
    sent = sum(counter["sent_bytes"] for counter in own)
    wire = sent - counters["hub"]["received_bytes"]
    packets = sum(counter["sent_packets"] for counter in own) - counters["hub"]["received_packets"]
    carried = wire - packets * PACKET_HEADER
    fixed = sites * (sites - 1) * FIXED_PER_PEER
    segments = sum(count for host, count in result["retransmitted"].items() if host != "hub")
    again = segments * SEGMENT_BYTES
    detail = (
        f"payloads {payloads}, exchange on the wire {wire} in {packets} packets, "
        f"control {control}, segments sent again {segments}"
    )
    print(detail)
    assert all(counter["dropped"] == 0 for counter in counters.values())
    assert wire >= payloads * (1 + HEADERS), detail
    assert payloads <= carried <= payloads + fixed + again, detail
    # A receiver acknowledges every segment at most, how many of them is up to it.
    assert wire <= (payloads + again) * (1 + 2 * HEADERS) + fixed, detail
    assert control <= CONTROL_PER_SITE_AND_ROUND * sites * (ROUNDS + 2), detail
