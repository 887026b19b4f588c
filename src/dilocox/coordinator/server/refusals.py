"""Who calls, and how a call is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilocox.coordinator.identity import OPERATOR

RefusalKind = Literal[
    "malformed", "refused", "join", "taken", "gone", "conflict", "over", "ended", "stopped", "busy",
    "quota",
]  # fmt: skip
"""`busy`: try again; `quota`: not before something changes."""


class Refused(Exception):  # noqa: N818  (an answer, not an error of the coordinator)
    """A call that is answered with `Refusal`."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind


def ended(phase: str, reason: str) -> Refused:
    """The refusal of what needs a run that goes on."""
    return Refused("stopped" if phase == "stopped" else "ended", f"run {phase}: {reason}")


@dataclass(frozen=True)
class Caller:
    """Whom a client certificate names."""

    site: str
    incarnation: int

    @property
    def operator(self) -> bool:
        """The coordinator's own tools."""
        return self.incarnation == 0 and self.site == OPERATOR
