"""Discrete-event simulation of a run: sites compute, exchanges share the link, landings may wait.

The order of events is that of docs/algorithm.md §2, as `dilocox.outer.loop` and
`dilocox.transport.exchange_worker` implement it:

- At the end of a slot landings come first, then boundaries.
- A rank's exchanges use the link in their order. Meanwhile the next exchange is encoded and the
  previous one decoded.
- An exchange is sent when the last site has encoded its contribution.
- Exchanges of different stages share the narrowest link evenly.
- The real controller makes the plan of every round.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.decide import LOOK_BACK
from dilocox.coordinator.controller.exchange_timing import Crowd
from dilocox.coordinator.controller.link_estimator import Sample
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.coordinator.protocol.round_plan import AT_ONCE, boundary_slots
from dilocox.inner.memory import MOMENTUM_BYTES
from dilocox.tools.planner.payload_costs import ExchangeCost, PayloadCost, joined, round_trips, toil
from dilocox.tools.planner.plan_source import Chooser, SimPlan
from dilocox.tools.planner.shared_link import SharedLink
from dilocox.tools.planner.simulated_run import Round, SimSite, SimulatedRun
from dilocox.training.round_meter import busy_seconds

SHARED_SLOWDOWN = 2.0
"""Factor on the duration of exchange work on cores that also train: an exchange thread gets every
other time slice there."""
SHARED_WORK = 1.6
"""Factor on the processor time of exchange work on cores that also train: caches are cold, and
hardware threads share a core (1.5 to 2 in benchmarks/results/scaling_check-cpu.json)."""
Menu = Mapping[str, Sequence[Sequence[PayloadCost]]]
"""Payload costs by codec, stage and piece."""


def simulate(
    config: RunConfig,
    sites: Sequence[SimSite],
    menu: Menu,
    rounds: int,
    pair_rate: float | None = None,
    at_once: int = AT_ONCE,
) -> SimulatedRun:
    """Simulate the first `rounds` rounds of a run, or the whole run if it is shorter.

    Args:
        config: The run.
        sites: The sites, with their speeds and links.
        menu: Payload costs of every codec that the controller may choose.
        rounds: Rounds to simulate at most.
        pair_rate: Bytes per second of the narrowest path between two sites. May be None.
        at_once: Exchange threads of a rank.

    Raises:
        KeyError: A plan names a codec that is not in `menu`.
    """
    return _Simulator(config, sites, menu, rounds, pair_rate, at_once).run()


@dataclass(eq=False)
class _Exchange:
    """One exchange of a fragment of a stage. All sites share the object."""

    stage: int
    fragment: int
    pieces: range
    parcel: PayloadCost
    codec: str
    round: int
    ready: int = 0
    """Number of sites that have encoded their contribution."""
    before: _Exchange | None = None
    """The stage's previous exchange, which uses the link first. None if it has been sent."""
    after: Callable[[], None] | None = None
    """Called when the transfer ends: begins the transfer of the next exchange."""
    sent: float = 0.0
    """Time at which the transfer began."""
    ended: float | None = None
    """Time at which the transfer ended. None: it has not ended."""
    waited: float = 0.0
    """Seconds of waiting for the previous exchange's transfer."""
    done: set[int] = field(default_factory=set)
    """Numbers of the sites that have decoded the payloads."""
    toils: list[ExchangeCost] = field(default_factory=list)
    """Cost at each site."""


@dataclass
class _Site:
    """Simulation state of one site."""

    number: int
    about: SimSite
    slot: int = 0
    """Slots of the round that have ended."""
    tick: int = 0
    """Slots since the start of the run."""
    round: int = 0
    pending: list[tuple[int, _Exchange]] = field(default_factory=list)
    """(tick of the landing, exchange)."""
    missing: set[int] = field(default_factory=set)
    """id() of the exchanges that training waits for."""
    since: float = 0.0
    """Time at which that wait began."""
    go_on: Callable[[], None] | None = None
    """Called when the wait ends."""
    debt: float = 0.0
    """Processor seconds of exchange work that lengthen the next slot."""
    queues: dict[int, deque[_Exchange]] = field(default_factory=dict)
    """By stage: exchanges that no thread has begun yet."""
    busy: dict[int, int] = field(default_factory=dict)
    """By stage: number of exchanges that its threads work on."""
    begun: dict[int, float] = field(default_factory=dict)
    """By id() of an exchange: time at which a thread began it."""
    work: dict[int, float] = field(default_factory=dict)
    """By stage: seconds that training has lost to exchange work in this round."""
    rounds: list[Round] = field(default_factory=list)


