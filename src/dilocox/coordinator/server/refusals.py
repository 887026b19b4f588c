"""Callers of the coordinator, and refusals of their requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilocox.coordinator.identity import OPERATOR

RefusalKind = Literal[
    "malformed", "refused", "join", "taken", "gone", "conflict", "over", "ended", "stopped", "busy",
    "quota", "stake",
]  # fmt: skip
"""Kinds of refusals. `busy`: the caller may retry. `quota`: only after the next plan.
`stake`: the chain has not answered yet, so the caller should ask again."""


class Refused(Exception):  # noqa: N818  (an answer, not an error of the coordinator)
    """Raised for a request that is answered with a `Refusal`."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind


def ended(phase: str, reason: str) -> Refused:
    """Return the refusal of a request that needs a running run, for a run that has ended."""
    return Refused("stopped" if phase == "stopped" else "ended", f"run {phase}: {reason}")


@dataclass(frozen=True)
class Caller:
    """The site that a client certificate names."""

    site: str
    incarnation: int

    @property
    def operator(self) -> bool:
        """Whether the caller is the operator, who uses the coordinator's own tools."""
        return self.incarnation == 0 and self.site == OPERATOR
