"""Reports of sites about a round, on their way to the run's metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.errors import DifferentAnchorsError, TrainingError

Report = Callable[[str, int, str, dict[str, Any]], bool]
"""Callback with (site, round, kind, metrics). Returns whether the report is in the metrics."""
MAX_REPORT = 16 << 10
"""Largest report in bytes, beside an allowance for each site of the run."""
LATEST = 8
"""A report may be about a round at most this far before the next round to be planned. Warnings and
evaluations on tasks, which may take many rounds, may be about any earlier round."""
ANY_TIME = ("warning", "tasks", "first_tasks")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunListener:
    """Callbacks of the process that runs a coordinator; None: the process is not told."""

    on_report: Report | None = None
    """Gets (site, round, kind, metrics). The server waits, so it must return soon. A report about
    which it raises a `TrainingError` counts as kept."""
    on_message: Callable[[str], None] | None = None
    """Gets a line for people, for example when a site joins or leaves."""
    on_plan: Callable[[m.RoundPlan], None] | None = None
    """Gets every plan when it is made."""
    on_resumed: Callable[[e.Resumed], None] | None = None
    """Gets the event of a resume."""
    on_ready: Callable[[Endpoint], None] | None = None
    """Gets the server's endpoint when the server listens."""
    on_ledger: Callable[[Ledger], None] | None = None
    """Gets the ledger when the run has ended."""


class Reports:
    """Takes the sites' reports and hands them to `on_report`."""

    def __init__(self, run: RunLog, budgets: Budgets, on_report: Report | None) -> None:
        self._run, self._budgets, self._on_report = run, budgets, on_report

    def take(self, request: m.ReportRequest) -> m.ReportReply:
        """Take metrics of a round; another report of the same round and kind is not kept.

        A site repeats a report whose reply it has missed. The reply is then the same as before.
        Raises `Refused` if no site can be in the round yet, if the report is too large, or if the
        site has sent too many warnings.
        """
        run = self._run
        if request.round > run.state.next_round + 1:
            raise Refused(
                "conflict",
                f"{request.rank}: reports of round {request.round}, the next to be planned is "
                f"{run.state.next_round}",
            )
        size = len(json.dumps(request.metrics, separators=(",", ":")))
        limit = MAX_REPORT + 64 * len(run.state.sites)
        if size > limit:
            raise Refused(
                "malformed",
                f"{request.rank}: its report of round {request.round} has {size} bytes, a report "
                f"may have {limit}",
            )
        site = run.state.sites[request.rank.site]
        if request.kind not in ANY_TIME and request.round < run.state.next_round - LATEST:
            return m.ReportReply(kept=False)  # The site was left behind: nothing waits for it.
        latest = site.metrics.get(request.kind)
        # A round may have several warnings with different texts.
        told = request.kind == "warning" and request.metrics.get("text")
        another = bool(told) and latest is not None and latest.get("text") != told
        if latest is None or request.round > latest["round"] or another:
            if request.kind == "warning":
                self._budgets.spend(site.name, "warnings")
            run.append(
                e.Reported(run.wall(), site.name, request.round, request.kind, request.metrics)
            )
        elif latest != {**request.metrics, "round": request.round} or request.kind == "warning":
            return m.ReportReply(kept=False)
        kept = self.hand_on(site.name, request.round, request.kind, dict(request.metrics))
        return m.ReportReply(kept=kept)

    def tell(self, listener: Callable[[Any], None] | None, about: Any) -> None:
        """Call `listener` with `about`, if there is one. An error of it is only logged."""
        try:
            if listener is not None:
                listener(about)
        except Exception as error:
            _log.error("coordinator: the metrics failed to take a message or plan (%r)", error)

    def again(self) -> None:
        """Hand on the latest reports again, which the previous process may only have logged."""
        for site in self._run.state.sites.values():
            for kind, metrics in list(site.metrics.items()):
                if kind != "warning":
                    self.hand_on(site.name, metrics["round"], kind, dict(metrics))

    def hand_on(self, site: str, round_: int, kind: str, metrics: dict[str, Any]) -> bool:
        """Call `on_report`, and return whether the report is in the metrics.

        Errors of `on_report` may end the run, but never the coordinator's process.
        """
        run = self._run
        if self._on_report is None:
            return False
        try:
            return self._on_report(site, round_, kind, metrics)
        except DifferentAnchorsError as error:
            for name in error.sites:
                if name in run.state.live:
                    self._without(name, round_, str(error))
        except TrainingError as error:
            # Sites with different anchors no longer train the same model.
            if not run.state.over:
                run.append(e.Ended(run.wall(), "failed", str(error)))
        except Exception:
            # A full disk of the metrics writer must not take the control plane down.
            _log.exception("metrics of %s round %d not written", site, round_)
            return False
        return True

    def _without(self, name: str, round_: int, reason: str) -> None:
        """Declare a site lost whose anchor differs from that of most sites.

        In its first round a site holds the state of its donor. Site and donor are then both named,
        because either may be at fault.
        """
        run, site = self._run, self._run.state.sites[name]
        donor = site.entered_from if round_ <= site.active_from else None
        text = reason if donor is None else f"{reason}; it entered with the state of {donor}"
        run.append(e.SiteLost(run.wall(), name, site.incarnation, text, True, donor))
