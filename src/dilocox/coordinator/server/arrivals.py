"""When ranks arrived at an exchange, for metrics and stragglers. Pure: time is an argument.

The times are not logged. A coordinator that restarts begins without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dilocox.coordinator.server.exchange_votes import RankKey


class Arrivals:
    """Time of every rank's first request for each recent exchange."""

    def __init__(self) -> None:
        self._times: dict[str, dict[tuple[str, int], float]] = {}
        self._looked: float | None = None

    def note(self, key: str, site: str, shard: int, now: float) -> bool:
        """Note that a rank asks for the group of exchange `key`. Returns True the first time."""
        times = self._times.setdefault(key, {})
        news = (site, shard) not in times
        times.setdefault((site, shard), now)
        return news

    def present(self, key: str) -> Collection[tuple[str, int]]:
        """Return (site, shard) of the ranks that have arrived at an exchange."""
        return self._times.get(key, {}).keys()

    def keep(self, keys: Collection[str]) -> None:
        """Forget all exchanges but `keys`."""
        self._times = {key: times for key, times in self._times.items() if key in keys}

    def look(self, now: float, limit: float) -> None:
        """Correct all times for a pause of the coordinator. Call it often.

        If more than `limit` seconds have passed since the last call, the coordinator itself was
        held up, and the pause does not count as any site's delay.
        """
        if self._looked is not None and now - self._looked > limit:
            for times in self._times.values():
                for rank in times:
                    times[rank] += now - self._looked
        self._looked = now

    def forget(self, site: str) -> None:
        """Drop the times of a site."""
        for times in self._times.values():
            for rank in [rank for rank in times if rank[0] == site]:
                del times[rank]

    def late(self, key: str) -> dict[str, float]:
        """Return, by site, the seconds by which its last shard came after the first site."""
        sites = self._sites(key)
        first = min(sites.values(), default=0.0)
        return {site: moment - first for site, moment in sites.items()}

    def awaited(self, key: str, voters: Sequence[RankKey]) -> tuple[float, list[str]] | None:
        """Return since when the other `voters` wait, and for which sites.

        The wait starts with the latest arrival of a rank whose site is complete. None if no site is
        missing, or if no complete site is there to wait.
        """
        times = self._times.get(key, {})
        absent = {site for site, _, shard in voters if (site, shard) not in times}
        present = [times[site, shard] for site, _, shard in voters if site not in absent]
        if not absent or not present:
            return None
        return max(present), [
            site for site in dict.fromkeys(v[0] for v in voters) if site in absent
        ]

    def _sites(self, key: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for (site, _), moment in self._times.get(key, {}).items():
            found[site] = max(moment, found.get(site, moment))
        return found
