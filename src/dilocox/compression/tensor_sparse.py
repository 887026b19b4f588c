"""GPU implementation of `dilocox.compression.sparse`, with the same bits.

See `dilocox.compression.tensor_ops`. Every index from a payload is clamped to its chunk before use,
because an index out of range on a GPU ends the process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.compression.sparse import low_bits, stream_bits
from dilocox.compression.tensor_ops import Refusals, pack_bits, unpack_bits

_INDEX_BITS = 16
"""Bits of an index below `sparse.LARGEST_CHUNK`."""


def strongest(magnitudes: Tensor, kept: int) -> Tensor:
    """Return the indices of the `kept` largest values of each row of int32 [rows, width].

    The result is int64 [rows, kept], ascending. Among equal values the first ones are taken. The
    sort keys consist of magnitude and place, so no two keys are equal, and the device's order of
    ties does not matter.
    """
    width = magnitudes.shape[1]
    last = (1 << _INDEX_BITS) - 1
    places = torch.arange(last, last - width, -1, device=magnitudes.device)
    keys = magnitudes.to(torch.int64).bitwise_left_shift_(_INDEX_BITS).bitwise_or_(places)
    chosen = keys.topk(kept, dim=1, sorted=False).values
    return (last - (chosen & last)).sort(dim=1).values


def pack(indices: Tensor, codes: Tensor, width: int, bits: int) -> Tensor:
    """See `sparse.pack`: whole numbers [rows, k] to uint8 [rows, ceil(stream_bits / 8)]."""
    rows, k = indices.shape
    low, size = low_bits(k, width), stream_bits(k, width, bits)
    stream = torch.zeros((rows, size), dtype=torch.uint8, device=indices.device)
    entries = codes.to(torch.int64) & ((1 << bits) - 1) | (indices & ((1 << low) - 1)) << bits
    for place in range(bits + low):
        stream[:, place * k : (place + 1) * k] = entries >> place & 1
    ones = torch.arange(k, device=indices.device).add_((bits + low) * k) + (indices >> low)
    return pack_bits(stream.scatter_(1, ones, 1))


def unpack(
    data: Tensor, k: int, width: int, bits: int, refusals: Refusals
) -> tuple[Tensor, Tensor]:
    """See `sparse.unpack`. Returns indices and codes, int64 [rows, k] each.

    Indices are below `width` for every payload. Problems go to `refusals`.
    """
    low, size = low_bits(k, width), stream_bits(k, width, bits)
    stream = unpack_bits(data)
    refusals.add(stream[:, size:] != 0, "the bits behind its last entry are not zero")
    planes = stream[:, : (bits + low) * k].unflatten(1, (bits + low, k)).to(torch.int64)
    entries = planes[:, 0].clone()
    for place in range(1, bits + low):
        entries |= planes[:, place] << place
    high = stream[:, (bits + low) * k : size]
    refusals.add(
        high.sum(1) != k,
        f"a chunk does not have {k} indices; no site's encoder writes that",
    )
    # A stable sort by falling bits puts the k ones first, in ascending order of their places.
    ones = high.sort(dim=1, descending=True, stable=True).indices[:, :k]
    before = torch.arange(k, device=data.device)
    indices = ((ones - before) << low) + (entries >> bits)
    refusals.add(
        torch.cat([indices[:, 1:] <= indices[:, :-1], indices[:, -1:] >= width], 1),
        f"its indices do not ascend within chunks of {width}; no site's encoder writes that",
    )
    return indices.clamp_(0, width - 1), entries & ((1 << bits) - 1)
