"""What sites report of a round, on its way to the run's metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.errors import DifferentAnchorsError, TrainingError

Report = Callable[[str, int, str, dict[str, Any]], None]
"""(site, round, kind, metrics)."""
MAX_REPORT = 16 << 10
"""Bytes of a report, beside what it may say of each site."""
LATEST = 8
"""A report may be about so many rounds before the next one to be planned."""
_log = logging.getLogger(__name__)


class Reports:
    """Takes reports, and hands them to `on_report`."""

    def __init__(self, run: RunLog, budgets: Budgets, on_report: Report | None) -> None:
        self._run, self._budgets, self._on_report = run, budgets, on_report

    def take(self, request: m.ReportRequest) -> m.Done:
        """Metrics of a round; the same round and kind twice counts once. Raises `Refused` for a
        round that nobody can be in."""
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
        if request.kind != "warning" and request.round < run.state.next_round - LATEST:
            return m.Done()  # a site that was left behind: nobody waits for it any more
        latest = site.metrics.get(request.kind)
        # Warnings of one round may be about several things.
        told = request.kind == "warning" and request.metrics.get("text")
        another = bool(told) and latest is not None and latest.get("text") != told
        if latest is None or request.round > latest["round"] or another:
            if request.kind == "warning":
                self._budgets.spend(site.name, "warnings")
            run.append(
                e.Reported(run.wall(), site.name, request.round, request.kind, request.metrics)
            )
            self.hand_on(site.name, request.round, request.kind, dict(request.metrics))
        return m.Done()

    def tell(self, listener: Callable[[Any], None] | None, about: Any) -> None:
        """Call `listener`, if any. What it raises never takes the control plane down."""
        try:
            if listener is not None:
                listener(about)
        except Exception as error:
            _log.error("coordinator: its metrics did not take a message or plan (%r)", error)

    def again(self) -> None:
        """Hand on what the process before may have logged and no more."""
        for site in self._run.state.sites.values():
            for kind, metrics in list(site.metrics.items()):
                if kind != "warning":
                    self.hand_on(site.name, metrics["round"], kind, dict(metrics))

    def hand_on(self, site: str, round_: int, kind: str, metrics: dict[str, Any]) -> None:
        """Tell `on_report`. What it raises ends the run at most, never the control plane."""
        run = self._run
        if self._on_report is None:
            return
        try:
            self._on_report(site, round_, kind, metrics)
        except DifferentAnchorsError as error:
            for name in error.sites:
                if name in run.state.live:
                    self._without(name, round_, str(error))
        except TrainingError as error:
            # Sites that hold different anchors do not train one model any more.
            if not run.state.over:
                run.append(e.Ended(run.wall(), "failed", str(error)))
        except Exception:
            # A full disk of the metrics writer must not take the control plane down.
            _log.exception("metrics of %s round %d not written", site, round_)

    def _without(self, name: str, round_: int, reason: str) -> None:
        """A site goes that holds another anchor than most. In its first round it holds what its
        donor has given it; which of the two is at fault nobody can tell, so both are named."""
        run, site = self._run, self._run.state.sites[name]
        donor = site.entered_from if round_ <= site.active_from else None
        text = reason if donor is None else f"{reason}; it entered with the state of {donor}"
        run.append(e.SiteLost(run.wall(), name, site.incarnation, text, True, donor))
