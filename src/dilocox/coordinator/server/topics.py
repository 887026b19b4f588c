"""Topics for which requests wait, by the kind of event after which they should be checked again."""

from __future__ import annotations

from dilocox.coordinator.server import events as e

TOPICS: dict[type[e.Event], tuple[str, ...]] = {
    e.Started: ("plan",),
    e.Activated: ("plan", "exchange"),
    e.Leaving: ("plan",),
    e.Overtaken: ("plan", "exchange"),
    e.Planned: ("plan",),
    e.RoundDone: ("plan",),
    **dict.fromkeys(
        (e.SiteLost, e.StartupRestarted, e.Resumed, e.Ended), ("plan", "exchange", "store")
    ),
}
