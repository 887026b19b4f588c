"""Measurements of one round of one site: losses, times and bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
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
from dilocox.outer.fragment_state import digests
from dilocox.outer.in_flight import Counts
from dilocox.outer.loop import OuterLoop
from dilocox.training.builder import RankParts

Interval = tuple[float, float, int]
"""(start, end, bytes) of received payloads, in seconds of the monotonic clock."""

NOTHING = dict.fromkeys(
    ("steps", "finite", "loss", "seconds", "wait", "exchange", "payload", "values"), 0.0
)
"""Sums over the part of a round that was trained before a stop, all zero."""


class RoundMetrics:
    """Collects losses, times and bytes of a round. `end` returns them as the site's metrics."""

    def __init__(self, config: RunConfig, rank: RankParts) -> None:
        self._config = config
        self._parameters = rank.blueprint.trained
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
        """Seconds of this process's first inner step, with and without its waits for other sites.
        0 in all rounds but the process's first."""
        self._bad: str | None = None
        self.dropped: str | None = None
        """Stage and tensor that was not finite, if contributions of this round were dropped;
        otherwise None. After `end` it is the same on all ranks of the site."""
        self.measured: Measured | None = None
        """Measurements from which later plans are made, set by `end`. None after a round without
        inner steps."""
        self.behind = False
        """Whether the other sites have gone on without this site. After `end` it is the same on
        all ranks of the site."""

    def begin(self, plan: RoundPlan, slot: int) -> None:
        """Start to measure the round of `plan`, of which `slot` slots are finished."""
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
        """Return the sums of this round so far. A checkpoint keeps them for `go_on`."""
        counts, earlier = outer.status.counts, self._earlier
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
        """Continue a round that was started before a stop.

        `so_far`, `bad` and `dropped` are the values of `so_far()`, `non_finite()` and `dropped`
        at the stop.
        """
        self._earlier = {name: float(so_far[name]) for name in NOTHING}
        self._bad, self.dropped = bad, dropped

    def held(self, seconds: float) -> None:
        """Add `seconds` for which this rank waited for the coordinator to extend the lease."""
        self._held += seconds

    def slot_seconds(self, slot: int) -> float | None:
        """Return mean seconds per slot, over the last round and the first `slot` slots of this one.

        Waits for other sites are included. Waits for the lease are not, because the lease's
        length is derived from this number. None until this process has taken an inner step, since a
        slow site's first slots may have no step. Also None while the process's first step is the
        only step of this round.
        """
        seconds, slots = self._paced
        passed = self._passed()
        if passed is None or (not self._results and not slots):
            return None
        return (seconds + passed) / max(slots + slot - self._from, 1)

    def _passed(self) -> float | None:
        """Return the seconds of this round so far, without waits for the lease.

        The first inner step of a process counts as an average step. None if this is the only
        step of the round so far.
        """
        passed, steps = time.monotonic() - self._start - self._held, len(self._results)
        if not self._first:
            return passed
        return (passed - self._first) * steps / (steps - 1) if steps > 1 else None

    @contextlib.contextmanager
    def first_step(self, waits: Counts) -> Iterator[None]:
        """Context around every inner step, which measures the first inner step of the process.

        The first step starts CUDA and NCCL, and compiles the model's layers. So it does not count
        in the rank's pace. `waits`: the counts whose `wait_seconds` grow during the step.
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
        """Context around work for exchanges in this thread: boundaries, landings, metrics.

        Training loses the time of this work, in this round or the next. On a CPU the processor
        time counts. A GPU idles during the work, once its inner steps are finished. So with
        `waits`, the wall-clock time from that moment on counts, without the waits for other sites
        (`waits.wait_seconds`). Without `waits` nothing counts on a GPU.
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
        """Add the result of an inner step, which was taken with learning rate `rate`."""
        self._results.append(result)
        self._rate = rate

    def non_finite(self) -> str | None:
        """Return the first loss or tensor of this round's steps that was not finite, or None."""
        if self._bad is None:
            bad = (result.culprit for result in self._results if not result.finite)
            self._bad = next(bad, None)
        return self._bad

    def _crowding(self) -> float:
        """Return wall-clock seconds per CPU second of the training thread (1.0: no contention).

        Training loses as many seconds for every second that exchanges compute on its cores.
        """
        ran, waited = (
            now - then for now, then in zip(ran_and_kept_waiting(), self._ran, strict=True)
        )
        return 1.0 + waited / ran if ran > 0 else 1.0

    def end(self, plan: RoundPlan, outer: OuterLoop, rank: RankParts) -> dict[str, Any]:
        """End the round, and return its metrics, the same on all ranks of the site.

        Also sets `measured`, `dropped` and `behind`. Collective over the site.
        """
        sums = self.so_far(outer)
        steps = int(sums["steps"])
        counts, overtaken = outer.status.take_counts(), outer.status.overtaken
        lost, self._lost = self._lost, 0.0
        # Threads of exchanges do not slow a GPU down.
        if self._device.type == "cpu":
            counts.work_seconds += lost
            lost = counts.work_seconds * self._crowding()
        own = _Own(
            sums, counts, lost, overtaken, self._first_alone, self._memory.read(), self._peak
        )
        shared = _over_ranks(rank, self.dropped, own)
        self.behind = shared.behind
        if self._results:
            passed = self._passed()
            self._paced = (0.0, 0) if passed is None else (passed, plan.slots - self._from)
        self._start, self._held, self._from = time.monotonic(), 0.0, 0
        self._first = self._first_alone = 0.0
        record = self._record(plan, rank, shared, steps)
        record["contributors"] = min(counts.contributors, default=0)
        record["repeated_exchanges"] = counts.attempts - counts.exchanges
        record["anchor_digest"] = None if shared.behind else shared.digest
        record |= shared.devices.record(rank, record["tokens_per_second"])
        self.dropped = shared.dropped
        if shared.effective_rank is not None:
            record["effective_rank"] = shared.effective_rank
        like_others = steps - (shared.first_seconds > 0)
        self.measured = self._measured(shared, like_others) if like_others else None
        # The mean is over finite steps only: a step with non-finite values has no loss.
        if sums["finite"]:
            record["loss"] = sums["loss"] / sums["finite"]
        # A loop may report a norm of infinity, in a step that its gradient scaler has left out.
        norms = [each.grad_norm for each in self._results if each.finite and each.norm_known]
        norms = [norm for norm in norms if math.isfinite(norm)]
        if norms:
            record["grad_norm"] = norms[-1]
        if self.dropped:
            record["dropped"] = self.dropped
        # Until the next round begins, `slot_seconds` must only count whole rounds.
        self._results = []
        return record

    def _record(
        self, plan: RoundPlan, rank: RankParts, shared: Shared, steps: int
    ) -> dict[str, Any]:
        """Return the figures that every round's record has: text, times, and bytes."""
        seconds, payload = shared.seconds, shared.payload_bytes
        member = plan.members.get(rank.place.site)
        tokens = self._tokens(steps, member.batch if member else 0)
        sites = len(plan.members)
        dense = 8 * (sites - 1) / sites * self._parameters if sites else 0.0
        factor = sites - 1 if plan.exchange == "gather" else 2 * (sites - 1) / max(sites, 1)
        return {
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
        }

    def _tokens(self, steps: int, batch: int) -> int:
        """Return the tokens of `steps` inner steps, each of `batch` sequences if none reports its
        own number."""
        told = [each.tokens for each in self._results if each.tokens is not None]
        return (steps - len(told)) * batch * self._config.data.sequence_length + sum(told)

    def _measured(self, shared: Shared, like_others: int) -> Measured:
        """Return the measurements for later plans.

        `like_others`: inner steps of the round without a process's first one.
        """
        alone = shared.seconds - shared.wait_seconds - shared.first_seconds
        return Measured(
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


def peak_here(config: RunConfig, device: torch.device) -> float | None:
    """Return the peak operations per second of `device` in the run's compute dtype.

    The peak of the same rank in all other replicas is added, because these ranks do not report.
    None if the peak is not known, or if `device` is a CPU.
    """
    if device.type != "cuda":
        return None
    precision = resolve_precision(config.site, device)
    peak = peak_of(torch.cuda.get_device_name(device), precision)
    return None if peak is None else config.site.replicas * peak


@dataclass(frozen=True)
class Devices:
    """Memory use and peak speed of a site's devices."""

    memory: MemoryUse
    """For each figure the largest of all ranks; for `retries` the sum over all ranks."""
    peak: float | None
    """Peak operations per second of all devices together. None if one device's is not known."""

    @classmethod
    def of(cls, ranks: Sequence[tuple[MemoryUse, float | None]]) -> Devices:
        """Combine (memory use, peak operations per second) of all ranks of a site."""
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
        """Return the known figures as entries of a round's metrics."""
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
    """Metrics of a round that the ranks of a site combine at its end, the same at all ranks."""

    digest: str
    """SHA-256, hex, over the digests of all ranks in order. A rank's digest is over its pieces.
    It is equal at all sites."""
    dropped: str | None
    """Stage and tensor that the first dropping rank has dropped. None if no rank dropped any."""
    payload_bytes: float
    """Bytes of payloads that were sent, summed over all ranks."""
    values: float
    """Number of fp32 values that the payloads encode, summed over all ranks."""
    seconds: float
    """Seconds of the slowest rank. A rank that waits for the last landing ends the round late; the
    other ranks wait for it in the gathering of these metrics."""
    wait_seconds: float
    """Seconds of waiting at the rank that waited longest."""
    exchange_seconds: float
    """Seconds of exchanges at the rank where they took longest."""
    behind: bool
    """Whether any rank found that the other sites have gone on without this site."""
    waited_for: dict[str, float]
    """Seconds of waiting until another site was there, by name of that site. For each site the
    value is of the rank that waited longest for it."""
    link: list[Interval]
    overhead_seconds: float
    """Mean seconds of an exchange in which no payload arrives: votes, work, and waiting for a
    later site."""
    work_seconds: float
    """Processor seconds of exchanges at the busiest rank: of the exchange thread, and on CPUs also
    of the training thread when it works for exchanges."""
    lost_seconds: float
    """Seconds that training loses to exchanges, beside waits, at the rank that loses most. On CPUs
    the exchanges' work counts as wall-clock time (see `RoundMetrics._crowding`). On GPUs
    boundaries and landings count, during which a GPU idles."""
    effective_rank: float | None
    """Mean over all landings, weighted by the number of values. None without low rank."""
    devices: Devices
    first_seconds: float
    """Seconds of a process's first inner step, at the slowest rank, without its waits for other
    sites. 0 if no process of the site took its first step in this round."""


@dataclass(frozen=True)
class _Own:
    """Measurements of one rank, which the rank shares with the site's other ranks.

    `sums` cover the whole round. The other fields cover the part of the round that this process
    has trained: less than the round if the run was stopped and resumed within it.
    """

    sums: dict[str, float]
    counts: Counts
    lost: float
    behind: bool
    first: float
    memory: MemoryUse
    peak: float | None


def _over_ranks(rank: RankParts, dropped: str | None, mine: _Own) -> Shared:
    own = hashlib.sha256()
    for digest in digests(rank.states):
        own.update(digest.encode())
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
    """Return the seconds that `intervals` cover; overlapping time counts once."""
    total, until = 0.0, float("-inf")
    for start, end, _ in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
