"""Opens files that may be compressed by gzip or zstd, and decompresses them while they are read."""

from __future__ import annotations

import gzip
import io
import shlex
from pathlib import Path
from typing import IO, Any, cast

UNPACKED = (".gz", ".zst")
"""Endings of compressed files that are decompressed while they are read."""

BLOCK = 1 << 20
"""Bytes or characters that are read at once."""


def is_packed(path: Path) -> bool:
    """Returns whether `path` has an ending of `UNPACKED`."""
    return path.suffix.lower() in UNPACKED


def open_binary(path: Path) -> IO[bytes]:
    """Open a file as a stream of bytes, decompressed if its ending is in `UNPACKED`.

    Reading from the stream may raise `OSError`, `EOFError` and `zlib.error`.
    """
    if not is_packed(path):
        return path.open("rb")
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return io.BufferedReader(_Zstd(path), BLOCK)


class _Zstd(io.RawIOBase):
    """Decompresses a zstd file while it is read.

    Raises `OSError` if reading fails; the message has a remedy if the window is too long.
    """

    def __init__(self, path: Path) -> None:
        # Imported here because Arrow is slow to import, and opening token files does not need it.
        import pyarrow as pa

        self._path = path
        self._stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")

    def readable(self) -> bool:
        """Returns True: the stream can be read, but not written."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes into `buffer`. Returns their number, 0 at the end."""
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            # Arrow limits the window to 128 MiB and has no option to raise the limit.
            if "too much memory" not in str(error):
                raise
            raise OSError(
                "compressed by zstd --long with a window that is too long to be read here; "
                f"decompress it: zstd -d --long=31 {shlex.quote(self._path.name)}"
            ) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close this stream and the file."""
        if not self.closed:
            self._stream.close()
        super().close()
