"""Exchanges of sites over links: what the sites send, average and hand on."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dilocox.compression import (
    Compressor,
    Geometry,
    LowRank,
    Part,
    compressor,
    frame_bytes,
    payload_digest,
)
from dilocox.compression.base import Codec
from dilocox.coordinator.protocol.messages import ExchangeKey, VoteReply
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.outer.averaging import average
from dilocox.outer.contribution import Contribution
from dilocox.transport.exchange import exchange
from dilocox.transport.exchange_worker import LinkSlot, OrderedLock
from tests.support.exchanging import (
    GEOMETRY,
    KEY,
    LENGTH,
    MATRICES,
    WEIGHTS,
    SharedBallot,
    mean_of,
    part_of,
    run,
    values_of,
)
from tests.support.thread_sites import MemoryStore

pytestmark = pytest.mark.waits


@pytest.fixture(params=["gather", "reduce"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_weighted_mean_reaches_everyone(mode: str) -> None:
    outcomes = run(mode, "none")
    first = outcomes["paris"].average
    assert first is not None
    torch.testing.assert_close(first, mean_of(list(WEIGHTS)), rtol=1e-6, atol=1e-6)
    for site, outcome in outcomes.items():
        assert outcome.average is not None
        assert torch.equal(outcome.average, first), "not the same bits"
        assert outcome.contributors == tuple(WEIGHTS)
        assert outcome.sent is not None
        assert torch.equal(outcome.sent, values_of(site))
    frame = frame_bytes(part_of("none", LENGTH))
    if mode == "gather":
        assert {outcome.payload_bytes for outcome in outcomes.values()} == {2 * frame}
    else:
        # Chunks of 128: to the two other owners, and the own mean to two sites.
        third = frame_bytes(part_of("none", 128))
        assert {outcome.payload_bytes for outcome in outcomes.values()} == {4 * third}


def test_what_the_mean_was_made_from_is_handed_on() -> None:
    """`gather`: at every site, every payload that counts; from them comes the same mean."""
    outcomes = run("gather", "int4", abstain=("lyon",), observers=("oslo",))
    part = part_of("int4", LENGTH)
    for outcome in outcomes.values():
        decoded = [part.decode(payload) for payload in outcome.payloads]
        weights = [WEIGHTS[site] for site in outcome.contributors]
        assert outcome.average is not None
        assert torch.equal(average(decoded, weights), outcome.average)


def test_chunks_are_handed_on_by_who_made_or_averaged_them() -> None:
    """`reduce`: a site's index names its chunks; together the sites hand on all of them."""
    outcomes = run("reduce", "int4")
    known = {payload_digest(p) for outcome in outcomes.values() for p in outcome.payloads}
    for outcome in outcomes.values():
        index = outcome.payloads[0].numpy().tobytes()
        named = [index[start : start + 32] for start in range(0, len(index), 32)]
        own = {payload_digest(payload) for payload in outcome.payloads}
        assert len(named) == len(WEIGHTS)
        assert set(named) <= own <= known


def test_nothing_is_lost_by_quantising(mode: str) -> None:
    """Σw·Δ = Σ(u − residual): what the sites sent, less the second error, is in the mean."""
    outcomes = run(mode, "int4")
    average = outcomes["paris"].average
    assert average is not None
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for outcome in outcomes.values():
        assert outcome.sent is not None
        total += outcome.sent.double()
        if outcome.second_error is not None:
            start, error = outcome.second_error
            total[start : start + error.numel()] -= error.double()
        assert (outcome.second_error is None) == (mode == "gather")
    torch.testing.assert_close(
        total, average.double() * sum(WEIGHTS.values()), rtol=1e-5, atol=1e-5
    )
    # Four bits lose something, or this test would see nothing.
    assert not torch.equal(average, mean_of(list(WEIGHTS)))


