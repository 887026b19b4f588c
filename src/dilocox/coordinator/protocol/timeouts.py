"""Every limit of the control plane and the exchange, derived from two numbers of the run file."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dilocox.config.run_config import NetworkSection
from dilocox.coordinator.protocol.messages import MAX_POLL

LOOKS = 0.5
"""The coordinator looks for dead ranks every half beat."""


@dataclass(frozen=True)
class Timeouts:
    """All limits in seconds. Order: beat < silence < heartbeat <= reconnect <= first_beat <=
    link_timeout <= form <= stall: no outer wait ends before what it waits for."""

    beat: float
    """A rank beats this often."""
    silence: float
    """A rank without a beat for this long is dead, and its site gone."""
    heartbeat: float
    """Within this long after a rank has died its site is known to be gone: the silence, and the
    time until the coordinator looks again."""
    reconnect: float
    """Silence that is allowed after the coordinator itself has restarted."""
    first_beat: float
    """From a site's enrolment to the first beat of each of its ranks."""
    request: float
    """One request to the coordinator, the time it waits there not counted."""
    poll: float
    """Longest time that one request waits at the coordinator."""
    coordinator: float
    """The coordinator may be out of reach this long before a rank gives up."""
    link: float
    """A link between sites may be silent this long: `link_timeout` itself."""
    grace: float
    """Others wait this long for a site, beside the time that a round takes it, before they go on
    without it."""
    form: float
    """Forming the process groups of an epoch, or of one attempt of an exchange."""
    dial: float
    """One try to reach a rank of another site. Between two tries a change of members is noticed."""
    greeting: float
    """TLS and the name of the group, from the first moment of a connection between ranks."""
    parting: float
    """When a link is closed, its peer may acknowledge what was sent for so long."""
    entry: float
    """An entering site hears of its donor so often, if only that there is nothing to fetch yet."""
    retry: float
    """Pause before the second try of what failed; it doubles from try to try."""
    retry_most: float
    """The longest such pause."""
    rejoin: float
    """A site that was in the run tries to join it again for this long."""
    stall: float
    """No round ends anywhere for this long, beyond the time that its slots take: say so."""

    @classmethod
    def derive(cls, network: NetworkSection) -> Timeouts:
        """All limits of a run from `network.link_timeout` and `network.heartbeat`."""
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
        """One line per limit, for the start of a run."""
        names = {
            "beat": "a rank beats every",
            "silence": "a rank is dead after silence of",
            "heartbeat": "which is noticed within (heartbeat)",
            "reconnect": "silence allowed after a coordinator restart",
            "first_beat": "from enrolment to the first beat",
            "request": "one request to the coordinator",
            "poll": "one wait at the coordinator",
            "coordinator": "the coordinator may be away for",
            "link": "a link may be silent for (link_timeout)",
            "grace": "a site may be late by a round and (grace)",
            "form": "forming a process group",
            "dial": "one try to reach another site's rank",
            "greeting": "a link's connection is greeted within",
            "parting": "a link that is closed sends for",
            "entry": "a joiner hears of its donor every",
            "retry": "a site that crashed joins again after",
            "retry_most": "and again and again, at most after",
            "rejoin": "a site tries to join again for",
            "stall": "no round ends anywhere for",
        }
        width = max(map(len, names.values()))
        return "\n".join(
            f"{names[item.name]:<{width}}  {getattr(self, item.name):8.1f} s"
            for item in fields(self)
        )
