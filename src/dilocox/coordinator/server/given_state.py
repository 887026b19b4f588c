"""Effects of events about the state of entering sites, and the feed of messages for people."""

from __future__ import annotations

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.state_fields import Facts

FEED = 1000
"""Number of latest messages that the feed keeps."""


def version_of(key: str) -> tuple[str, int]:
    """Return "STAGE/SHARD/PIECE" and the round that landed last, from a key of `Facts.shown`."""
    stage, shard, piece, landed, _ = key.split("/", 4)
    return f"{stage}/{shard}/{piece}", int(landed)


class GivenState(Facts):
    """State with the events about digests that sites report of their pieces (`entry_requests`)."""

    def _say(self, event: e.Event, kind: str, text: str) -> None:
        self.sequence += 1
        self.feed.append((self.sequence, event.time, kind, text))
        del self.feed[:-FEED]

    def _shown(self, event: e.Shown) -> None:
        for key, digest in event.pieces.items():
            self.shown.setdefault(key, {}).setdefault(event.site, digest)
            piece, landed = version_of(key)
            newest = self.newest.setdefault(piece, {})
            newest[event.site] = max(landed, newest.get(event.site, landed))

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

    def _renewed(self, event: e.Renewed) -> None:
        site = self.sites[event.site]
        site.renewals += 1
        text = f"{event.site} was given what the others have left behind: it fetches again"
        self._say(event, "join", f"{text} from {site.donor}")

    def _forget_shown(self, kept: int = 0) -> None:
        """Drop digests that no entering site needs; if no site enters, drop all.

        A digest is dropped if its version landed more than `kept` rounds before the earliest
        `from_round` of an entering site. So digests stay as long as a site fetches, however long
        that takes.
        """
        entering = self.with_role("entering")
        if not entering:
            self.shown, self.newest = {}, {}
            return
        oldest = min(self.sites[name].from_round for name in entering) - kept
        self.shown = {
            key: own for key, own in self.shown.items() if not 0 <= version_of(key)[1] < oldest
        }
