"""Payload sizes of each fragment, and the cost of an exchange besides its transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.compression import Geometry
from dilocox.compression.lowrank.layout import DENSE, Arrangement
from dilocox.config.codec_spec import FRAME_HEADER_BYTES, parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import Host
from dilocox.training.payload_sizes import Shape, factor_bytes, geometries, message_bytes


@dataclass(frozen=True)
class PayloadCost:
    """Payload of one or more pieces of a stage, as one codec encodes them."""

    payload: int
    """Bytes that a site sends to one other site, summed over the stage's shards."""
    values: int
    """fp32 values in the buffer of the largest shard."""
    own: int
    """Payload bytes of the largest shard."""
    products: int
    """Multiply-adds of one product with a low-rank factor at the largest shard; 0 for other
    codecs."""
    ahead: int = 0
    """Bytes of low-rank factors that a site sends to the exchange's owner, summed over the stage's
    shards; 0 for other codecs. The owner needs all factors before it can send the basis."""


def parcels(
    config: RunConfig, stages: Sequence[dict[str, Shape]], codec: str
) -> list[list[PayloadCost]]:
    """Return the payload costs by stage and piece.

    `stages`: unsharded shapes by full name, as `ModelOutline.shapes`. `codec`: the codec as it is
    sent, with or without second moments (`RunConfig.sent_as`).
    """
    return [[_parcel(codec, shards) for shards in geometries(config, shapes)] for shapes in stages]


def _parcel(codec: str, shards: Sequence[Geometry]) -> PayloadCost:
    sizes = [message_bytes(codec, geometry) for geometry in shards]
    largest = max(shards, key=lambda geometry: geometry.length)
    spec = parse_spec(codec)
    products = ahead = 0
    if spec.record.agrees_first:
        for group in Arrangement.of(largest, spec.number, DENSE).groups:
            products += group.size * group.left.rank * len(group.offsets)
        ahead = sum(factor_bytes(codec, geometry) for geometry in shards)
    return PayloadCost(sum(sizes), largest.length, max(sizes), products, ahead)


def joined(pieces: Sequence[PayloadCost], shards: int) -> PayloadCost:
    """Return the payload cost of several pieces of a stage that are exchanged together.

    They travel in one frame for each of the stage's `shards`.
    """
    less = FRAME_HEADER_BYTES * (len(pieces) - 1)
    return PayloadCost(
        sum(each.payload for each in pieces) - shards * less,
        sum(each.values for each in pieces),
        sum(each.own for each in pieces) - less,
        sum(each.products for each in pieces),
        sum(each.ahead for each in pieces) - (shards * less if pieces[0].ahead else 0),
    )


@dataclass(frozen=True)
class ExchangeCost:
    """Seconds of one exchange at one rank, its transfer not included."""

    begin: float
    """Seconds of the training thread at the boundary."""
    encode: float
    """Seconds of the exchange thread before the transfer."""
    decode: float
    """Seconds of the exchange thread after the transfer."""
    land: float
    """Seconds of the training thread at the landing."""
    processor: float
    """Processor seconds of all threads of the exchange."""
    work: float
    """Processor seconds of the exchange thread alone, which the controller measures."""


def toil(
    parcel: PayloadCost, codec: str, host: Host, sites: int, exchange: str, commits: bool = False
) -> ExchangeCost:
    """Return the cost of exchanging `parcel`, at each of `sites` sites.

    With `gather` a site decodes every payload and adds them up. With `reduce` it does so for its
    part of every payload, encodes the mean, and decodes the whole mean. Boundary and landing each
    cost half of `Host.outer`, and copies (`dilocox.tools.planner.outer_path`).

    Args:
        parcel: The pieces that are exchanged together.
        codec: Codec of the round.
        host: Speeds of the site's machine.
        sites: Number of sites.
        exchange: `outer.exchange`, `gather` or `reduce`.
        commits: Whether values are hashed before they are sent, for the run's record.
    """
    kind = parse_spec(codec).record
    size = 4.0 * parcel.values
    outer = host.outer * parcel.values / 2
    begin = outer + host.boundary_copies * parcel.values
    land = outer + host.landing_copies * parcel.values
    encode, decode = (
        size / rates.get(kind.name, rates[kind.computes_like])
        for rates in (host.encode, host.decode)
    )
    digest, copy = parcel.own / host.digest, parcel.own * host.payload_copies
    if kind.agrees_first:
        # Two products to encode (its factor, then its payload), one to decode.
        encode += 2 * parcel.products / host.lowrank
        decode += parcel.products / host.lowrank
    before = copy + digest + (size / host.digest if commits else 0.0)
    if exchange == "gather":
        after = sites * (copy + digest)
        computed = sites * (decode + size / host.average)
    else:
        # Parts of other sites' payloads and of the mean come in, and as many bytes go out.
        after = 3 * copy + 2 * digest
        computed = 2 * decode + encode / sites + size / host.average
    if host.codecs_beside:
        before, after = before + encode, after + computed
    else:
        # A GPU runs one task after another, so codecs take their time from training.
        begin, land = begin + encode, land + computed
    coding = before + after
    return ExchangeCost(
        begin, before, after, land, coding + host.exchange_cpu, coding + host.exchange_thread
    )


def round_trips(codec: str, exchange: str) -> int:
    """Return the least number of round trips to other sites and the coordinator in one exchange.

    Each message takes two: one to begin the exchange or agree on it, and one in which the receiver
    says that it is ready. `gather` has one message, `reduce` two, low rank three.
    """
    if parse_spec(codec).record.agrees_first:
        return 6
    return 2 if exchange == "gather" else 4


def ring_seconds(payload: float, sites: int, rate: float) -> float:
    """Return the seconds of a ring all-reduce of `payload` bytes among `sites` sites.

    `rate`: bytes per second of each site's link.
    """
    return 2 * (sites - 1) / sites * payload / rate if sites > 1 else 0.0
