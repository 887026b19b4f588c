"""Errors of pieces, one class for each thing that can be wrong."""

from __future__ import annotations

from dilocox.errors import RecordError


class BadPieceError(RecordError):
    """A piece does not have the bytes that its root says."""


class TooFewPiecesError(RecordError):
    """Fewer pieces are there than the payloads are rebuilt from."""


class WrongEncodingError(RecordError):
    """The pieces under a root are not one code word: whoever signed the root encoded wrongly."""
