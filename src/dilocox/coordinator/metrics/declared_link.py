"""Tells people once if rounds wait although the run file declares link and step time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dilocox.config.outer import ControlSection, rate_text
from dilocox.coordinator.controller.link_estimator import declared
from dilocox.coordinator.controller.message_load import message_rate, proposed

ROUNDS = 8
"""Rounds in a row that must wait. A start or one fault of the network is shorter."""
NOTABLE = 0.25
"""Share of a round for which every site waits, from which on it counts."""
MUCH = 0.1
"""Share of the link that messages take, from which on they are named."""


class DeclaredLink:
    """Compares rounds with the promise of `control.link` and `control.step_seconds`.

    With both keys dilocox measures neither, so a wrong value costs time in every round.
    """

    def __init__(self, control: ControlSection, ranks: int) -> None:
        """Without both keys, or with `control.adapt` at another value than `link`, no plan follows
        from them, and there is never a line.

        Args:
            control: The run file's section.
            ranks: Ranks of a site that exchange.
        """
        self._link, self._ranks = declared(control), ranks
        # With these keys the run file has counted messages, or its rounds are its own choice.
        self._advises = not control.latency and not {"inner_steps", "fragments"} & {*control.pinned}
        follows = control.adapt == "link" and self._link is not None
        self._waits: list[float] | None = [] if follows else None

    def line(self, rows: Iterable[Mapping[str, Any]], plan: Mapping[str, Any]) -> str | None:
        """Return a line for people, once; None if there is nothing to tell.

        The site that waits least counts, because a slow site lets all others wait on the fastest
        link, too.

        Args:
            rows: The reports of all sites about a round.
            plan: The latest plan, as metrics have it. May be empty.
        """
        if self._waits is None:
            return None
        least = min(float(row["wait_share"]) for row in rows)
        self._waits = [*self._waits, least] if least > NOTABLE else []
        if len(self._waits) < ROUNDS:
            return None
        share = sum(self._waits) / len(self._waits)
        self._waits = None
        return (
            f"all sites waited {share:.0%} of the last {ROUNDS} rounds, though the run file "
            "declares control.link and control.step_seconds: if the plan promised less, the link "
            "is slower than declared, or other messages fill it; without the two keys dilocox "
            f"measures both{self._of_messages(plan)}"
        )

    def _of_messages(self, plan: Mapping[str, Any]) -> str:
        """Return what messages to the coordinator take and which keys count them, if it is much."""
        if (
            self._link is None
            or not self._advises
            or not plan.keys() >= {"inner_steps", "fragments"}
        ):
            return ""
        rate, seconds = 8 * self._link.rate, self._link.step_us / 1e6
        fragments = int(plan["fragments"])
        taken = message_rate(int(plan["inner_steps"]), fragments, seconds, self._ranks)
        keys = proposed(rate, fragments, seconds, self._ranks)
        if taken < MUCH * rate or keys is None:
            return ""
        left = f"{keys.link / 1e3:g}kbit"
        return (
            f". Messages to the coordinator take some {rate_text(taken, 2)} of the link in these "
            f'rounds, and plans do not count them; this would: control.link = "{left}", '
            f"control.latency = {keys.latency:g}, outer.fragments = {keys.fragments}"
        )
