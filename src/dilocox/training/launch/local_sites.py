"""The site processes of a run on this machine, while the run goes on."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import DilocoxError, TrainingError
from dilocox.training.launch.supervisor import print_error

NOT_BEGUN = ("enrolling", "starting")
"""Phases in which the coordinator waits for all sites of the run."""


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
        self._running, self._queue = dict(processes), reasons

    @property
    def sentinels(self) -> list[int]:
        """What `multiprocessing.connection.wait` takes for the processes that still run."""
        return [process.sentinel for process in self._running.values()]

    def operator(self) -> CoordinatorClient:
        """Return a client that speaks to the coordinator for the operator."""
        identity = Identity.load(self._endpoint.operator)
        return CoordinatorClient(self._endpoint.url, identity, self._timeouts)

    @property
    def _timeouts(self) -> Timeouts:
        return Timeouts.derive(self._config.network)

    def look(self, stopping: bool) -> None:
        """Take notice of processes that have ended, and say why a site has failed.

        A run that has not begun waits for all of its sites, and a site that has failed does not
        come back. So the run is stopped then, unless it is `stopping` already.

        Raises `TrainingError` with the reason if the run is stopped.
        """
        ended = {name: p for name, p in self._running.items() if not p.is_alive()}
        for name in ended:
            del self._running[name]
        reasons = self._reasons()
        failed = [name for name, process in ended.items() if process.exitcode]
        if failed and not stopping and self._stopped_before_it_began(failed[0]):
            self._stopped = True
            raise TrainingError(
                reasons.get(failed[0])
                or f"site {failed[0]}: its process ended with code {ended[failed[0]].exitcode} "
                "before the run began"
            )
        for reason in reasons.values():
            print_error(reason)

    def say_rest(self) -> None:
        """Say why sites have failed since the last look.

        Nothing is said if this object has stopped the run, since one reason ends it.
        """
        for reason in [] if self._stopped else self._reasons().values():
            print_error(reason)

    def _reasons(self) -> dict[str, str]:
        """Return the reasons of failures since the last call, by site."""
        found: dict[str, str] = {}
        while not self._queue.empty():
            site, reason = self._queue.get()
            found[site] = reason
        return found

    def _stopped_before_it_began(self, site: str) -> bool:
        """Stop the run if it still waits for its sites. Returns whether it was stopped.

        False also if the coordinator does not answer: it says itself how the run has ended.
        """
        patience = replace(self._timeouts, coordinator=self._timeouts.heartbeat)
        identity = Identity.load(self._endpoint.operator)
        client = CoordinatorClient(self._endpoint.url, identity, patience)
        try:
            if client.status().phase not in NOT_BEGUN:
                return False
            client.stop(f"site {site} cannot take part")
        except DilocoxError:
            return False
        finally:
            client.close()
        return True
