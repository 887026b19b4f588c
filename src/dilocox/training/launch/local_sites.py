"""The site processes of a run on this machine, while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import Status
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import DilocoxError, TrainingError
from dilocox.training.launch.supervisor import print_error

PAUSE = 2.0
"""Seconds between two questions whether the run waits for sites."""


def _has_not_begun(status: Status) -> bool:
    """Return whether the coordinator still waits for all sites of the run."""
    return status.phase in ("enrolling", "starting")


class LocalSites:
    """Notices site processes that end. No other process can take the place of such a site."""

    def __init__(
        self,
        config: RunConfig,
        endpoint: Endpoint,
        processes: dict[str, BaseProcess],
        reasons: Any,
    ) -> None:
        """Prepare to look.

        Args:
            config: the run.
            endpoint: address of the coordinator, with the operator's identity.
            processes: the process of each site.
            reasons: queue of pairs (site, reason) from sites that have failed.
        """
        self._config, self._endpoint = config, endpoint
        self._stopped = False
        self._ending = ""
        self._too_few = ""
        """Why a site has failed that a run with fewer than `outer.min_sites` sites waits for."""
        self._asks_next = 0.0
        self._running, self._queue = dict(processes), reasons
        self._unsaid: dict[str, str] = {}
        """Reasons, by site, that were not printed yet. A reason arrives before its process ends."""

    @property
    def sentinels(self) -> list[int]:
        """Sentinels of the running processes, for `multiprocessing.connection.wait`."""
        return [process.sentinel for process in self._running.values()]

    def operator(self) -> CoordinatorClient:
        """Return a client that speaks to the coordinator for the operator."""
        identity = Identity.load(self._endpoint.operator)
        return CoordinatorClient(self._endpoint.url, identity, self._timeouts)

    @property
    def _timeouts(self) -> Timeouts:
        return Timeouts.derive(self._config.network)

    def look(self, stopping: bool, now: float) -> None:
        """Take notice of processes that have ended, and say why a site has failed.

        A site that has failed does not come back. So the run is stopped, unless it is `stopping`
        already, if it has not begun and waits for all of its sites, or if fewer than
        `outer.min_sites` are left. `now`: clock in seconds.

        Raises `TrainingError` with the reason if the run is stopped before it began.
        """
        ended = {name: p for name, p in self._running.items() if not p.is_alive()}
        for name in ended:
            del self._running[name]
        self._collect_reasons()
        reasons = {name: self._unsaid.pop(name) for name in ended if name in self._unsaid}
        failed = [name for name, process in ended.items() if process.exitcode]
        if failed and not stopping:
            reason = reasons.get(failed[0]) or (
                f"site {failed[0]}: its process ended with code {ended[failed[0]].exitcode}"
            )
            if self._stop_if(_has_not_begun, f"site {failed[0]} cannot take part"):
                self._stopped = True
                raise TrainingError(reason)
            if len(self._running) < self._config.outer.min_sites:
                self._too_few = self._too_few or reason
        for reason in reasons.values():
            print_error(reason)
        if self._too_few and not stopping and not self._ending and now >= self._asks_next:
            # The coordinator may learn of the site's end only by its missing heartbeats.
            self._asks_next = now + PAUSE
            if self._stop_if(self._waits_for_sites, "too few sites are left"):
                self._ending = self._too_few

    def check_end(self) -> None:
        """Raise `TrainingError` if this object has stopped a run that had begun."""
        if self._ending:
            raise TrainingError(
                f"run {self._config.run.name} was stopped, since fewer than outer.min_sites "
                f"{self._config.outer.min_sites} are left ({self._ending}); the same command with "
                "--resume goes on from the last checkpoint"
            )

    def say_rest(self) -> None:
        """Say why sites have failed since the last look.

        Nothing is said if this object has stopped the run, since one reason ends it.
        """
        self._collect_reasons()
        for reason in [] if self._stopped else self._unsaid.values():
            print_error(reason)

    def _collect_reasons(self) -> None:
        """Take the reasons of failures out of the queue."""
        while not self._queue.empty():
            site, reason = self._queue.get()
            self._unsaid[site] = reason

    def _waits_for_sites(self, status: Status) -> bool:
        """Return whether the run goes on, and decides nothing because it has too few sites."""
        roles = [site.role for site in status.sites]
        few = roles.count("active") < self._config.outer.min_sites
        return status.phase == "running" and "finished" not in roles and few

    def _stop_if(self, condition: Callable[[Status], bool], reason: str) -> bool:
        """Stop the run if its status meets a condition. Returns whether it was stopped.

        False also if the coordinator does not answer: it says itself how the run has ended.
        """
        patience = replace(self._timeouts, coordinator=self._timeouts.heartbeat)
        identity = Identity.load(self._endpoint.operator)
        client = CoordinatorClient(self._endpoint.url, identity, patience)
        try:
            if not condition(client.status()):
                return False
            client.stop(reason)
        except DilocoxError:
            return False
        finally:
            client.close()
        return True