@pytest.mark.parametrize("name", ["int2", "topk:64", "top1:64", "cocktail", "lowrank:2"])
@pytest.mark.parametrize("observers", [(), ("oslo",)], ids=["all", "one-entering"])
def test_lossy_codecs_give_every_site_the_same(name: str, observers: Sequence[str]) -> None:
    outcomes = run("gather", name, geometry=MATRICES, observers=observers)
    senders = [site for site in WEIGHTS if site not in observers]
    first = outcomes["paris"]
    assert first.average is not None
    total = torch.zeros(MATRICES.length, dtype=torch.float64)
    for site, outcome in outcomes.items():
        assert outcome.average is not None
        assert torch.equal(outcome.average, first.average), "not the same bits"
        assert outcome.contributors == tuple(senders)
        assert outcome.advance == first.advance
        assert outcome.effective_rank == first.effective_rank
        assert (outcome.sent is None) == (site in observers)
        if outcome.sent is not None:
            total += outcome.sent.double()
    assert (first.effective_rank is not None) == name.startswith("lowrank")
    weight = sum(WEIGHTS[site] for site in senders)
    torch.testing.assert_close(total, first.average.double() * weight, rtol=1e-5, atol=1e-5)
    # It is an approximation, and one of what the sites brought.
    true = torch.stack([values_of(site, MATRICES).double() for site in senders]).sum(0) / weight
    error = (first.average.double() - true).norm() / true.norm()
    assert 0.05 < error < 0.99


class FactorOfNaN(LowRank):
    """Its factor has a scale that is no number."""

    def project(self, u: torch.Tensor, warm: torch.Tensor) -> torch.Tensor:
        factor = super().project(u, warm)
        factor[1] = 0x7F
        factor[0] = 0xFF
        return factor


