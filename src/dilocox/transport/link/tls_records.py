"""Finds the ends of TLS records in the bytes of a connection, without decrypting.

TLS can decrypt a record only when the whole record is here (RFC 8446, 5.2). A reader that knows how
many bytes are missing need not wake before they have arrived.
"""

from __future__ import annotations

RECORD_BYTES = 1 << 14
"""Limit in decrypted bytes of one record."""
_HEADER_BYTES = 5
_LENGTH = slice(3, 5)


class Records:
    """Tracks the incomplete record in one direction of a connection."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._missing = 0

    @property
    def missing(self) -> int:
        """Missing bytes of the current record, or of its header; 0 between records."""
        return self._missing or (_HEADER_BYTES - len(self._header)) % _HEADER_BYTES

    def passed(self, data: memoryview) -> None:
        """Advance over the next bytes of the connection."""
        at = 0
        while at < len(data):
            if self._missing:
                step = min(self._missing, len(data) - at)
                self._missing -= step
                at += step
                continue
            more = data[at : at + _HEADER_BYTES - len(self._header)]
            self._header += more
            at += len(more)
            if len(self._header) == _HEADER_BYTES:
                self._missing = int.from_bytes(self._header[_LENGTH], "big")
                self._header.clear()
