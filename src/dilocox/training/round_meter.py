"""What one round of one site was like, in numbers with units."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.protocol.round_plan import Measured
from dilocox.inner import StepResult
from dilocox.inner.device import ran_and_kept_waiting, resolve_precision
from dilocox.inner.device_memory import MemoryUse, memory_meter
from dilocox.inner.peaks import peak_of, utilisation
from dilocox.models import count_parameters
from dilocox.outer.in_flight import Counts
from dilocox.outer.loop import OuterLoop
from dilocox.training.builder import RankParts

Interval = tuple[float, float, int]
"""(start, end, bytes): when payloads came in."""

NOTHING = dict.fromkeys(
    ("steps", "finite", "loss", "seconds", "wait", "exchange", "payload", "values"), 0.0
)
"""Sums over the part of a round that was trained before a stop."""


class RoundMetrics:
    """Collects a round's losses, times and bytes; `end` makes the site's record of it."""

    def __init__(self, config: RunConfig, rank: RankParts) -> None:
        self._config = config
        self._parameters = count_parameters(rank.blueprint.hf_config)
        self._results: list[StepResult] = []
        self._rate = 0.0
        self._earlier = dict(NOTHING)
        self._start = time.monotonic()
        self._held = 0.0
        self._from = 0
        self._paced = (0.0, 0)
        self._lost = 0.0
        self._ran = ran_and_kept_waiting()
        self._device = rank.mesh.device
        self._memory = memory_meter(self._device)
        self._peak = peak_here(config, self._device)
        self._started = False
        self._first = self._first_alone = 0.0
        """Seconds of this process's first inner step, in the round that has it; and without what it
        waited for other sites."""
        self._bad: str | None = None
        self.dropped: str | None = None
        """What was not finite (stage and tensor), if contributions of this round were dropped.

        After `end` the same on all ranks of the site."""
        self.measured: Measured | None = None
        """What the plans to come are decided from; after `end`, none for a round without steps."""
        self.behind = False
        """The others have gone on without this site; after `end` the same on all its ranks."""

    def begin(self, plan: RoundPlan, slot: int) -> None:
        """The round begins, or goes on after `slot` of its slots."""
        if slot == 0:
            self._earlier = dict(NOTHING)
            self._bad = self.dropped = None
        self._results = []
        self._first = self._first_alone = 0.0
        self._start = time.monotonic()
        self._held = 0.0
        self._from = slot
        self._ran = ran_and_kept_waiting()

    def so_far(self, outer: OuterLoop) -> dict[str, float]:
        """What a checkpoint in the middle of a round keeps of it, for `go_on`."""
        counts, earlier = outer.counts, self._earlier
        finite = [result.loss for result in self._results if result.finite]
        return {
            "steps": earlier["steps"] + len(self._results),
            "finite": earlier["finite"] + len(finite),
            "loss": earlier["loss"] + sum(finite),
            "seconds": earlier["seconds"] + time.monotonic() - self._start,
            "wait": earlier["wait"] + counts.wait_seconds + self._held,
            "exchange": earlier["exchange"] + counts.exchange_seconds,
            "payload": earlier["payload"] + counts.payload_bytes,
            "values": earlier["values"] + counts.values,
        }

    def go_on(self, so_far: dict[str, float], bad: str | None, dropped: str | None) -> None:
        """The round was begun before a stop, with these sums and `non_finite()`, `dropped`."""
        self._earlier = {name: float(so_far[name]) for name in NOTHING}
        self._bad, self.dropped = bad, dropped

    def held(self, seconds: float) -> None:
        """The rank waited for the coordinator's leave to go on."""
        self._held += seconds

    def slot_seconds(self, slot: int) -> float | None:
        """How long a slot takes this rank: over the last round and the first `slot` slots of this
        one, what it waits for other sites in them and all. Not its waits for the lease, whose
        length is decided from this. None until an inner step was taken: a slow site's slots have a
        step or none.
        """
        seconds, slots = self._paced
        passed = self._passed()
        if passed is None or (not self._results and not slots):
            return None
        return (seconds + passed) / max(slots + slot - self._from, 1)

    def _passed(self) -> float | None:
        """Seconds of this round so far; a process's first inner step counts as an average one.

        None if the round has no other step yet.
        """
        passed, steps = time.monotonic() - self._start - self._held, len(self._results)
        if not self._first:
            return passed
        return (passed - self._first) * steps / (steps - 1) if steps > 1 else None

    @contextlib.contextmanager
    def first_step(self, waits: Counts) -> Iterator[None]:
        """Context around every inner step.

        The first step of a process starts CUDA and NCCL, and compiles the model's layers. The
        rank's pace does not count this step.
        """
        if self._started:
            yield
            return
        begin, waited = time.monotonic(), waits.wait_seconds
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._started, self._first = True, time.monotonic() - begin
        self._first_alone = max(0.0, self._first - (waits.wait_seconds - waited))

    @contextlib.contextmanager
    def working(self, waits: Counts | None = None) -> Iterator[None]:
        """What is done inside is the exchanges' work, though this thread does it: boundaries,
        landings, accounts. It counts in this round or the next.

        On processors as their processor time. A GPU stands still meanwhile, once it has come to the
        end of its inner steps: with `waits`, the time on the clock counts from there on, without
        what is waited for other sites in it (`waits.wait_seconds`).
        """
        if self._device.type == "cpu":
            begin = time.thread_time()
            try:
                yield
            finally:
                self._lost += time.thread_time() - begin
        elif waits is None:
            yield
        else:
            torch.cuda.synchronize(self._device)
            begin, waited = time.monotonic(), waits.wait_seconds
            try:
                yield
            finally:
                self._lost += time.monotonic() - begin - (waits.wait_seconds - waited)

    def add(self, result: StepResult, rate: float) -> None:
        """An inner step at learning rate `rate`."""
        self._results.append(result)
        self._rate = rate

    def non_finite(self) -> str | None:
        """What was not finite first in this round's steps, or none."""
        if self._bad is None:
            bad = (result.culprit for result in self._results if not result.finite)
            self._bad = next(bad, None)
        return self._bad

    def _crowding(self) -> float:
        """Seconds in which training gets a second of a core: more than one where others keep it
        waiting. So many does it lose by every second that exchanges compute on its cores."""
        ran, waited = (
            now - then for now, then in zip(ran_and_kept_waiting(), self._ran, strict=True)
        )
        return 1.0 + waited / ran if ran > 0 else 1.0

    def end(self, plan: RoundPlan, outer: OuterLoop, rank: RankParts) -> dict[str, Any]:
        """The round's record, the same on all ranks of the site. Collective over the site."""
        sums = self.so_far(outer)
        steps = int(sums["steps"])
        counts, outer.counts = outer.counts, Counts()
        lost, self._lost = self._lost, 0.0
        # Exchanges' threads take nothing from a GPU.
        if self._device.type == "cpu":
            counts.work_seconds += lost
            lost = counts.work_seconds * self._crowding()
        own = _Own(
            sums, counts, lost, outer.behind, self._first_alone, self._memory.read(), self._peak
        )
        shared = _over_ranks(rank, self.dropped, own)
        self.behind, seconds = shared.behind, shared.seconds
        member = plan.members.get(rank.place.site)
        sequences = steps * member.batch if member else 0
        tokens = sequences * self._config.data.sequence_length
        sites = len(plan.members)
        dense = 8 * (sites - 1) / sites * self._parameters if sites else 0.0
        if self._results:
            passed = self._passed()
            self._paced = (0.0, 0) if passed is None else (passed, plan.slots - self._from)
        self._start, self._held, self._from = time.monotonic(), 0.0, 0
        self._first = self._first_alone = 0.0
        factor = sites - 1 if plan.exchange == "gather" else 2 * (sites - 1) / max(sites, 1)
        payload = shared.payload_bytes
        record: dict[str, Any] = {
            "site": rank.place.site,
            "step": plan.first_step + plan.inner_steps,
            "steps": steps,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
            "learning_rate": self._rate,
            "wait_seconds": shared.wait_seconds,
            "wait_share": shared.wait_seconds / seconds if seconds > 0 else 0.0,
            "waited_for": shared.waited_for,
            "exchange_seconds": shared.exchange_seconds,
            "exchange_work_seconds": shared.work_seconds,
            "link_bytes": sum(size for _, _, size in shared.link),
            "link_seconds": busy_seconds(shared.link),
            "payload_bytes": int(payload),
            "allreduce_bytes": int(steps * dense),
            "ratio_per_transfer": 4 * shared.values * factor / payload if payload else 0.0,
            "ratio_per_token": steps * dense / payload if payload else 0.0,
            "members": sites,
            "contributors": min(counts.contributors, default=0),
            "repeated_exchanges": counts.attempts - counts.exchanges,
        }
        record["anchor_digest"] = None if shared.behind else shared.digest
        record |= shared.devices.record(rank, record["tokens_per_second"])
        self.dropped = shared.dropped
        if shared.effective_rank is not None:
            record["effective_rank"] = shared.effective_rank
        self.measured = None
        like_others = steps - (shared.first_seconds > 0)
        if like_others:
            alone = seconds - shared.wait_seconds - shared.first_seconds
            self.measured = Measured(
                step_us=max(1, round(alone / like_others * 1e6)),
                exchange_bytes=sum(size for _, _, size in shared.link),
                exchange_us=round(busy_seconds(shared.link) * 1e6),
                exchanges=-(-len(shared.link) // self._config.site.shards),
                overhead_us=round(shared.overhead_seconds * 1e6),
                work_us=round(shared.lost_seconds * 1e6),
                effective_rank_milli=None
                if shared.effective_rank is None
                else round(shared.effective_rank * 1000),
            )
        # Of the steps that were taken: one that met values that are not finite has no loss.
        if sums["finite"]:
            record["loss"] = sums["loss"] / sums["finite"]
        taken = [result for result in self._results if result.finite]
        if taken:
            record["grad_norm"] = taken[-1].grad_norm
        if self.dropped:
            record["dropped"] = self.dropped
        # A pace that is asked for before the next round begins is that of whole rounds.
        self._results = []
        return record


def peak_here(config: RunConfig, device: torch.device) -> float | None:
    """Peak operations per second of `device` for the run's compute dtype, where it is known.

    Together with that of the same rank in other replicas, of whose GPUs nobody else tells.
    """
    if device.type != "cuda":
        return None
    precision = resolve_precision(config.site, device)
    peak = peak_of(torch.cuda.get_device_name(device), precision)
    return None if peak is None else config.site.replicas * peak


@dataclass(frozen=True)
class Devices:
    """What a site's devices needed and can do."""

    memory: MemoryUse
    """Of the rank that needed most, by figure; `retries` of all ranks together."""
    peak: float | None
    """Operations per second of all devices; None if that of one is not known."""

    @classmethod
    def of(cls, ranks: Sequence[tuple[MemoryUse, float | None]]) -> Devices:
        """Of all ranks of a site."""
        peaks = [peak for _, peak in ranks]

        def known(name: str) -> list[int]:
            found = (getattr(memory, name) for memory, _ in ranks)
            return [value for value in found if value is not None]

        retries = known("retries")
        return cls(
            MemoryUse(
                peak=max(known("peak"), default=None),
                reserved=max(known("reserved"), default=None),
                retries=sum(retries) if retries else None,
            ),
            None if None in peaks else sum(peak for peak in peaks if peak is not None),
        )

    def record(self, rank: RankParts, tokens_per_second: float) -> dict[str, float]:
        """What of it is known, as figures of a round's record."""
        found: dict[str, float | None] = {
            "peak_memory_bytes": self.memory.peak,
            "peak_reserved_bytes": self.memory.reserved,
            "allocation_retries": self.memory.retries,
        }
        if self.peak is not None:
            flops = rank.blueprint.flops_per_token
            found["peak_flops"] = self.peak
            found["mfu"] = utilisation(flops, tokens_per_second, self.peak)
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Shared:
    """What the ranks of a site tell each other at a round's end, the same at all of them."""

    digest: str
    """sha256 over those of all ranks in order, of their pieces each, hex: equal at all sites."""
    dropped: str | None
    """What the first rank that dropped something has dropped."""
    payload_bytes: float
    values: float
    """fp32 values that the payloads stand for; both summed over the ranks."""
    seconds: float
    wait_seconds: float
    exchange_seconds: float
    """All three of the slowest rank. One that waits for the last landing of the round ends it late:
    the others pass that time in telling each other this."""
    behind: bool
    """Of any rank."""
    waited_for: dict[str, float]
    """Seconds of the waiting that passed until another site was there, by that site, each at the
    rank that waited longest for it."""
    link: list[Interval]
    overhead_seconds: float
    """Of an exchange, in which nothing came in: votes, work, and waiting for a later site."""
    work_seconds: float
    """Processor time of the exchanges at the busiest rank: their thread's, and on processors what
    the training's own does for them."""
    lost_seconds: float
    """Seconds that training loses to exchanges, beside waits, at the rank that loses most. On CPUs
    the exchanges' work counts, in the time that the work takes there (see
    `RoundMetrics._crowding`). On GPUs boundaries and landings count, during which a GPU stands
    still."""
    effective_rank: float | None
    """Mean of all landings, by values."""
    devices: Devices
    first_seconds: float
    """Seconds of a process's first inner step, at the slowest rank, without its waits for other
    sites. 0 if no process of the site took its first step in this round."""


@dataclass(frozen=True)
class _Own:
    """What a rank tells the others: `sums` are of the whole round, the rest since the last start
    within it."""

    sums: dict[str, float]
    counts: Counts
    lost: float
    behind: bool
    first: float
    memory: MemoryUse
    peak: float | None


def _over_ranks(rank: RankParts, dropped: str | None, mine: _Own) -> Shared:
    own = hashlib.sha256()
    for state in rank.states:
        own.update(state.digest().encode())
    counts = mine.counts
    told = json.dumps(
        {
            "sums": mine.sums,
            "link": counts.link,
            "ranks": counts.effective_ranks,
            "work": counts.work_seconds,
            "lost": mine.lost,
            "first": mine.first,
            "seconds": counts.exchange_seconds,
            "exchanges": counts.exchanges,
            "waited_for": counts.waited_for,
            "behind": mine.behind,
            "memory": asdict(mine.memory),
            "peak": mine.peak,
        }
    )
    rows = rank.mesh.gather_names([own.hexdigest(), dropped or "", told])
    heard = [json.loads(row[2]) for row in rows]
    ranks = [(value, size) for each in heard for value, size in each["ranks"]]
    weight = sum(size for _, size in ranks)
    exchanges = sum(each["exchanges"] for each in heard)
    apart = sum(
        each["seconds"] - sum(end - start for start, end, _ in each["link"]) for each in heard
    )
    over = [each["sums"] for each in heard]
    return Shared(
        digest=hashlib.sha256("".join(row[0] for row in rows).encode()).hexdigest(),
        dropped=next((row[1] for row in rows if row[1]), None),
        payload_bytes=sum(each["payload"] for each in over),
        values=sum(each["values"] for each in over),
        seconds=max(each["seconds"] for each in over),
        wait_seconds=max(each["wait"] for each in over),
        exchange_seconds=max(each["exchange"] for each in over),
        behind=any(each["behind"] for each in heard),
        waited_for=_largest(each["waited_for"] for each in heard),
        link=[(start, end, size) for each in heard for start, end, size in each["link"]],
        overhead_seconds=max(0.0, apart) / exchanges if exchanges else 0.0,
        work_seconds=max(each["work"] for each in heard),
        lost_seconds=max(each["lost"] for each in heard),
        effective_rank=sum(value * size for value, size in ranks) / weight if weight else None,
        devices=Devices.of([(MemoryUse(**each["memory"]), each["peak"]) for each in heard]),
        first_seconds=max(each.get("first", 0.0) for each in heard),
    )


def _largest(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for site, seconds in row.items():
            found[site] = max(seconds, found.get(site, 0.0))
    return found


def busy_seconds(intervals: Sequence[Interval]) -> float:
    """Seconds covered by (start, end, bytes); what overlaps counts once."""
    total, until = 0.0, float("-inf")
    for start, end, _ in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
