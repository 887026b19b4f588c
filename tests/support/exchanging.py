"""One exchange of several sites, with a ballot in shared memory, and what came of it.

Sites are threads of this process, with an endpoint and links of their own, over which all payloads
go.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from dilocox.compression import (
    FragmentCodec,
    Geometry,
    Part,
    compressor,
    payload_digest,
)
from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, ExchangeMember, VoteReply
from dilocox.coordinator.protocol.verdicts import RankVote, VotePhase
from dilocox.errors import ExchangeError
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.staging import HOST, staging_of
from dilocox.transport.exchange import exchange
from dilocox.transport.exchange_worker import LinkSlot, OrderedLock
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.endpoint import LinkEndpoint
from tests.support.linked import endpoint_of
from tests.support.thread_sites import MemoryStore, run_each, shared_store

KEY = ExchangeKey.outer(3, 0, 1)
LENGTH = 3 * 128
GEOMETRY = Geometry(((LENGTH,),), (0,), LENGTH)
MATRICES = Geometry(((96, 64), (100,), (64, 96)), (0, 6144, 6272), 12416)
"""Large enough for codecs that look at matrices or choose among many values."""
WEIGHTS = {"paris": 1.5, "lyon": 0.5, "oslo": 1.0}
LIMIT = 60.0


@dataclass
class SharedBallot:
    """What the coordinator decides, from votes in a dictionary that all sites share."""

    store: MemoryStore
    me: str
    members: Sequence[str] = tuple(WEIGHTS)
    observers: Sequence[str] = ()
    reduce: bool = False
    corrupt: str | None = None
    """A site whose frames arrive damaged at this one."""
    group_of: PeerGroup | None = None
    endpoint: LinkEndpoint | None = None
    votes: list[list[str]] = field(default_factory=list)
    named: dict[str, bytes | None] = field(default_factory=dict)
    """SHA-256 of payloads that were named before they were sent, by exchange."""
    events: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    """Votes by phase, what was to be kept, by SHA-256, and when it was waited for."""

    def commit(self, what: Contribution, payload: bytes | None) -> str | None:
        self.named[what.key.text] = payload
        return None

    def keep(self, key: ExchangeKey, payloads: Sequence[torch.Tensor]) -> Callable[[], None]:
        digests = tuple(payload_digest(payload) for payload in payloads)
        self.events.append(("keep", digests))
        return lambda: self.events.append(("kept", digests))

    def begin(self, key: ExchangeKey, commitment: str | None = None) -> BeginReply:
        roles: list[ExchangeMember] = []
        for site in self.members:
            role: Literal["member", "entering"] = "entering" if site in self.observers else "member"
            roles.append(ExchangeMember(site=site, incarnation=1, role=role))
        return BeginReply(epoch=1, attempt=1, members=roles, decided=False)

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        self.votes.append(list(vote.held))
        self.events.append((vote.phase, ()))
        self.store._values[vote.phase, self.me] = (list(vote.held), vote.contributes)
        return self.observe(key, attempt, phase=vote.phase)

    def observe(self, key: ExchangeKey, attempt: int, *, phase: VotePhase) -> VoteReply:
        voters = [site for site in self.members if site not in self.observers]
        held = [self._vote(phase, site) for site in voters]
        if phase == "held":
            counted = [
                site
                for number, site in enumerate(voters)
                if held[number][1] and all(site in row for row, _ in held)
            ]
            self.store._values["set"] = counted
        decision: Literal["commit", "average"] = (
            "average" if self.reduce and phase == "held" else "commit"
        )
        counted = list(self.store._values["set"])
        return VoteReply(decision=decision, set=counted, attempt=1, epoch=1, waiting_for=[])

    def _vote(self, phase: str, site: str) -> tuple[list[str], bool]:
        end = time.monotonic() + LIMIT
        while (phase, site) not in self.store._values:
            assert time.monotonic() < end, f"no vote of {site}"
            time.sleep(0.002)
        return self.store._values[phase, site]

    def report_broken(self, key: ExchangeKey, attempt: int, failed: Sequence[str]) -> VoteReply:
        raise ExchangeError(f"broken by {', '.join(failed)}")

    def epoch(self) -> int:
        return 1

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        if self.group_of is None:
            self.endpoint = endpoint_of(self.me)
            self.group_of = PeerGroup(
                self.endpoint, self.store, "epoch/1/test", self.members, LIMIT, LIMIT, lambda: False
            )
        return self.group_of

    def leave(self) -> None:
        """Close the links, as the end of a process does."""
        if self.endpoint is not None:
            self.endpoint.close()


def values_of(site: str, geometry: Geometry = GEOMETRY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(list(WEIGHTS).index(site))
    values = torch.zeros(geometry.length)
    for shape, offset in zip(geometry.shapes, geometry.offsets, strict=True):
        count = math.prod(shape)
        values[offset : offset + count] = torch.randn(count, generator=generator) * WEIGHTS[site]
    return values


def warm_of(name: str, geometry: Geometry = GEOMETRY) -> torch.Tensor | None:
    agreement = compressor(name, geometry).agreement
    return None if agreement is None else agreement.first_warm()


def part_of(name: str, values: int) -> Part:
    return compressor(name, Geometry(((values,),), (0,), values)).part(0, values, 0)


def run(
    mode: str,
    name: str,
    *,
    observers: Sequence[str] = (),
    abstain: Sequence[str] = (),
    members: Sequence[str] = tuple(WEIGHTS),
    geometry: Geometry = GEOMETRY,
    strange: Mapping[str, Callable[[Geometry, int], FragmentCodec]] | None = None,
    on_device: bool = False,
) -> dict[str, Outcome]:
    """What every site makes of the same exchange. `strange`: sites that send something else.

    `on_device`: sites are processes, each with the device that is played in this one.
    """

    def site(me: str, store: MemoryStore, done: Callable[[], object]) -> Outcome:
        ballot = SharedBallot(store, me, members, observers, reduce=mode == "reduce")
        what = Contribution(
            key=KEY,
            length=geometry.length,
            values=None if me in observers else values_of(me, geometry),
            compressor=compressor(name, geometry)
            if me not in (strange or {})
            else strange[me](geometry, parse_spec(name).number),
            warm=warm_of(name, geometry),
            mode=mode,
            weights=WEIGHTS,
            contributes=me not in abstain,
            staging=staging_of(torch.device("cpu")) if on_device else HOST,
        )
        return taken_part(ballot, what, done)

    if on_device:
        with shared_store() as shared:
            parts = {me: partial(site, me, shared, lambda: None) for me in members}
            found = run_each({me: partial(plain, part) for me, part in parts.items()}, limit=LIMIT)
        results = {me: outcome_of(each) for me, each in found.items() if isinstance(each, dict)}
    else:
        store = MemoryStore({})
        found = in_threads({me: partial(site, me, store) for me in members})
        results = {me: each for me, each in found.items() if isinstance(each, Outcome)}
    assert len(results) == len(members), found
    return results


def taken_part(ballot: SharedBallot, what: Contribution, done: Callable[[], object]) -> Outcome:
    """A site's exchange. What `advance` makes of the warm start takes its place."""
    try:
        found = exchange(ballot, ballot.me, what, LinkSlot(OrderedLock(), 0))
        done()
    finally:
        ballot.leave()
    if found.advance is None:
        return found
    assert what.warm is not None
    made: Any = found.advance(what.warm).tolist()
    return replace(found, advance=made)


