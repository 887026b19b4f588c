"""Keys that name exchanges."""

from __future__ import annotations

import re
import zlib
from typing import Literal, NamedTuple

KEY_PATTERN = r"^(outer/[0-9]{1,9}|gradient/[0-9]{1,9}/[0-9]{1,9})/[0-9]{1,5}/[0-9]{1,5}$"


class ExchangeKey(NamedTuple):
    """Names one exchange of one stage.

    `step` is the inner step within the round for a "gradient" exchange, and -1 for an "outer" one.
    """

    kind: Literal["outer", "gradient"]
    round: int
    step: int
    stage: int
    fragment: int

    @classmethod
    def outer(cls, round_: int, stage: int, fragment: int) -> ExchangeKey:
        """Return the key of a pseudo-gradient exchange."""
        return cls("outer", round_, -1, stage, fragment)

    @classmethod
    def gradient(cls, round_: int, step: int, stage: int, fragment: int = 0) -> ExchangeKey:
        """Return the key of the gradient exchange at inner step `step` of the round.

        The methods `allreduce` and `cocktailsgd` exchange gradients.
        """
        return cls("gradient", round_, step, stage, fragment)

    @classmethod
    def parse(cls, text: str) -> ExchangeKey:
        """Inverse of `text`. Raises `ValueError` if `text` is not the text of an exchange key."""
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
        """Seed of 32 bits for the positions that codecs draw at random.

        The seed is the same at all sites and differs between exchanges.
        """
        return zlib.crc32(self.text.encode())
