"""Digests of pieces, with which a site is entered by no other state than that of most sites.

A donor sends what it likes, and the digest beside it is its own word. So while a site enters, every
active rank tells the coordinator the digests of its pieces, by version. The entering rank asks for
each piece that has come whether most active sites hold the same, before it takes the piece over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.entry_messages import MOST, CheckPiecesReply, PieceDigest
from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import ExchangeError
from dilocox.outer.snapshot import Snapshot
from dilocox.training.rank_state import RankState
from dilocox.utils.background import BackgroundQueue

log = logging.getLogger(__name__)

PAUSE = 0.2
"""Seconds between two questions whether enough sites have told their digests."""
LONG = 60.0
"""Seconds without an answer after which an entering rank says in its log what it waits for."""
UNFIT = "0" * 64
"""Stands for the digest of tensors that are not of the piece."""


class ShownPieces:
    """What an active rank tells while a site enters; to be called at its slot ends."""

    def __init__(
        self,
        own: RankState,
        control: RankControl,
        client: CoordinatorClient,
        background: BackgroundQueue,
    ) -> None:
        """`background`: in which the coordinator is told."""
        self._own, self._control = own, control
        self._client, self._background = client, background
        self._entering: set[tuple[str, int, int, int]] = set()
        self._told: dict[int, tuple[int, str]] = {}

    def tell(self) -> None:
        """Tell the digests of versions that were not told yet to those who enter now."""
        own, news = self._own, self._control.news
        entering = {
            (each.site, each.incarnation, each.from_round, each.renewals) for each in news.entering
        }
        if news.phase == "starting" or not entering:
            self._entering = set()
            return
        if entering - self._entering:
            # What was told before has been forgotten if nobody was entering in between.
            self._told = {}
        self._entering = entering
        found = []
        for piece, state in enumerate(own.rank.states):
            version = (own.outer.landed[piece], state.warm_codec)
            if self._told.get(piece) != version:
                self._told[piece] = version
                found.append(digest_as_told(piece, *version, state.digest()))
        if found:
            self._background.submit(lambda: self._client.show_pieces(found))


class CheckedPieces:
    """What an entering rank has received and may not take over yet."""

    def __init__(self, own: RankState, client: CoordinatorClient) -> None:
        self._own, self._client = own, client
        self._waiting: dict[int, tuple[Snapshot, PieceDigest]] = {}
        self._asked = 0.0
        self._since: float | None = None

    @property
    def empty(self) -> bool:
        """All that came was confirmed or refused."""
        return not self._waiting

    def add(self, snapshot: Snapshot) -> None:
        """A piece has come."""
        state = self._own.rank.states[snapshot.piece]
        try:
            digest = state.digest_of(snapshot.tensors or state.agreed())
        except ExchangeError:
            digest = UNFIT
        told = digest_as_told(snapshot.piece, snapshot.landed, snapshot.codec, digest)
        self._waiting[snapshot.piece] = (snapshot, told)

    def clear(self) -> None:
        """What came from a donor that has gone, or is not believed, does not count."""
        self._waiting = {}

    def confirmed(
        self, entry: Entering, all_came: bool
    ) -> tuple[list[Snapshot], CheckPiecesReply | None]:
        """(pieces that may be taken over, the coordinator's answer if one was refused).

        `all_came`: the donor of `entry` gives nothing more. Asks at most every `PAUSE` seconds.
        """
        now = time.monotonic()
        if not self._waiting or now - self._asked < PAUSE:
            return [], None
        self._asked = now
        asked: Sequence[PieceDigest] = [told for _, told in self._waiting.values()][:MOST]
        reply = self._client.check_pieces(entry, asked, all_came)
        self._complain(now, len(reply.same) + len(reply.different))
        good = [self._waiting.pop(piece)[0] for piece in reply.same if piece in self._waiting]
        return good, reply if reply.different else None

    def _complain(self, now: float, settled: int) -> None:
        """Warn once if nothing was settled for `LONG` seconds: a site may be silent on purpose."""
        if settled or self._since is None:
            self._since = now
        elif now - self._since > LONG:
            log.warning(
                "%d pieces have come, but too few active sites have told what they hold: waiting; "
                "see the coordinator for sites that stand still",
                len(self._waiting),
            )
            self._since = float("inf")


def digest_as_told(piece: int, landed: int, codec: str, sha256: str) -> PieceDigest:
    """The message about one version of a piece."""
    return PieceDigest(piece=piece, landed=landed, codec=codec, sha256=sha256)
