"""The backend of a rank's exchanges: groups of peers, and requests to the coordinator."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, VoteReply
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.errors import ExchangeError
from dilocox.outer.contribution import Contribution
from dilocox.record.writer.rank_recorder import RankRecord
from dilocox.record.writer.state_recorder import InnerRecord
from dilocox.training.builder import RankPlace
from dilocox.transport.groups import LOOK, EpochChangedError, PeerGroup
from dilocox.transport.link.endpoint import LinkEndpoint
from dilocox.transport.unreached import UnreachedError
from dilocox.utils import tracing

GroupKey = tuple[int, tuple[str, ...]]
"""Epoch and sites of a group."""
KEPT_GROUPS = 3
"""Number of newest groups that stay open: a slower peer may still read from an earlier one."""


@dataclass
class LinkBackend:
    """`ExchangeBackend` over links: this rank's peer groups, and requests to the coordinator."""

    client: CoordinatorClient
    control: RankControl
    place: RankPlace
    timeouts: Timeouts
    endpoint: LinkEndpoint
    record: RankRecord | None = None
    rounds: InnerRecord | None = None
    groups: dict[GroupKey, PeerGroup] = field(default_factory=dict)
    _unformed: dict[GroupKey, UnreachedError] = field(default_factory=dict)
    _forming: dict[GroupKey, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin = self.client.begin
        self.attempt = self.client.attempt
        self.observe = self.client.observe
        self.report_broken = self.client.report_broken
        self.epoch = self.control.epoch

    def commit(self, what: Contribution, payload: bytes | None) -> str | None:
        """See `ExchangeBackend`."""
        if self.record is None or what.values is None or what.key.kind != "outer":
            return None
        if self.rounds is not None:
            # The state must be in the log before a contribution that was made from the state.
            self.rounds.wait_signed()
        return self.record.commit(what, payload)

    def keep(self, key: ExchangeKey, payloads: Sequence[torch.Tensor]) -> Callable[[], None]:
        """See `ExchangeBackend`."""
        if self.record is None or key.kind != "outer" or not payloads:
            return lambda: None
        return self.record.keep(payloads)

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        """Send this rank's vote to the coordinator, and return the reply.

        If the run is recorded, the vote carries a signature under this rank's own payload.
        """
        own = vote.digests.get(self.place.site)
        signed = None
        if self.record is not None and own is not None and key.kind == "outer":
            signed = self.record.sign(key, attempt, own)
        return self.client.vote(key, attempt, replace(vote, statement=signed))

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        """Return the group of the members and the epoch of `begun`, and form it at the first call.

        Two threads may call this at the same time. For the same group one waits for the other; for
        different groups they do not wait, since peers may form these in another order. A group
        that could not be formed is never tried again, because the addresses that its members
        exchanged are those of the first try. `superseded` returns whether the epoch has ended.

        Raises `UnreachedError` if a member cannot be reached, and `EpochChangedError` if the
        members changed meanwhile.
        """
        sites = tuple(member.site for member in begun.members)
        key = (begun.epoch, sites)
        with self._forming.setdefault(key, threading.Lock()):
            if key in self._unformed:
                raise self._unformed[key]
            if key not in self.groups:
                with tracing.span("form group", epoch=begun.epoch, sites=len(sites)):
                    self.groups[key] = self._form_or_wait(key, superseded)
                for old in list(self.groups)[:-KEPT_GROUPS]:
                    closing = self.groups.pop(old, None)
                    if closing is not None:
                        closing.close()
            return self.groups[key]

    def _form_or_wait(self, key: GroupKey, superseded: Callable[[], bool]) -> PeerGroup:
        try:
            return self._form(key, superseded)
        except UnreachedError as error:
            self._unformed[key] = error
            # The peer may have died a moment ago. The coordinator then changes the epoch within
            # a heartbeat, and no link is to blame.
            end = time.monotonic() + self.timeouts.heartbeat
            while time.monotonic() < end:
                if superseded():
                    raise EpochChangedError("the members changed") from None
                time.sleep(LOOK)
            raise

    def _form(self, key: GroupKey, superseded: Callable[[], bool]) -> PeerGroup:
        epoch, sites = key
        place = self.place
        between = hashlib.sha256("/".join(sites).encode()).hexdigest()[:8]
        return PeerGroup(
            self.endpoint,
            self.client,
            f"epoch/{epoch}/{between}/{place.stage}/{place.shard}",
            sites,
            self.timeouts.form,
            self.timeouts.link,
            superseded,
        )

    def pair(self, name: str, donor: str, receiver: str) -> PeerGroup:
        """Form the group of the two ranks of an entry, and return it.

        The donor joins at one of its slot ends, and announces that by a key in the coordinator's
        key-value store. The receiver waits for this key as long as the donor is the right one.
        Time limits only start after that. Raises `EpochChangedError` if the entry has another
        donor now.
        """
        me, word = self.place.site, f"{name}/donor/{donor}"
        if me == donor:
            self.client.kv_set(word, b"")

        def fetches() -> bool:
            return (me, donor) in [(e.site, e.donor) for e in self.control.news.entering]

        while me != donor and not self.client.kv_check([word]):
            if not fetches():
                raise EpochChangedError(f"{donor} is no longer the donor of this site")
            with contextlib.suppress(ExchangeError):
                self.client.kv_get([word], 1.0)

        def ended() -> bool:
            return me != donor and not fetches()

        form, silence = self.timeouts.form, self.timeouts.stall
        group = PeerGroup(self.endpoint, self.client, name, [donor, receiver], form, silence, ended)
        group.watch(ended)
        return group