def in_threads(sites: Mapping[str, Callable[[Callable[[], object]], Any]]) -> dict[str, Any]:
    """Run every site in a thread of its own; what they returned, or an error as text.

    A site gets a function that waits until all others have called it, too. Who breaks off leaves at
    once, the others when all have what they need.
    """
    every = threading.Barrier(len(sites))

    def told(site: Callable[[Callable[[], object]], Any]) -> Any:
        try:
            return site(partial(every.wait, LIMIT))
        except Exception as error:
            every.abort()
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(sites)) as pool:
        running = {me: pool.submit(told, site) for me, site in sites.items()}
    return {me: each.result() for me, each in running.items()}


def plain(site: Callable[[], Outcome]) -> dict[str, Any]:
    """Without tensors, which travel between processes only as long as both live."""
    outcome = site()
    result: dict[str, Any] = dict(vars(outcome))
    for name in ("average", "sent"):
        result[name] = None if result[name] is None else result[name].numpy()
    if outcome.second_error is not None:
        start, error = outcome.second_error
        result["second_error"] = (start, error.numpy())
    result["payloads"] = [payload.numpy() for payload in outcome.payloads]
    return result


def outcome_of(result: dict[str, Any]) -> Outcome:
    for name in ("average", "sent"):
        result[name] = None if result[name] is None else torch.from_numpy(result[name])
    if result["second_error"] is not None:
        start, error = result["second_error"]
        result["second_error"] = (start, torch.from_numpy(error))
    result["payloads"] = tuple(torch.from_numpy(payload) for payload in result["payloads"])
    return Outcome(**result)


def mean_of(sites: Sequence[str]) -> torch.Tensor:
    total = torch.stack([values_of(site).double() for site in sites]).sum(0)
    return (total / sum(WEIGHTS[site] for site in sites)).float()
