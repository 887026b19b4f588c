"""Claims of `dilocox verify` that need the log and more than the record: what a run began from,
and what its page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.record.log.state_statements import State
from dilocox.record.verify import claims as c
from dilocox.record.verify.run_history import RunHistory

if TYPE_CHECKING:
    from dilocox.record.log.digests import TensorDigest

Check = tuple[c.Claim, Callable[[], str]]


def further(
    course: Callable[[], RunHistory],
    listing: Callable[[State], Sequence[TensorDigest]],
    get: Callable[[str], bytes],
    start: Path | None,
    run: Path,
    progress: Callable[[str, float], None],
) -> list[Check]:
    """Each claim with what judges it.

    `course`: what the log says, or `NotRunError`. `listing`: the tensors of a signed state. `get`:
    an object of the stores. `start`: the model that the run began from, where the reader names it.
    `run`: the run's folder.
    """

    def begun() -> str:
        from dilocox.record.verify.start_weights import Start

        return Start(course(), listing, get, start, progress).judge()

    def metrics() -> str:
        from dilocox.record.verify.metric_reports import judge_reports

        return judge_reports(course(), run)

    return [(c.START, begun), (c.METRICS, metrics)]
