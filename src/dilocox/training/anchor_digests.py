"""Digests of pieces: an entering site only takes over a state that most sites hold.

A donor could send a wrong piece together with the digest of that piece. So while a site enters,
every active rank reports the digests of its pieces to the coordinator, by version. For each piece
that has arrived, the entering rank asks whether most active sites hold the same piece. Only then
does it take the piece over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from dilocox.coordinator.protocol.entry_messages import MOST, CheckPiecesReply, PieceDigest
from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import ExchangeError
from dilocox.outer.snapshot import Snapshot
from dilocox.training.control_plane import ControlPlane, LeaseControl
from dilocox.training.rank_state import RankState
from dilocox.utils.background import BackgroundQueue

log = logging.getLogger(__name__)

PAUSE = 0.2
"""Seconds between two requests whether enough sites have reported their digests."""
LONG = 60.0
"""Seconds without an answer after which an entering rank writes a warning to its log."""
UNFIT = "0" * 64
"""Digest that stands for tensors that do not have the shapes of the piece."""


class ShownPieces:
    """Reports the digests of an active rank's pieces while a site enters the run."""

    def __init__(
        self,
        own: RankState,
        control: LeaseControl,
        client: ControlPlane,
        background: BackgroundQueue,
    ) -> None:
        """Prepare to report. `background`: queue in which requests to the coordinator are sent."""
        self._own, self._control = own, control
        self._client, self._background = client, background
        self._entering: set[tuple[str, int, int, int]] = set()
        self._told: dict[int, tuple[int, str]] = {}

    def tell(self) -> None:
        """Report digests of the piece versions that were not reported to the entering sites yet.

        Called at the ends of slots.
        """
        own, news = self._own, self._control.news
        entering = {
            (each.site, each.incarnation, each.from_round, each.renewals) for each in news.entering
        }
        if news.phase == "starting" or not entering:
            self._entering = set()
            return
        if entering - self._entering:
            # The coordinator forgets digests when no site is entering, so report all again.
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
    """Pieces that an entering rank has received and that no majority has confirmed yet."""

    def __init__(self, own: RankState, client: ControlPlane) -> None:
        self._own, self._client = own, client
        self._waiting: dict[int, tuple[Snapshot, PieceDigest]] = {}
        self._asked = 0.0
        self._since: float | None = None

    @property
    def empty(self) -> bool:
        """Whether all received pieces were confirmed or refused."""
        return not self._waiting

    def add(self, snapshot: Snapshot) -> None:
        """Add a received piece that is to be confirmed."""
        state = self._own.rank.states[snapshot.piece]
        try:
            digest = state.digest_of(snapshot.tensors or state.agreed())
        except ExchangeError:
            digest = UNFIT
        told = digest_as_told(snapshot.piece, snapshot.landed, snapshot.codec, digest)
        self._waiting[snapshot.piece] = (snapshot, told)

    def clear(self) -> None:
        """Drop all pieces, because their donor is lost or was refused."""
        self._waiting = {}

    def confirmed(
        self, entry: Entering, all_came: bool
    ) -> tuple[list[Snapshot], CheckPiecesReply | None]:
        """Ask the coordinator which pieces may be taken over, at most every `PAUSE` seconds.

        `all_came`: whether the donor of `entry` has sent all pieces. Returns the confirmed pieces,
        and the coordinator's reply if it refused a piece, otherwise None.
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
        """Warn once if no piece was settled for `LONG` seconds.

        A site may withhold its digests on purpose.
        """
        if settled or self._since is None:
            self._since = now
        elif now - self._since > LONG:
            log.warning(
                "%d pieces have arrived, but too few active sites have reported their digests: "
                "waiting; look at the coordinator for sites that make no progress",
                len(self._waiting),
            )
            self._since = float("inf")


def digest_as_told(piece: int, landed: int, codec: str, sha256: str) -> PieceDigest:
    """Return the message that reports the digest of one version of a piece."""
    return PieceDigest(piece=piece, landed=landed, codec=codec, sha256=sha256)
