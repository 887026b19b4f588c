"""What is exchanged, fragment by fragment, and what that costs besides its way over the link."""

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
    """One piece of one stage, or several together, as one codec sends them."""

    payload: int
    """Bytes that a site sends to one other site, summed over the stage's shards."""
    values: int
    """fp32 values in the buffer of the largest shard."""
    own: int
    """Payload bytes of that shard."""
    products: int
    """Multiply-adds of one product with a low-rank factor, of that shard; 0 for other codecs."""
    ahead: int = 0
    """Bytes that a site sends to the exchange's owner before he can send anything, summed over the
    stage's shards: low-rank factors; 0 for other codecs."""


def parcels(
    config: RunConfig, stages: Sequence[dict[str, Shape]], codec: str
) -> list[list[PayloadCost]]:
    """By stage and piece. `stages`: whole shapes by full name, as `ModelOutline.shapes`.

    `codec`: as it is sent, with moments or without (`RunConfig.sent_as`).
    """
    return [[_parcel(codec, shards) for shards in geometries(config, shapes)] for shapes in stages]


def _parcel(codec: str, shards: Sequence[Geometry]) -> PayloadCost:
    sizes = [message_bytes(codec, geometry) for geometry in shards]
    largest = max(shards, key=lambda geometry: geometry.length)
    spec = parse_spec(codec)
    products = ahead = 0
    if spec.kind == "lowrank":
        for group in Arrangement.of(largest, spec.rank, DENSE).groups:
            products += group.size * group.left.rank * len(group.offsets)
        ahead = sum(factor_bytes(codec, geometry) for geometry in shards)
    return PayloadCost(sum(sizes), largest.length, max(sizes), products, ahead)


def joined(pieces: Sequence[PayloadCost], shards: int) -> PayloadCost:
    """Pieces of one stage that are exchanged together, in one frame for each of its `shards`."""
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
    """Seconds of one exchange at one rank, beside its transfer."""

    begin: float
    """In the training's own thread, at the boundary."""
    encode: float
    """In the exchange's thread, before anything can be sent."""
    decode: float
    """In the exchange's thread, after everything has come."""
    land: float
    """In the training's own thread, at the landing."""
    processor: float
    """Processor time of all threads that the exchange has."""
    work: float
    """Of that, what the exchange's thread does itself: the controller goes by it."""


def toil(
    parcel: PayloadCost, codec: str, host: Host, sites: int, exchange: str, commits: bool = False
) -> ExchangeCost:
    """What a parcel costs each of `sites` sites. `exchange`: `gather` or `reduce`; `commits`: the
    values are hashed before anything is sent, for the run's record.

    `gather` decodes every payload and adds them up. `reduce` does so with a part of each, encodes
    the mean again and decodes the whole of it. Boundary and landing are halves of `Host.outer`,
    and copies (dilocox.tools.planner.outer_path).
    """
    kind = parse_spec(codec).kind
    size = 4.0 * parcel.values
    outer = host.outer * parcel.values / 2
    begin = outer + host.boundary_copies * parcel.values
    land = outer + host.landing_copies * parcel.values
    encode, decode = size / host.encode[kind], size / host.decode[kind]
    digest, copy = parcel.own / host.digest, parcel.own * host.payload_copies
    if kind == "lowrank":
        # Two products to encode (its factor, then its payload), one to decode.
        encode += 2 * parcel.products / host.lowrank
        decode += parcel.products / host.lowrank
    before = copy + digest + (size / host.digest if commits else 0.0)
    if exchange == "gather":
        after = sites * (copy + digest)
        computed = sites * (decode + size / host.average)
    else:
        # A payload of each other site's part and the mean's parts come in, as many go out.
        after = 3 * copy + 2 * digest
        computed = 2 * decode + encode / sites + size / host.average
    if host.codecs_beside:
        before, after = before + encode, after + computed
    else:
        # A GPU does one thing after another: training loses what codecs take of its time.
        begin, land = begin + encode, land + computed
    coding = before + after
    return ExchangeCost(
        begin, before, after, land, coding + host.exchange_cpu, coding + host.exchange_thread
    )


def round_trips(codec: str, exchange: str) -> int:
    """Round trips to other sites and the coordinator in one exchange, at least.

    Each message: one for the exchange to begin or be agreed, and one for the receiver to say that
    it is ready. `gather` has one message, `reduce` two, low rank three.
    """
    if parse_spec(codec).kind == "lowrank":
        return 6
    return 2 if exchange == "gather" else 4


def ring_seconds(payload: float, sites: int, rate: float) -> float:
    """A ring all-reduce of `payload` bytes among `sites` sites, `rate` bytes per second each."""
    return 2 * (sites - 1) / sites * payload / rate if sites > 1 else 0.0