class _Simulator:
    def __init__(
        self,
        config: RunConfig,
        sites: Sequence[SimSite],
        menu: Menu,
        rounds: int,
        pair_rate: float | None,
        at_once: int,
    ) -> None:
        self._config = config
        self._menu = menu
        self._most = rounds
        self._gradients = config.exchanges_gradients
        self._stages = config.site.stages
        self._crowd = Crowd(len(sites), config.outer.exchange)
        sizes = {
            codec: [[parcel.payload for parcel in row] for row in rows]
            for codec, rows in menu.items()
        }
        self._chooser = Chooser(config, sizes, [site.name for site in sites])
        self._sites = [_Site(number, about) for number, about in enumerate(sites)]
        self._first_tick = [0]
        self._first_step = [0]
        self._exchanges: dict[tuple[int, int, int], _Exchange] = {}
        self._line: dict[int, _Exchange] = {}
        """By stage: the exchange that was created last."""
        self._at_once = at_once
        self._toils: dict[tuple[int, int, str], list[ExchangeCost]] = {}
        self._samples: dict[int, dict[str, Sample]] = {}
        self._calendars: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = {}
        self._parked: list[_Site] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0
        rates = [site.rate for site in sites]
        if pair_rate is not None and len(sites) > 1:
            rates.append(pair_rate * (len(sites) - 1))
        self._link = SharedLink(min(rates), self._at)

    def run(self) -> SimulatedRun:
        """Process events until all sites have finished their rounds."""
        for site in self._sites:
            self._begin_round(site)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return SimulatedRun(
            [site.about for site in self._sites],
            [plan.choice for plan in self._plans],
            [site.rounds for site in self._sites],
            self._samples,
        )

    @property
    def _plans(self) -> list[SimPlan]:
        return self._chooser.plans

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(when, self._now), self._count, act))

    # --- a site's rounds and slots ------------------------------------------------------------

    def _begin_round(self, site: _Site) -> None:
        """Begin the site's next round, or park the site until the round's plan can be made."""
        if site.round >= self._most:
            return
        if site.round == len(self._plans):
            # A site's `round` is the number of rounds that it has finished.
            if min(other.round for other in self._sites) < site.round - LOOK_BACK + 1:
                self._parked.append(site)
                return
            left = self._config.total_steps - self._first_step[-1]
            if left <= 0:
                return
            choice = self._chooser.choose(self._samples, left).choice
            slots = choice.inner_steps if self._gradients else choice.slots
            self._first_tick.append(self._first_tick[-1] + slots)
            self._first_step.append(self._first_step[-1] + choice.inner_steps)
        site.rounds.append(Round(self._now))
        site.slot = 0
        site.work = {}
        self._begin_slot(site)

    def _begin_slot(self, site: _Site) -> None:
        """Compute until the next slot end with a boundary or a landing."""
        plan = self._plans[site.round]
        inner_steps = plan.choice.inner_steps
        slots = inner_steps if self._gradients else plan.choice.slots
        landings = [when - self._first_tick[site.round] for when, _ in site.pending]
        boundaries = self._boundaries(slots, plan.choice.fragments)
        until = min(slot for slot in (*boundaries, *landings, slots) if slot > site.slot)
        begun, ended = (slot * inner_steps // slots for slot in (site.slot, until))
        name = site.about.name
        steps = plan.steps(name, ended) - plan.steps(name, begun)
        seconds = steps * site.about.step + site.debt
        site.debt = 0.0
        self._at(self._now + seconds, lambda: self._end_slot(site, until, slots))

    def _end_slot(self, site: _Site, slot: int, slots: int) -> None:
        """Run the landings that are due, then boundaries, then landings with a delay of 0 slots."""
        site.slot = slot
        site.tick = self._first_tick[site.round] + slot
        fragments = self._plans[site.round].choice.fragments
        due = self._boundaries(slots, fragments).get(slot, [])
        begin = {
            (stage, piece) for stage, fragment in due for piece in self._pieces(site, fragment)
        }
        # A piece lands at the latest at its next boundary.
        first = [
            item
            for item in site.pending
            if item[0] <= site.tick or any((item[1].stage, p) in begin for p in item[1].pieces)
        ]

        def boundaries() -> None:
            took = self._blocking(site, [(each.stage, self._toil(each, site).land)
                                         for _, each in first])  # fmt: skip
            begun = [self._exchange(site, stage, fragment) for stage, fragment in due]
            took += self._blocking(
                site, [(each.stage, self._toil(each, site).begin) for each in begun]
            )
            self._at(self._now + took, lambda: self._hand_in(site, begun, slots))

        self._wait(site, first, boundaries)

    def _hand_in(self, site: _Site, begun: Sequence[_Exchange], slots: int) -> None:
        delay = self._plans[site.round].choice.delay
        for each in begun:
            site.pending.append((site.tick + delay, each))
            site.queues.setdefault(each.stage, deque()).append(each)
            self._work_on(site, each.stage)
        now_due = [item for item in site.pending if item[0] <= site.tick]

        def land() -> None:
            took = self._blocking(site, [(each.stage, self._toil(each, site).land)
                                         for _, each in now_due])  # fmt: skip
            self._at(self._now + took, lambda: self._next_slot(site, slots))

        self._wait(site, now_due, land)

    def _next_slot(self, site: _Site, slots: int) -> None:
        if site.slot < slots:
            self._begin_slot(site)
            return
        # With a GPU, the processors compute digests while training goes on.
        digests = len(self._sites) > 1 and site.about.cores is not None
        digest = self._blocking(site, self._digests(site)) if digests else 0.0
        self._at(self._now + digest, lambda: self._next_round(site))

    def _digests(self, site: _Site) -> list[tuple[int, float]]:
        """Return (stage, seconds) of the digest of anchor and momentum at the end of a round."""
        codec = self._plans[site.round].choice.codec
        digested = 4 + MOMENTUM_BYTES[self._config.outer.momentum_dtype]
        return [
            (stage, digested * sum(each.values for each in row) / site.about.host.digest)
            for stage, row in enumerate(self._menu[codec])
        ]

    def _next_round(self, site: _Site) -> None:
        self._end_round(site)
        site.round += 1
        waiting, self._parked = self._parked, []
        for other in waiting:
            self._begin_round(other)
        self._begin_round(site)

    def _pieces(self, site: _Site, fragment: int) -> range:
        """Return the pieces of `fragment` in the site's current round."""
        if self._gradients:
            return range(1)
        fragments = self._plans[site.round].choice.fragments
        return pieces_of(fragment, fragments, self._config.outer.fragments)

    def _boundaries(self, slots: int, fragments: int) -> dict[int, list[tuple[int, int]]]:
        """Return (stage, fragment) of all boundaries of a round, by slot."""
        if (slots, fragments) not in self._calendars:
            found: dict[int, list[tuple[int, int]]] = {}
            if len(self._sites) > 1 and self._gradients:
                every = [(stage, 0) for stage in range(self._stages)]
                found = dict.fromkeys(range(1, slots + 1), every)
            elif len(self._sites) > 1:
                for stage in range(self._stages):
                    when = boundary_slots(stage, self._stages, fragments, slots)
                    for fragment, slot in enumerate(when):
                        found.setdefault(slot, []).append((stage, fragment))
            self._calendars[slots, fragments] = found
        return self._calendars[slots, fragments]

    def _blocking(self, site: _Site, parts: Sequence[tuple[int, float]]) -> float:
        """Return the seconds in which boundaries or landings hold up training.

        `parts`: (stage, seconds). Stages on GPUs work in parallel, stages on shared cores one
        after another. The seconds count as exchange work, as in `dilocox.training.round_meter`.
        """
        by_stage: dict[int, float] = {}
        for stage, seconds in parts:
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
        if not by_stage:
            return 0.0
        for stage, seconds in by_stage.items():
            self._count_work(site, stage, seconds)
        if site.about.cores is None:
            return max(by_stage.values())
        return sum(by_stage.values()) * site.about.shards / site.about.cores

    def _wait(
        self, site: _Site, items: Sequence[tuple[int, _Exchange]], go_on: Callable[[], None]
    ) -> None:
        """Call `go_on` once all `items` have arrived, and remove them from the pending ones."""
        site.pending = [item for item in site.pending if item not in items]
        site.missing = {id(each) for _, each in items if site.number not in each.done}
        if not site.missing:
            go_on()
            return
        site.since = self._now
        site.go_on = go_on

    def _end_round(self, site: _Site) -> None:
        plan, record = self._plans[site.round], site.rounds[-1]
        record.end = self._now
        record.steps = plan.steps(site.about.name, plan.choice.inner_steps)
        record.work = max(site.work.values(), default=0.0)
        seconds = record.end - record.start - record.waited
        self._samples.setdefault(site.round, {})[site.about.name] = Sample(
            step_us=max(1, round(seconds / record.steps * 1e6)),
            exchange_bytes=record.received,
            exchange_us=round(busy_seconds(record.link) * 1e6),
            exchanges=len(record.link),
            overhead_us=round(record.overhead / max(1, record.exchanges) * 1e6),
            work_us=round(record.work * 1e6),
            codec=plan.choice.codec,
            fragments=plan.choice.fragments,
        )

    # --- exchanges ----------------------------------------------------------------------------

    def _exchange(self, site: _Site, stage: int, fragment: int) -> _Exchange:
        key = (site.tick, stage, fragment)
        if key not in self._exchanges:
            codec = self._plans[site.round].choice.codec
            pieces = self._pieces(site, fragment)
            row = self._menu[codec][stage]
            parcel = joined([row[piece] for piece in pieces], self._config.site.shards)
            self._exchanges[key] = self._line[stage] = _Exchange(
                stage,
                fragment,
                pieces,
                parcel,
                codec,
                site.round,
                toils=self._all_toils(parcel, codec),
                before=self._line.get(stage),
            )
        return self._exchanges[key]

    def _all_toils(self, parcel: PayloadCost, codec: str) -> list[ExchangeCost]:
        key = (parcel.payload, parcel.values, codec)
        if key not in self._toils:
            commits = self._config.record.enabled and not self._gradients
            self._toils[key] = [
                toil(
                    parcel, codec, site.about.host, len(self._sites), self._crowd.exchange, commits
                )
                for site in self._sites
            ]
        return self._toils[key]

    def _toil(self, each: _Exchange, site: _Site) -> ExchangeCost:
        return each.toils[site.number]

    def _work_on(self, site: _Site, stage: int) -> None:
        """Begin the stage's next queued exchange if one of its exchange threads is free."""
        queue = site.queues.get(stage)
        if not queue or site.busy.get(stage, 0) >= self._at_once:
            return
        each = queue.popleft()
        site.busy[stage] = site.busy.get(stage, 0) + 1
        site.begun[id(each)] = self._now
        own = self._toil(each, site)
        if site.about.cores is not None:
            self._count_work(site, stage, own.work)
        self._charge(site, own.processor)

        def encoded() -> None:
            each.ready += 1
            if each.ready == len(self._sites):
                self._send(each)

        self._at(self._now + own.encode * _slowdown(site.about), encoded)

    def _count_work(self, site: _Site, stage: int, seconds: float) -> None:
        cores = site.about.cores
        ranks = site.about.replicas * self._stages * site.about.shards
        # A rank with less than one core loses more than a second per second of exchange work.
        times = 1.0 if cores is None else SHARED_WORK * max(1.0, ranks / cores)
        site.work[stage] = site.work.get(stage, 0.0) + times * seconds

    def _charge(self, site: _Site, seconds: float) -> None:
        """Add exchange work to the next slot, if the site's cores train and training does not wait.

        While training waits, its cores are free for the exchange.
        """
        if site.about.cores is not None and not site.missing:
            site.debt += seconds * site.about.shards / site.about.cores

    def _send(self, each: _Exchange) -> None:
        """Send an exchange that all sites have encoded: after half of the fixed overhead, after the
        low-rank factors have reached the owner, and after the stage's previous transfer."""
        trips = round_trips(each.codec, self._crowd.exchange)
        beside = max(_overhead(site.about, trips) for site in self._sites)
        count, size = self._crowd.swaps(each.parcel.payload)
        # Low-rank factors go to the owner alone, so only the owner's incoming link is busy.
        ahead = (len(self._sites) - 1) * each.parcel.ahead / self._link.rate

        def ended() -> None:
            each.ended = self._now
            each.before = None
            if each.after is not None:
                each.after()
            for site in self._sites:
                self._received(site, each, count * size, beside / 2)

        def begin() -> None:
            each.waited = self._now - came
            each.sent = self._now
            self._link.add(count * size, self._now, ended)

        def reach() -> None:
            if each.before is None or each.before.ended is not None:
                begin()
            else:
                each.before.after = begin

        came = self._now + beside / 2 + ahead
        self._at(came, reach)

    def _received(self, site: _Site, each: _Exchange, size: int, beside: float) -> None:
        assert each.ended is not None
        record = site.rounds[-1]
        record.received += size
        record.exchanges += 1
        record.link.append((each.sent, each.ended, size))
        transfer = each.ended - each.sent

        def decoded() -> None:
            took = self._now - site.begun.pop(id(each))
            record.overhead += took - each.waited - transfer
            site.busy[each.stage] -= 1
            each.done.add(site.number)
            self._work_on(site, each.stage)
            if id(each) in site.missing:
                site.missing.remove(id(each))
                if not site.missing and site.go_on is not None:
                    site.rounds[-1].waited += self._now - site.since
                    go_on, site.go_on = site.go_on, None
                    go_on()

        after = self._toil(each, site).decode * _slowdown(site.about)
        self._at(self._now + beside + after, decoded)


def _slowdown(site: SimSite) -> float:
    return 1.0 if site.cores is None else SHARED_SLOWDOWN


def _overhead(site: SimSite, trips: int) -> float:
    """Return the seconds of an exchange outside of its transfer and its codec."""
    shared = 0.0 if site.cores is None else SHARED_SLOWDOWN * site.host.exchange_cpu
    return trips * site.rtt + site.host.exchange + shared
