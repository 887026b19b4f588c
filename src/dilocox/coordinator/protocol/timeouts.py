"""All time limits of control plane and exchange, derived from two numbers of the run file.

The two numbers are `network.link_timeout` and `network.heartbeat`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dilocox.config.network import NetworkSection
from dilocox.coordinator.protocol.messages import MAX_POLL

LOOKS = 0.5
"""Interval at which the coordinator looks for dead ranks, in units of `Timeouts.beat`."""


@dataclass(frozen=True)
class Timeouts:
    """All time limits, in seconds.

    The order is beat < silence < heartbeat <= reconnect <= first_beat <= link_timeout <= form <=
    stall, so that no wait ends before the shorter waits inside it.
    """

    beat: float
    """Interval between two heartbeats of a rank."""
    silence: float
    """A rank without a beat for this time counts as dead, and its site as lost."""
    heartbeat: float
    """Longest time from the death of a rank until the coordinator counts its site as lost:
    `silence` plus the time until the coordinator looks again."""
    reconnect: float
    """Allowed time without a beat after the coordinator itself has restarted."""
    first_beat: float
    """Allowed time from a site's enrolment to the first beat of each of its ranks."""
    request: float
    """Limit of one request to the coordinator, the wait at the coordinator not counted."""
    poll: float
    """Longest time that the coordinator holds one request before it replies."""
    coordinator: float
    """A rank gives up when the coordinator has been out of reach for this time."""
    link: float
    """A link between sites may be silent for this time: `network.link_timeout`."""
    grace: float
    """The other sites wait for a site as long as its round takes, plus this time. Then they go on
    without it."""
    form: float
    """Limit for forming the process groups of an epoch, or of one attempt of an exchange."""
    dial: float
    """Limit of one attempt to connect to a rank of another site. A change of members is noticed
    between two attempts."""
    greeting: float
    """Limit of the TLS handshake and the name of the group, from the start of a connection."""
    parting: float
    """When a link is closed, its peer has this time to acknowledge the data sent."""
    entry: float
    """Longest time between two messages from the donor to an entering site. With nothing to fetch
    yet, the donor says so."""
    retry: float
    """Pause before a crashed site first tries to join again; it doubles with every further try."""
    retry_most: float
    """Longest pause between two such tries."""
    rejoin: float
    """How long a site that was in the run tries to join it again."""
    stall: float
    """A training loop without progress for this time counts as hung: its rank sends no more beats.
    Process groups inside a site have the same time limit."""

    @classmethod
    def derive(cls, network: NetworkSection) -> Timeouts:
        """Return all limits of a run from `network.link_timeout` and `network.heartbeat`."""
        link, heartbeat = network.link_timeout, network.heartbeat
        return cls(
            beat=heartbeat / 5,
            silence=heartbeat - LOOKS * heartbeat / 5,
            heartbeat=heartbeat,
            reconnect=min(2 * heartbeat, link) if link > heartbeat else heartbeat,
            first_beat=link,
            request=min(link, max(5.0, 2 * heartbeat)),
            poll=min(MAX_POLL, link / 2),
            coordinator=2 * link,
            link=link,
            grace=link / 4,
            form=link + heartbeat,
            dial=heartbeat,
            greeting=min(2 * heartbeat, link),
            parting=2 * heartbeat / 5,
            entry=link / 2,
            retry=heartbeat / 5,
            retry_most=link / 2,
            rejoin=30 * link,
            stall=5 * link + heartbeat,
        )

    def table(self) -> str:
        """Return a table with one line per limit, which is shown at the start of a run."""
        names = {
            "beat": "a rank sends a beat every",
            "silence": "a rank counts as dead after silence of",
            "heartbeat": "a dead rank is noticed within (heartbeat)",
            "reconnect": "silence allowed after a coordinator restart",
            "first_beat": "from enrolment to the first beat",
            "request": "one request to the coordinator",
            "poll": "one wait at the coordinator",
            "coordinator": "the coordinator may be away for",
            "link": "a link may be silent for (link_timeout)",
            "grace": "a site may be late by a round plus (grace)",
            "form": "forming a process group",
            "dial": "one attempt to reach another site's rank",
            "greeting": "the handshake of a link takes at most",
            "parting": "a link that closes may still send for",
            "entry": "a donor informs an entering site every",
            "retry": "a crashed site first joins again after",
            "retry_most": "longest pause between such attempts",
            "rejoin": "a site tries to join again for",
            "stall": "training without progress is hung after",
        }
        width = max(map(len, names.values()))
        return "\n".join(
            f"{names[item.name]:<{width}}  {getattr(self, item.name):8.1f} s"
            for item in fields(self)
        )