class EndlessEnergy(LowRank):
    """Says that its basis misses 1e200."""

    def encode(self, u: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        payload = super().encode(u, basis)
        payload[32:40] = torch.tensor([1e200], dtype=torch.float64).view(torch.uint8)
        return payload


class StepsOfNothing(LowRank):
    """Its basis has a step that there is not."""

    def orthonormalise(self, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        basis = super().orthonormalise(factors)
        basis[0] = 200
        return basis


class Counting(LowRank):
    """Its warm start says which landing it is of."""

    def next_warm(self, *arguments: Any) -> torch.Tensor:
        return torch.full_like(arguments[3], arguments[-1])


def test_the_first_round_is_the_first_landing_of_a_warm_start() -> None:
    """Columns start afresh at every eighth landing, not at the first, in which all are fresh."""
    outcomes = run("gather", "lowrank:2", geometry=MATRICES, strange={"paris": Counting})
    told: Any = outcomes["paris"].advance
    assert set(told) == {KEY.round + 1}


def test_a_low_rank_site_that_sends_anything_stops_nobody() -> None:
    owner = list(WEIGHTS)[KEY.seed % 3]
    other = next(site for site in WEIGHTS if site != owner)
    usual = run("gather", "lowrank:2", geometry=MATRICES)
    # A factor that is none is left out of the basis; its sender's contribution counts all the same.
    outcomes = run("gather", "lowrank:2", geometry=MATRICES, strange={other: FactorOfNaN})
    for outcome in outcomes.values():
        assert outcome.contributors == tuple(WEIGHTS)
        assert outcome.effective_rank == outcomes["paris"].effective_rank
    # A payload that would make what all sites report of it no number does not count.
    outcomes = run("gather", "lowrank:2", geometry=MATRICES, strange={other: EndlessEnergy})
    for outcome in outcomes.values():
        assert outcome.contributors == tuple(site for site in WEIGHTS if site != other)
        assert outcome.effective_rank is not None
        assert math.isfinite(outcome.effective_rank[0])
    assert usual["paris"].contributors == tuple(WEIGHTS)
    # An owner without a basis has broken the exchange: it is named, as if its link were down.
    with pytest.raises(AssertionError, match=f"broken by {owner}"):
        run("gather", "lowrank:2", geometry=MATRICES, strange={owner: StepsOfNothing})


@dataclass
class Spoiled:
    """A codec some of whose payloads are others than it should send: those of the numbers in
    `which`, from 0 on, of all that it encodes."""

    codec: Codec
    which: tuple[int, ...]
    change: Callable[[torch.Tensor], None]
    count: int = 0

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def identifier(self) -> int:
        return self.codec.identifier

    @property
    def numbers(self) -> tuple[int, int]:
        return self.codec.numbers

    def payload_bytes(self, n: int) -> int:
        return self.codec.payload_bytes(n)

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        payload = self.codec.encode(values)
        if self.count in self.which:
            self.change(payload)
        self.count += 1
        return payload

    def decode(
        self, payload: torch.Tensor, n: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.codec.decode(payload, n, out)


def spoiled(
    name: str, change: Callable[[torch.Tensor], None], *which: int
) -> Callable[[Geometry, int], Compressor]:
    def made(geometry: Geometry, _: int) -> Compressor:
        usual = compressor(name, geometry)
        assert isinstance(usual, Compressor)
        codec = Spoiled(usual.codec(0, 0), which, change)
        return replace(usual, codec=lambda *_: codec)

    return made


def no_scale(payload: torch.Tensor) -> None:
    payload[:2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)  # bf16: no number


def endless(payload: torch.Tensor) -> None:
    payload.view(torch.float32)[0] = 3e38  # finite, as means with others are


@pytest.mark.parametrize(("name", "change"), [("int8", no_scale), ("none", endless)])
def test_a_payload_that_decodes_to_nothing_of_use_stops_nobody(
    mode: str, name: str, change: Callable[[torch.Tensor], None]
) -> None:
    """In `reduce` the chunk for paris, the first owner, alone is spoiled."""
    outcomes = run(mode, name, strange={"oslo": spoiled(name, change, 0)})
    for site in ("paris", "lyon"):
        assert outcomes[site].contributors == ("paris", "lyon")
        mean = outcomes[site].average
        assert mean is not None
        assert bool((mean.abs() < 100).all())


@pytest.mark.parametrize(("name", "change"), [("int8", no_scale), ("none", endless)])
def test_an_owner_of_a_mean_that_is_none_has_broken_the_exchange(
    name: str, change: Callable[[torch.Tensor], None]
) -> None:
    """It encodes three chunks, then the mean of its own."""
    with pytest.raises(AssertionError, match="broken by oslo"):
        run("reduce", name, strange={"oslo": spoiled(name, change, 3)})


def test_who_abstains_is_left_out_and_still_gets_the_mean(mode: str) -> None:
    outcomes = run(mode, "none", abstain=["lyon"])
    for site, outcome in outcomes.items():
        assert outcome.contributors == ("paris", "oslo")
        assert outcome.average is not None
        expected = mean_of(["paris", "oslo"])
        torch.testing.assert_close(outcome.average, expected, rtol=1e-6, atol=1e-6)
        assert (outcome.sent is None) == (site == "lyon")


def test_nobody_contributes(mode: str) -> None:
    for outcome in run(mode, "int8", abstain=list(WEIGHTS)).values():
        assert outcome.average is None
        assert outcome.contributors == ()
        assert outcome.sent is None


def test_an_entering_site_receives_and_sends_nothing(mode: str) -> None:
    outcomes = run(mode, "int8", observers=["oslo"])
    entering = outcomes["oslo"]
    assert entering.payload_bytes == 0
    assert entering.sent is None
    assert entering.average is not None
    assert outcomes["paris"].average is not None
    assert torch.equal(entering.average, outcomes["paris"].average)
    assert entering.contributors == ("paris", "lyon")


def test_a_site_alone_needs_no_network(mode: str) -> None:
    outcome = run(mode, "none", members=["paris"])["paris"]
    assert outcome.average is not None
    torch.testing.assert_close(outcome.average, values_of("paris") / 1.5)
    assert outcome.payload_bytes == 0


@dataclass
class Voter(SharedBallot):
    """Alone; remembers what it has voted with."""

    voted: dict[str, str] = field(default_factory=dict)

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        self.voted |= vote.digests
        self.events.append((vote.phase, ()))
        decision = "average" if self.reduce and vote.phase == "held" else "commit"
        return VoteReply.model_validate(
            {"decision": decision, "set": [self.me], "attempt": 1, "epoch": 1, "waiting_for": []}
        )


@pytest.mark.parametrize(
    ("mode", "codec", "named"),
    [
        ("gather", "int4", True), ("gather", "topk:64", True), ("gather", "lowrank:4", False),
        ("reduce", "int4", False),
    ],
)  # fmt: skip
def test_what_is_committed_to_is_what_is_sent(mode: str, codec: str, named: bool) -> None:
    """Where the payload does not hang on who is there, it is named before anything is sent."""
    ballot = Voter(MemoryStore({}), "paris", members=["paris"], reduce=mode == "reduce")
    chosen = compressor(codec, GEOMETRY)
    warm = None if chosen.agreement is None else chosen.agreement.first_warm()
    what = Contribution(KEY, LENGTH, values_of("paris"), chosen, mode, WEIGHTS, warm=warm)
    outcome = exchange(ballot, "paris", what, LinkSlot(OrderedLock(), 0))
    assert outcome.contributors == ("paris",)
    digest = ballot.named[KEY.text]
    assert (digest is not None) == named
    if digest is not None:
        assert digest.hex() == ballot.voted["paris"]
        assert digest == payload_digest(outcome.payloads[0])


def test_what_nobody_else_has_is_kept_before_it_can_count() -> None:
    """A site that dies after its last vote has contributed: in `reduce` its index, and its chunk
    for itself, are with nobody else."""
    ballot = Voter(MemoryStore({}), "paris", members=["paris"], reduce=True)
    what = Contribution(
        KEY, LENGTH, values_of("paris"), compressor("int4", GEOMETRY), "reduce", WEIGHTS
    )
    outcome = exchange(ballot, "paris", what, LinkSlot(OrderedLock(), 0))
    index, chunk = (payload_digest(payload) for payload in outcome.payloads[:2])
    assert index.hex() == ballot.voted["paris"]
    own = (index, chunk)
    assert ballot.events == [("held", ()), ("keep", own), ("kept", own), ("done", ())]


def test_an_exchange_from_before_this_site_was_there(mode: str) -> None:
    ballot = SharedBallot(MemoryStore({}), "oslo", members=["paris", "lyon"])
    what = Contribution(KEY, LENGTH, None, compressor("none", GEOMETRY), mode, WEIGHTS)
    outcome = exchange(ballot, "oslo", what, LinkSlot(OrderedLock(), 0))
    assert outcome.missed
    assert outcome.average is None


def test_chunks_are_encoded_and_decoded_without_a_second_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A payload lives on in its frame alone, and decoded chunks are written where they belong."""
    made: dict[int, list[weakref.ref[torch.UntypedStorage]]] = defaultdict(list)
    most: dict[int, int] = defaultdict(int)

    def noted(work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*given: Any, **named: Any) -> torch.Tensor:
            me, found = threading.get_ident(), work(*given, **named)
            made[me].append(weakref.ref(found.untyped_storage()))
            alive = {each.data_ptr(): each.nbytes() for ref in made[me] if (each := ref())}
            most[me] = max(most[me], sum(alive.values()))
            return found

        return call

    monkeypatch.setattr(Part, "encode", noted(Part.encode))
    monkeypatch.setattr(Part, "decode", noted(Part.decode))
    run("reduce", "none")
    # The average, and the own contribution as the other sites decode it.
    assert set(most.values()) == {2 * LENGTH * 4}
