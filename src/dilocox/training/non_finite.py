"""Rules of a site for losses, gradients and contributions that are not finite."""

from __future__ import annotations

import contextlib
import logging

from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.errors import DilocoxError, RunEndedError
from dilocox.training.control_plane import ControlPlane
from dilocox.training.rank_state import RankState

log = logging.getLogger(__name__)


class NonFinitePolicy:
    """Drops contributions that are not finite, and ends the run if that does not help.

    A site drops its contributions of one round, and continues from the anchor. In the second such
    round in a row, or if the site trains alone, the run ends.
    """

    def __init__(self, own: RankState, client: ControlPlane) -> None:
        self._own, self._client = own, client

    def check_steps(self, plan: RoundPlan) -> bool:
        """Return True if a loss or gradient of the round is not finite and nothing was dropped yet.

        This site's contributions of the round are then to be dropped. Raises `RunEndedError` if
        the run ends instead.
        """
        bad = self._own.meter.non_finite()
        if bad is None or self._own.outer.status.dropping:
            return False
        self._drop(plan, bad)
        return True

    def check_pseudo_gradients(self, plan: RoundPlan) -> None:
        """Report the contribution that was dropped at a boundary because it was not finite.

        Only this rank knows of it. The fragment has already been reset to the anchor. Raises
        `RunEndedError` if the run ends instead.
        """
        bad = self._own.outer.status.take_non_finite()
        if bad is not None:
            self._drop(plan, bad)

    def _drop(self, plan: RoundPlan, bad: str) -> None:
        """Note that a contribution is dropped because `bad`, a loss or a tensor, is not finite."""
        own = self._own
        where = f"site {own.site}, round {plan.round}: {bad} is not finite"
        if len(plan.members) == 1 or own.dropped_round == plan.round - 1:
            again = " for the second round in a row" if len(plan.members) > 1 else ""
            reason = (
                f"{where}{again}; the last checkpoint is whole: lower inner.learning_rate and "
                "resume, or look at the data of these steps"
            )
            # Every rank reports it: if one rank left first, the other sites would go on.
            with contextlib.suppress(DilocoxError):
                self._client.fail(reason)
            raise RunEndedError(reason)
        log.warning(
            "%s: the site's contribution is dropped, and the site continues from the anchor", where
        )
        own.meter.dropped = bad
