"""Which objects that a log names may be missing for good.

A run with windows (`record.keep`) removes old payloads, and a crash before a resume may have lost
some. Every other missing object is late, or its store is away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dilocox.config.run_config import RunConfig
from dilocox.record.log import statements as s
from dilocox.record.log.state_statements import AnchorState
from dilocox.record.log.step_statements import Step
from dilocox.record.writer.windows import WHOLE_BELOW, bound_of, first_kept


@dataclass
class Absences:
    """What a log says about windows and resumes."""

    _windows: dict[tuple[str, int, int], set[int]] = field(default_factory=dict)
    """First rounds of the windows of each rank, by (site, stage, shard)."""
    _resumed: int = 0
    """Number of the log's statements before its newest resume."""

    def note(self, statement: s.Statement, number: int) -> None:
        """Take statement `number` of the log. Raises `RecordError` if it is malformed."""
        if statement.kind == s.ANCHOR:
            state = AnchorState.of(statement)
            rank = (state.site, state.stage, state.shard)
            # The first window begins with theta_0, so no rank signs its start.
            self._windows.setdefault(rank, {0}).add(state.round)
        elif statement.kind == s.RESUME:
            self._resumed = number

    def excuse(self, statement: s.Statement, number: int, config: RunConfig) -> bool:
        """Return True if objects that statement `number` names may be missing for good.

        `config`: the run file. Raises `RecordError` if the statement is malformed.
        """
        if number < self._resumed:
            return True  # ranks that begin anew store nothing of before
        if statement.kind != s.STEP:
            return False  # only payloads are removed
        step = Step.of(statement)
        return step.key.round < self._kept_from(step.key.stage, config)

    def _kept_from(self, stage: int, config: RunConfig) -> int:
        """Return the first round of which no rank of a stage can have removed payloads."""
        # With "auto" the ranks of a large model sign anchors before they remove anything.
        bound = bound_of(config, WHOLE_BELOW if self._windows else 0)
        if bound is None:
            return 0
        own = [starts for (_, each, _), starts in self._windows.items() if each == stage]
        return max((first_kept(each, max(each), bound) for each in own), default=0)
