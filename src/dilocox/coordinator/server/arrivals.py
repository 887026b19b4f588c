"""When sites were there for an exchange. Pure: time enters as an argument.

It is not in the log: it says who waited for whom, and a coordinator that starts again begins to
count anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dilocox.coordinator.server.exchange_votes import RankKey


class Arrivals:
    """First request of every rank for every exchange that is remembered."""

    def __init__(self) -> None:
        self._times: dict[str, dict[tuple[str, int], float]] = {}
        self._looked: float | None = None

    def note(self, key: str, site: str, shard: int, now: float) -> bool:
        """A rank asks for the members of exchange `key`; only the first time counts. True then."""
        times = self._times.setdefault(key, {})
        news = (site, shard) not in times
        times.setdefault((site, shard), now)
        return news

    def present(self, key: str) -> Collection[tuple[str, int]]:
        """(site, shard) of those that are there for an exchange."""
        return self._times.get(key, {}).keys()

    def keep(self, keys: Collection[str]) -> None:
        """Forget all exchanges but `keys`."""
        self._times = {key: times for key, times in self._times.items() if key in keys}

    def look(self, now: float, limit: float) -> None:
        """To be called often. Time in which the caller itself was held up, for more than `limit`
        seconds, counts against nobody: who was late has asked meanwhile."""
        if self._looked is not None and now - self._looked > limit:
            for times in self._times.values():
                for rank in times:
                    times[rank] += now - self._looked
        self._looked = now

    def forget(self, site: str) -> None:
        """What was heard of a site does not count any more."""
        for times in self._times.values():
            for rank in [rank for rank in times if rank[0] == site]:
                del times[rank]

    def late(self, key: str) -> dict[str, float]:
        """Seconds after the first site at which each was there, with the last of its shards."""
        sites = self._sites(key)
        first = min(sites.values(), default=0.0)
        return {site: moment - first for site, moment in sites.items()}

    def awaited(self, key: str, voters: Sequence[RankKey]) -> tuple[float, list[str]] | None:
        """(since when, which sites) the others of `voters` wait for; none if nobody waits."""
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
