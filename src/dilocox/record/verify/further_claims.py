"""Claims of `dilocox verify` on data outside the record: initial weights and `metrics.jsonl`."""

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
    adapters: Path | None,
    run: Path,
    progress: Callable[[str, float], None],
) -> list[Check]:
    """Return each claim with the function that judges it.

    Args:
        course: Returns the history of the run; raises `NotRunError` if the log was not accepted.
        listing: Returns the tensors of a signed state.
        get: Returns an object of the stores by SHA-256, hex.
        start: Folder of the model that the run began from; None if the reader names none.
        adapters: Folder of `adapter.path` or `adapter.handover`; None if the reader names none.
        run: The run's folder.
        progress: Called with an activity and the share of it done.
    """

    def begun() -> str:
        from dilocox.record.verify.start_weights import Start

        return Start(course(), listing, get, start, adapters, progress).judge()

    def metrics() -> str:
        from dilocox.record.verify.metric_reports import judge_reports

        return judge_reports(course(), run)

    return [(c.START, begun), (c.METRICS, metrics)]
