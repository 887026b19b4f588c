"""A payload that did not reach one site whole, fetched from another one over real links."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from dilocox.compression import compressor, frame_payload, pack_frame
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, VoteReply
from dilocox.coordinator.protocol.verdicts import Fetch, RankOpinion, RankVote
from dilocox.coordinator.server.exchange_votes import Exchange, Vote
from dilocox.coordinator.server.payload_fetches import wanted
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.contribution_set import Weighing
from dilocox.transport import exchange
from dilocox.transport.groups import PeerGroup
from tests.support.exchanging import (
    GEOMETRY,
    KEY,
    SharedBallot,
    in_threads,
    part_of,
    taken_part,
    values_of,
    warm_of,
)
from tests.support.thread_sites import MemoryStore

pytestmark = pytest.mark.waits

SITES = ("paris", "lyon", "oslo")
Altered = Callable[[torch.Tensor], torch.Tensor]


class Settled(SharedBallot):
    """Decides from the votes what the coordinator decides; `alters` changes what this site sends
    to lyon, after the first `since` messages."""

    alters: Altered | None = None
    since: int = 0

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        phase, held = vote.phase, list(vote.held)
        self.votes.append(held)
        said = {site: each.model_dump() for site, each in vote.opinions.items()}
        self.store._values[phase, self.me] = (held, vote.digests[self.me], said)
        votes = {site: self._vote("held", site) for site in SITES}
        found = Exchange(key.text, key.round, 0, 1, [])
        for site, (holds, digest, seen) in votes.items():
            read = {name: RankOpinion.model_validate(each) for name, each in seen.items()}
            found.votes[site, 0, 0] = Vote(holds, True, digest, read)
        asked = wanted(found, list(found.votes), 0.0)
        fetches = [] if asked is None else [Fetch.model_validate(each) for each in asked.fetches]
        again = [name for each in fetches for name in (each.site, each.holder)]
        if phase == "held" and self.me in again:
            return self._reply("fetch", [], fetches)
        votes |= {site: self._vote("fetched", site) for site in again}
        whole = [site for site in SITES if all(site in votes[other][0] for other in SITES)]
        return self._reply("commit", whole, [])

    def _reply(self, decision: Any, chosen: list[str], fetches: list[Fetch]) -> VoteReply:
        return VoteReply(
            decision=decision, set=chosen, attempt=1, epoch=1, waiting_for=[], fetches=fetches
        )

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        group = super().group(begun, superseded)
        honest, alters, sent = group.send, self.alters, [0]

        def send(tensor: torch.Tensor, site: str, tag: int) -> Any:
            if site == "lyon" and alters is not None:
                sent[0] += 1
                tensor = alters(tensor) if sent[0] > self.since else tensor
            return honest(tensor, site, tag)

        group.send = send  # type: ignore[method-assign]
        return group


def spoiled(frame: torch.Tensor) -> torch.Tensor:
    """A payload that its header does not name."""
    frame = frame.clone()
    frame[-1] ^= 1
    return frame


def another(frame: torch.Tensor) -> torch.Tensor:
    """A whole frame of other numbers."""
    payload = frame_payload(frame).clone()
    payload[-1] ^= 1
    return pack_frame(part_of("none", GEOMETRY.length), payload)


def run(
    name: str, alters: Mapping[str, tuple[Altered, int]]
) -> tuple[dict[str, Outcome], dict[str, list[list[str]]]]:
    """What every site makes of an exchange, and its votes. `alters`: by site, what changes its
    messages to lyon, and how many of them are as they should be."""

    store = MemoryStore({})

    def site(me: str, done: Callable[[], object]) -> tuple[Outcome, list[list[str]]]:
        ballot = Settled(store, me, SITES)
        ballot.alters, ballot.since = alters.get(me, (None, 0))
        what = Contribution(
            KEY, GEOMETRY.length, values_of(me), compressor(name, GEOMETRY), "gather",
            dict.fromkeys(SITES, 1.0), warm=warm_of(name),
        )  # fmt: skip
        return taken_part(ballot, what, done), ballot.votes

    results = in_threads({me: partial(site, me) for me in SITES})
    assert all(isinstance(result, tuple) for result in results.values()), results
    return (
        {me: outcome for me, (outcome, _) in results.items()},
        {me: votes for me, (_, votes) in results.items()},
    )


@pytest.mark.parametrize("alter", [spoiled, another])
def test_what_one_site_was_sent_wrongly_it_fetches_from_another(alter: Altered) -> None:
    """Paris slights lyon, which gets the payload from oslo and lands the same average."""
    outcomes, votes = run("none", {"paris": (alter, 0)})
    averages = {me: outcome.average for me, outcome in outcomes.items()}
    assert all(outcome.contributors == SITES for outcome in outcomes.values())
    assert averages["lyon"] is not None
    expected = torch.stack([values_of(site).double() for site in SITES]).mean(0).float()
    assert torch.allclose(averages["lyon"], expected, atol=1e-6)
    for each in averages.values():
        assert each is not None
        assert torch.equal(each, averages["lyon"])
    first = ["lyon", "oslo"] if alter is spoiled else list(SITES)
    whole = list(SITES)
    assert votes == {"paris": [whole], "lyon": [first, whole], "oslo": [whole, whole]}
    assert outcomes["oslo"].payload_bytes == 1.5 * outcomes["paris"].payload_bytes


def test_values_of_the_first_look_are_freed_before_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: dict[int, weakref.ref[Weighing]] = {}
    alive: list[bool] = []

    class Noted(Weighing):
        def examined(self, payloads: Mapping[str, torch.Tensor]) -> dict[str, RankOpinion]:
            me = threading.get_ident()
            if me in first:
                alive.append(first[me]() is not None)
            first[me] = weakref.ref(self)
            return super().examined(payloads)

    monkeypatch.setattr(exchange, "Weighing", Noted)
    run("none", {"paris": (another, 0)})
    assert alive == [False]


@pytest.mark.parametrize("alter", [spoiled, another])
def test_what_comes_in_its_place_is_not_used(alter: Altered) -> None:
    """Oslo, of which lyon fetches what paris sent it spoiled, sends something else."""
    outcomes, votes = run("none", {"paris": (spoiled, 0), "oslo": (alter, 1)})
    assert all(outcome.contributors == ("lyon", "oslo") for outcome in outcomes.values())
    assert votes["lyon"] == 2 * [["lyon", "oslo"]]
