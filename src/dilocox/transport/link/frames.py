"""Frames on a link between two ranks, as pure functions.

A receiver requests each message: `WANT` names the message and the first missing byte. The sender
answers with `DATA`, and the receiver acknowledges the whole message with `DONE`. So no bytes travel
before the receiver waits for them. A new connection resumes at the byte where the old one broke.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from dilocox.errors import ExchangeError

CHUNK_BYTES = 1 << 18
"""Limit in payload bytes of one frame. The messages of a link take turns after each frame."""
_HEADER = struct.Struct(">BQQQ")
HEADER_BYTES = _HEADER.size
_MOST = 1 << 48
"""Bytes of the largest message."""


class FrameError(ExchangeError):
    """The peer sent a frame that no site of this version sends."""


class Kind(enum.IntEnum):
    """Type of a frame."""

    WANT = 1
    """Send message `tag` of `length` bytes from byte `offset` on."""
    DATA = 2
    """`length` bytes of message `tag`, from byte `offset` on, follow this header."""
    DONE = 3
    """The sender of this frame has received all of message `tag`."""
    DROP = 4
    """The sender of this frame has given up message `tag`."""
    PING = 5
    """Answer with `PONG`."""
    PONG = 6
    """Answer to `PING`: the link works."""
    BYE = 7
    """The sender of this frame closes the group."""


class Frame(NamedTuple):
    """Header of one frame. Fields that a kind does not use are 0."""

    kind: Kind
    tag: int = 0
    offset: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """Encode the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(*self)


def read_frame(data: bytes | memoryview) -> Frame:
    """Decode a header of `HEADER_BYTES` bytes. Raises `FrameError` if a field is out of range."""
    kind, tag, offset, length = _HEADER.unpack(data)
    try:
        frame = Frame(Kind(kind), tag, offset, length)
    except ValueError:
        raise FrameError(
            f"a frame of kind {kind}; run the same dilocox version at all sites"
        ) from None
    most = {Kind.WANT: _MOST, Kind.DATA: CHUNK_BYTES}.get(frame.kind, 0)
    least = 1 if most else 0
    if not least <= length <= most or offset > _MOST or (offset and not most):
        raise FrameError(
            f"a frame {frame.kind.name} of {length} B from byte {offset} on; run the same dilocox "
            "version at all sites"
        )
    return frame
