"""Disk space that a planned run's record takes at one site."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilocox.record.writer.windows import bound_of
from dilocox.tools.planner.plan import RunPlan
from dilocox.training.record_volume import DAY, STATE_BYTES, states_bytes
from dilocox.utils.formatting import size


@dataclass(frozen=True)
class RecordSize:
    """Bytes of the record at one site, at the end of the run."""

    start: int
    """theta_0 in fp32, of which every site keeps a copy."""
    states: int
    """States in which rounds begin (`record.states_every`)."""
    payloads: float
    """The site's own payloads and all received, of all rounds."""
    by_day: float
    """Bytes that a day of training adds, before anything is removed."""
    limit: int | None
    """Bytes of payloads that `record.keep` keeps. None: no limit in bytes."""

    @property
    def whole(self) -> float:
        """Bytes of the record if no payload is removed."""
        return self.start + self.states + self.payloads

    @property
    def kept(self) -> float:
        """Bytes of the record with the limit of `record.keep`."""
        payloads = self.payloads if self.limit is None else min(self.limit, self.payloads)
        return self.start + self.states + payloads


def record_size(plan: RunPlan) -> RecordSize | None:
    """Return the disk space of the run's record. None if the run keeps no record of rounds."""
    config, found, parameters = plan.config, plan.prediction, plan.outline.parameters
    if not config.record.enabled or config.exchanges_gradients:
        return None
    sites = len(config.sites)
    share = sites / (sites - 1) if sites > 1 else 0.0
    by_day = found.payload_bytes * share * DAY / found.round_seconds
    payloads = by_day * plan.budget.seconds / DAY
    of_round = found.course.tokens_per_step * found.choice.inner_steps
    rounds = math.ceil(plan.budget.tokens / of_round - 1e-6)
    every = config.record.states_every
    if every and not config.record.states_keep:
        by_day += STATE_BYTES * parameters * DAY / (every * found.round_seconds)
    bound = bound_of(config, parameters)
    return RecordSize(
        start=4 * parameters,
        states=states_bytes(config, rounds, parameters),
        payloads=payloads,
        by_day=by_day,
        limit=None if bound is None else bound.bytes,
    )


def record_text(plan: RunPlan, found: RecordSize) -> str:
    """Return the disk space of the record as one line, with the keys that lower it."""
    stays, more = size(found.kept), "; record.keep sets a limit"
    if found.kept < found.whole:
        stays, more = f"{stays} of {size(found.whole)}", ", limited by record.keep"
    elif bound_of(plan.config, plan.outline.parameters) is not None:
        more = ", at most what record.keep allows"
    return (
        f"{stays} at each site for the whole run, {size(found.by_day)} a day{more} (--set "
        "record.enabled=false keeps no record, and then nobody can verify the run)"
    )
