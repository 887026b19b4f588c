"""What events about the state of an entering site change, and the feed of messages for people."""

from __future__ import annotations

from dilocox.outer.coordinator import events as e
from dilocox.outer.coordinator.facts import Facts

FEED = 1000
"""So many messages of the feed are kept."""


class GivenState(Facts):
    """Facts, with the digests that sites tell of what they hold (`entries`)."""

    def _say(self, event: e.Event, kind: str, text: str) -> None:
        self.sequence += 1
        self.feed.append((self.sequence, event.time, kind, text))
        del self.feed[:-FEED]

    def _shown(self, event: e.Shown) -> None:
        for key, digest in event.pieces.items():
            self.shown.setdefault(key, {}).setdefault(event.site, digest)

    def _doubted(self, event: e.Doubted) -> None:
        site = self.sites[event.site]
        site.distrusts.add(event.donor)
        site.tried.add(event.donor)
        text = "there is no other donor"
        if event.other is not None:
            site.donor = event.other
            text = f"it enters from {event.other}"
        self._say(
            event, "join", f"{event.donor} gave {event.site} a state that most do not hold: {text}"
        )

    def _forget_shown(self, oldest: int | None = None) -> None:
        """All of it if no site enters any more; with `oldest` versions of earlier rounds."""
        if not self.with_role("entering"):
            self.shown = {}
        elif oldest is not None:
            landed = {key: int(key.split("/")[3]) for key in self.shown}
            self.shown = {k: own for k, own in self.shown.items() if not 0 <= landed[k] < oldest}
