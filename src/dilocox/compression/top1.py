"""The largest of every B values, as a 2-bit value and its place (block-wise top-1).

`topk` sends the largest values of a long chunk, wherever they are. So some rows of a tensor are
sent again and again, while other rows wait. `top1` sends one value of every B neighbours in every
round. Its place takes log2 B bits; an index of `topk` at the same density takes about two bits
more.

Payload: one record per 64 blocks of B consecutive values, and one record for the remaining r
blocks. The last block may be shorter. A record begins with two bf16 levels
(`dilocox.compression.two_bit_levels`) of the values that are sent and not zero. A stream of bits
follows, which starts with the lowest bit of the first byte:

- bit 0 of the r codes (1: negative), then bit 1 of the codes (1: the second level),
- the places, those of four blocks as one number of w bits, the lowest bit first: place 0 + place 1
  * (B + 1) + place 2 * (B + 1)^2 + place 3 * (B + 1)^3. w is the number of bits of the largest such
  number. A block of zeros has place B and code 0. Places after the last block are 0.

A record of r blocks has 4 + ceil((2 * r + w * ceil(r / 4)) / 8) bytes. For 64 blocks of 64 values
(w = 25) these are 70 bytes, or 8.75 bits per sent value. For 64 blocks of 512 values (w = 37) they
are 94 bytes, or 11.75 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilocox.compression import tensor_ops, tensor_two_bit_levels
from dilocox.compression.base import (
    check_count,
    check_number,
    check_payload,
    check_values,
    output,
)
from dilocox.compression.sparse import Array, places_of
from dilocox.compression.two_bit_levels import HEAD, from_codes, to_codes
from dilocox.config.codec_kinds import LARGEST_BLOCK
from dilocox.errors import ExchangeError

_BLOCKS = 64
"""Blocks that share two levels."""
_TOGETHER = 4
"""Places that are packed as one number. Rounding up to whole bits then wastes less than a quarter
of a bit per place."""
_PIECE = 1 << 18
"""Approximate number of values that are processed together: 1 MiB, which stays in the cache."""

_BEHIND = "the bits behind its last place are not zero"
_BEYOND = "it has a place beyond its block"
_WITHOUT_VALUE = "a block has a code without a value, or one behind the end"


@dataclass(frozen=True)
class Top1:
    """Codec `top1:B`. It works on the device of its tensors, with the same bytes everywhere."""

    block: int
    """B: 2 to 32768."""
    identifier: int = 9

    def __post_init__(self) -> None:
        check_number(f"top1:{self.block}", "B", self.block, 2, LARGEST_BLOCK)

    @property
    def name(self) -> str:
        """Canonical spec."""
        return f"top1:{self.block}"

    @property
    def numbers(self) -> tuple[int, int]:
        """See `Codec`: B, and 0."""
        return self.block, 0

    def payload_bytes(self, n: int) -> int:
        """Return the size that the module's docstring gives."""
        whole, rest = divmod(-(-check_count(n) // self.block), _BLOCKS)
        return whole * self._record_bytes(_BLOCKS) + (self._record_bytes(rest) if rest else 0)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        if not tensor_ops.numpy_reaches(values):
            return self._encode_there(values, payload)
        bits, records, done = values.numpy().view(np.int32), payload.numpy(), 0
        for start, rows, width in self._records(n):
            piece = bits[start : start + rows * width * self.block]
            missing = rows * width * self.block - piece.size
            if missing:
                piece = np.concatenate([piece, np.zeros(missing, dtype=np.int32)])
            blocks = piece.reshape(rows * width, self.block)
            places = np.argmax(blocks & np.int32(0x7FFFFFFF), axis=1)
            chosen = np.take_along_axis(blocks, places[:, None], 1).reshape(rows, width)
            some = chosen & np.int32(0x7FFFFFFF) > 0
            size = rows * self._record_bytes(width)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            record[:, :HEAD], codes = to_codes(chosen, zeros=False)
            record[:, HEAD:] = self._packed(
                np.where(some, places.reshape(rows, width), self.block), np.where(some, codes, 0)
            )
        return payload

    def _encode_there(self, values: Tensor, payload: Tensor) -> Tensor:
        """`encode` in tensor operations."""
        bits, done = values.view(torch.int32), 0
        for start, rows, width in self._records(values.numel(), tensor_ops.PIECE):
            piece = bits[start : start + rows * width * self.block]
            missing = rows * width * self.block - piece.numel()
            if missing:
                piece = torch.nn.functional.pad(piece, (0, missing))
            blocks = piece.view(rows * width, self.block)
            # Among equal values argmax takes the first one, as numpy does.
            places = (blocks & 0x7FFFFFFF).argmax(1, keepdim=True)
            chosen = blocks.gather(1, places).view(rows, width)
            some = (chosen & 0x7FFFFFFF) > 0
            size = rows * self._record_bytes(width)
            record = payload[done : done + size].view(rows, -1)
            done += size
            record[:, :HEAD], codes = tensor_two_bit_levels.to_codes(chosen, zeros=False)
            record[:, HEAD:] = self._packed_there(
                torch.where(some, places.view(rows, width), self.block), torch.where(some, codes, 0)
            )
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Also refuses places and codes that no encoder writes."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device).zero_()
        if not tensor_ops.numpy_reaches(payload):
            return self._decode_there(payload, values)
        bits, records, done = values.numpy().view(np.int32), payload.numpy(), 0
        for start, rows, width in self._records(n):
            size = rows * self._record_bytes(width)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            places, codes = self._unpacked(record[:, HEAD:], width)
            found = from_codes(record[:, :HEAD], codes, self.name)
            some = places < self.block
            where = start + places_of(places.reshape(-1, 1), self.block).reshape(some.shape)[some]
            if (codes[~some] != 0).any() or (where >= n).any():
                raise self._refused(_WITHOUT_VALUE)
            bits[where] = found[some]
        return values

    def _decode_there(self, payload: Tensor, values: Tensor) -> Tensor:
        """`decode` in tensor operations; `values` are zeros."""
        n, done, refusals = values.numel(), 0, tensor_ops.Refusals(self.name)
        bits = values.view(torch.int32)
        for start, rows, width in self._records(n, tensor_ops.PIECE):
            size = rows * self._record_bytes(width)
            record = payload[done : done + size].view(rows, -1)
            done += size
            places, codes = self._unpacked_there(record[:, HEAD:], width, refusals)
            found = tensor_two_bit_levels.from_codes(record[:, :HEAD], codes, refusals)
            some = places < self.block
            first = torch.arange(rows * width, device=values.device).view(rows, width) * self.block
            where = first + start + places
            refusals.add(torch.where(some, where >= n, codes != 0), _WITHOUT_VALUE)
            # A block of zeros gets a zero written, at a place of its own inside the values.
            where = (first + start + places.clamp(0, self.block - 1)).clamp_(max=n - 1)
            bits.scatter_(0, where.view(-1), torch.where(some, found, 0).view(-1))
        refusals.settle()
        return values

    def _records(self, n: int, piece: int = _PIECE) -> Iterator[tuple[int, int, int]]:
        """Yield (first value, number of records, blocks per record) of each piece of n values.

        `piece`: approximate number of values that are processed together.
        """
        blocks = -(-n // self.block)
        whole, rest = divmod(blocks, _BLOCKS)
        together = max(1, piece // (_BLOCKS * self.block))
        for first in range(0, whole, together):
            yield first * _BLOCKS * self.block, min(together, whole - first), _BLOCKS
        if rest:
            yield whole * _BLOCKS * self.block, 1, rest

    @property
    def _place_bits(self) -> int:
        """w: bits of a number that packs four places."""
        most: int = (self.block + 1) ** _TOGETHER - 1
        return most.bit_length()

    def _record_bytes(self, blocks: int) -> int:
        return HEAD + -(-(2 * blocks + self._place_bits * -(-blocks // _TOGETHER)) // 8)

    def _packed(self, places: Array, codes: Array) -> Array:
        """Pack places and codes, [rows, blocks] each, into streams, uint8 [rows, bytes]."""
        rows, blocks = places.shape
        fours, width = -(-blocks // _TOGETHER), self._place_bits
        radix = (self.block + 1) ** np.arange(_TOGETHER)
        padded = np.zeros((rows, fours * _TOGETHER), dtype=np.int64)
        padded[:, :blocks] = places
        numbers = padded.reshape(rows, fours, _TOGETHER) @ radix
        stream = np.empty((rows, 2 * blocks + fours * width), dtype=np.uint8)
        stream[:, :blocks] = codes & 1
        stream[:, blocks : 2 * blocks] = codes >> 1
        above = stream[:, 2 * blocks :].reshape(rows, fours, width)
        for place in range(width):
            above[:, :, place] = numbers >> place & 1
        stream[:, 2 * blocks :] = above.reshape(rows, -1)
        return np.packbits(stream, axis=1, bitorder="little")

    def _unpacked(self, data: Array, blocks: int) -> tuple[Array, Array]:
        """Undo `_packed`: return places, int64, and codes, int32, [rows, blocks] each.

        Raises `ExchangeError` for streams that `_packed` never makes.
        """
        fours, width = -(-blocks // _TOGETHER), self._place_bits
        stream = np.unpackbits(data, axis=1, bitorder="little")
        if stream[:, 2 * blocks + fours * width :].any():
            raise self._refused(_BEHIND)
        codes = stream[:, :blocks] | stream[:, blocks : 2 * blocks] << 1
        above = stream[:, 2 * blocks : 2 * blocks + fours * width].reshape(len(data), fours, width)
        numbers = np.zeros((len(data), fours), dtype=np.int64)
        for place in reversed(range(width)):
            numbers = numbers << 1 | above[:, :, place]
        radix = self.block + 1
        places = np.empty((len(data), fours, _TOGETHER), dtype=np.int64)
        for number in range(_TOGETHER):
            numbers, places[:, :, number] = np.divmod(numbers, radix)
        flat = places.reshape(len(data), -1)
        if numbers.any() or flat[:, blocks:].any():
            raise self._refused(_BEYOND)
        return flat[:, :blocks], codes.astype(np.int32)

    def _packed_there(self, places: Tensor, codes: Tensor) -> Tensor:
        """`_packed` in tensor operations; places are int64."""
        rows, blocks = places.shape
        fours, width, radix = -(-blocks // _TOGETHER), self._place_bits, self.block + 1
        padded = torch.nn.functional.pad(places, (0, fours * _TOGETHER - blocks))
        padded = padded.view(rows, fours, _TOGETHER)
        numbers = padded[..., _TOGETHER - 1]
        for place in reversed(range(_TOGETHER - 1)):
            numbers = numbers * radix + padded[..., place]
        size = (rows, 2 * blocks + fours * width)
        stream = torch.empty(size, dtype=torch.uint8, device=places.device)
        stream[:, :blocks] = codes & 1
        stream[:, blocks : 2 * blocks] = codes >> 1
        above = stream[:, 2 * blocks :].unflatten(1, (fours, width))
        for place in range(width):
            above[:, :, place] = numbers >> place & 1
        return tensor_ops.pack_bits(stream)

    def _unpacked_there(
        self, data: Tensor, blocks: int, refusals: tensor_ops.Refusals
    ) -> tuple[Tensor, Tensor]:
        """`_unpacked` in tensor operations: places and codes, int64 [rows, blocks]."""
        fours, width, radix = -(-blocks // _TOGETHER), self._place_bits, self.block + 1
        stream = tensor_ops.unpack_bits(data)
        refusals.add(stream[:, 2 * blocks + fours * width :] != 0, _BEHIND)
        codes = stream[:, :blocks] | stream[:, blocks : 2 * blocks] << 1
        above = stream[:, 2 * blocks : 2 * blocks + fours * width].unflatten(1, (fours, width))
        numbers = above[:, :, 0].to(torch.int64)
        for place in range(1, width):
            numbers |= above[:, :, place].to(torch.int64) << place
        places = []
        for _ in range(_TOGETHER):
            places.append(numbers % radix)
            numbers = torch.div(numbers, radix, rounding_mode="floor")
        flat = torch.stack(places, 2).flatten(1)
        refusals.add(numbers != 0, _BEYOND)
        refusals.add(flat[:, blocks:] != 0, _BEYOND)
        return flat[:, :blocks], codes.to(torch.int64)

    def _refused(self, why: str) -> ExchangeError:
        return ExchangeError(f"{self.name} payload refused: {why}; no site's encoder writes that")


def build_top1(block: int, *_: int) -> Top1:
    """`top1:B`."""
    return Top1(block)
