"""Names of exchanges."""

from __future__ import annotations

import re
import zlib
from typing import Literal, NamedTuple

KEY_PATTERN = r"^(outer/[0-9]{1,9}|gradient/[0-9]{1,9}/[0-9]{1,9})/[0-9]{1,5}/[0-9]{1,5}$"


class ExchangeKey(NamedTuple):
    """Names one exchange of one stage. `step` is the inner step within the round of a
    "gradient" exchange, -1 for "outer"."""

    kind: Literal["outer", "gradient"]
    round: int
    step: int
    stage: int
    fragment: int

    @classmethod
    def outer(cls, round_: int, stage: int, fragment: int) -> ExchangeKey:
        """Key of a pseudo-gradient exchange."""
        return cls("outer", round_, -1, stage, fragment)

    @classmethod
    def gradient(cls, round_: int, step: int, stage: int, fragment: int = 0) -> ExchangeKey:
        """Key of a gradient exchange (method allreduce) at inner step `step` of the round."""
        return cls("gradient", round_, step, stage, fragment)

    @classmethod
    def parse(cls, text: str) -> ExchangeKey:
        """Inverse of `text`. Raises ValueError."""
        if not re.fullmatch(KEY_PATTERN, text):
            raise ValueError(f"not an exchange key: {text[:80]!r}")
        kind, *numbers = text.split("/")
        values = [int(number) for number in numbers]
        if kind == "outer":
            return cls("outer", values[0], -1, values[1], values[2])
        return cls("gradient", values[0], values[1], values[2], values[3])

    @property
    def text(self) -> str:
        """`outer/ROUND/STAGE/FRAGMENT` or `gradient/ROUND/STEP/STAGE/FRAGMENT`."""
        step = [] if self.kind == "outer" else [self.step]
        return "/".join(map(str, [self.kind, self.round, *step, self.stage, self.fragment]))

    @property
    def seed(self) -> int:
        """What codecs draw positions from, 32 bits: the same at all sites, another every time."""
        return zlib.crc32(self.text.encode())
