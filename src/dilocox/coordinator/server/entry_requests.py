"""Requests by which an entering site checks that its donor's state is that of most sites.

A donor's digest of its pieces is only its own claim. So while a site enters, all active sites
report digests of their pieces. The entering site accepts a piece if most of them hold the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.given_state import version_of
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.site_state import SiteState


def key_of(rank: m.RankId, piece: em.PieceDigest) -> str:
    """Return the name of one version of one piece, which is the same at all sites."""
    return f"{rank.stage}/{rank.shard}/{piece.piece}/{piece.landed}/{piece.codec}"


def is_same(said: Mapping[str, str], sites: int, digest: str) -> bool | None:
    """Return whether `digest` is the one that more than half of `sites` sites report.

    `said` holds the reported digests by site. None: more reports are needed. False if all sites
    have reported and no digest has a majority.
    """
    counts = Counter(said.values()).most_common(1)
    if counts and 2 * counts[0][1] > sites:
        return counts[0][0] == digest
    return False if len(said) >= sites else None


def never_settled(said: Mapping[str, str], silent: int, sites: int) -> bool:
    """Return whether no digest of a version can get a majority of `sites` sites any more.

    `said` holds the reported digests by site; only `silent` further sites can still report one.
    """
    most = max(Counter(said.values()).values(), default=0)
    return 2 * (most + silent) <= sites


class Entries:
    """Handles the reports of active sites and the questions of entering ones."""

    def __init__(self, run: RunLog, budgets: Budgets) -> None:
        self._run, self._budgets = run, budgets

    def show(self, request: em.ShowPiecesRequest) -> m.Done:
        """Record the digests that a rank of an active site reports while a site enters.

        The first report of a version counts. Raises `Refused` if the site's budget is used up.
        """
        run, rank = self._run, request.rank
        state = run.state
        if (
            state.running
            and state.sites[rank.site].role == "active"
            and state.with_role("entering")
        ):
            news = {
                key_of(rank, piece): piece.sha256
                for piece in request.pieces
                if rank.site not in state.shown.get(key_of(rank, piece), {})
                if piece.landed < state.next_round
            }
            if news:
                self._budgets.spend(rank.site, "digests of pieces")
                run.append(e.Shown(run.wall(), rank.site, rank.stage, rank.shard, news))
        return m.Done()

    def check(self, request: em.CheckPiecesRequest) -> em.CheckPiecesReply:
        """Return which pieces from its donor an entering rank may accept.

        If a piece differs from that of most sites, the site gets another donor. Raises `Refused` if
        the site is not entering.
        """
        run, rank = self._run, request.rank
        state, site = run.state, run.state.sites[request.rank.site]
        if site.role != "entering":
            raise Refused("conflict", f"{rank}: checks a state, but its site is {site.role}")
        active = state.with_role("active")
        same: list[int] = []
        different: list[int] = []
        hopeless = False
        for piece in request.pieces:
            key = key_of(rank, piece)
            told = state.shown.get(key, {})
            said = {name: digest for name, digest in told.items() if name in active}
            # At the start no other state exists: all sites take theta_0 from the founder.
            alike = is_same(said, len(active), piece.sha256) if state.running else True
            if alike is not None:
                (same if alike else different).append(piece.piece)
            else:
                newest = state.newest.get(version_of(key)[0], {})
                silent = {name for name in active if newest.get(name, -2) < piece.landed}
                hopeless |= never_settled(said, len(silent - said.keys()), len(active))
        if different and site.donor == request.donor:
            other = state.donor_for(site.name, {*site.tried, request.donor})
            run.append(e.Doubted(run.wall(), site.name, site.incarnation, request.donor, other))
        elif hopeless and request.all_came and site.donor == request.donor:
            self._renew(site, request.renewals)
        left = site.donor if site.donor not in site.tried else None
        return em.CheckPiecesReply(same=same, different=different, donor=left)

    def _renew(self, site: SiteState, renewals: int) -> None:
        """Tell an entering site to fetch missing pieces again, once for all of its ranks."""
        run = self._run
        if site.renewals == renewals and self._budgets.can_spend(site.name, "renewals"):
            self._budgets.spend(site.name, "renewals")
            run.append(e.Renewed(run.wall(), site.name, site.incarnation))
