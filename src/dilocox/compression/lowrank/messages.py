"""The messages of a low-rank exchange, in the forms that frames and parts take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Message:
    """Properties of one of the three messages, in the form that frames take (`FramePart`)."""

    identifier: int
    numbers: tuple[int, int]
    """Rank and bits."""
    name: str
    values: int
    payload_bytes: int


@dataclass(frozen=True)
class OnBasis:
    """A low-rank codec together with a basis, in the form that parts take (`Codec`)."""

    message: Message
    """Properties of the payload."""
    to_payload: Callable[[Tensor], Tensor]
    """Encodes fp32 [values] to uint8 [payload_bytes]."""
    to_values: Callable[[Tensor], Tensor]
    """Decodes uint8 [payload_bytes] to fp32 [values]."""

    @property
    def name(self) -> str:
        """See `Codec`."""
        return self.message.name

    @property
    def identifier(self) -> int:
        """See `Codec`."""
        return self.message.identifier

    @property
    def numbers(self) -> tuple[int, int]:
        """See `Codec`."""
        return self.message.numbers

    def payload_bytes(self, n: int) -> int:
        """See `Codec`. `n` is always the number of values of the whole buffer."""
        return self.message.payload_bytes

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec`."""
        payload = self.to_payload(values)
        return payload if out is None else out.copy_(payload)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec`."""
        values = self.to_values(payload)
        return values if out is None else out.copy_(values)
