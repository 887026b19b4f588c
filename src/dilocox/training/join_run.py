"""Entry of a site into a run: theta_0 at the start, the state of a training site later.

The founder makes theta_0 itself. Every other site that enters fetches its pieces from a donor, in
a thread. Until a plan includes the site, it follows the rounds without inner steps. It receives
the exchanges of the other sites, and applies them to the pieces that it has fetched. Meanwhile it
never advances past the lease, so it stands at the same slot as the training sites when its first
round starts. A site that was overtaken enters in the same way. It keeps its inner state and its
residual, to which it adds all its training that no average holds yet.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import DilocoxError, ExchangeError, RunEndedError, TrainingError
from dilocox.outer.first_state import FirstState, OtherStartError
from dilocox.outer.snapshot import Snapshot
from dilocox.training.anchor_digests import CheckedPieces, ShownPieces
from dilocox.training.control_plane import ControlPlane, LeaseControl
from dilocox.training.rank_state import RankState
from dilocox.transport.groups import PeerGroup
from dilocox.transport.state_transfer import Donor, digest_of, fetch
from dilocox.utils.background import BackgroundQueue

if TYPE_CHECKING:
    from dilocox.training.published_state import PublishedState

log = logging.getLogger(__name__)

PAUSE = 0.5
"""Seconds between two checks whether the run has left the phase "starting"."""
GLANCE = 0.05
"""Seconds between two checks whether the lease has been extended."""

FormGroup = Callable[[str, str, str], PeerGroup]
"""(rendezvous name, donor site, receiver site) -> the group of the two ranks."""


def entry_name(entry: Entering, stage: int, shard: int) -> str:
    """Return the rendezvous name of an entering rank and its donor.

    The name differs from try to try: a site may enter more than once, have several donors, and
    fetch from one donor more than once.
    """
    who = f"{entry.site}/{entry.incarnation}/{entry.from_round}/{entry.renewals}"
    return f"run/entry/{who}/{entry.donor}/{stage}/{shard}"


def _key(entry: Entering) -> tuple[str, int, int, int]:
    """Return the key that identifies one service of a donor."""
    return entry.site, entry.incarnation, entry.from_round, entry.renewals


class EntryStopped(Exception):  # noqa: N818 - not an error: the site was asked not to go on
    """This site ends before it has trained a round since its entry."""

    def __init__(self, leaves: bool) -> None:
        """`leaves`: whether the site was asked to leave. Otherwise the run stops."""
        super().__init__(leaves)
        self.leaves = leaves


class Donors:
    """Offers this rank's pieces to entering sites, at the ends of its slots."""

    def __init__(
        self,
        own: RankState,
        control: LeaseControl,
        client: ControlPlane,
        background: BackgroundQueue,
        form_group: FormGroup,
        pause: float,
    ) -> None:
        """Prepare to serve; nothing is offered before `serve` is called.

        `pause`: seconds without an offer after which a receiver is told to keep waiting.
        """
        self._own, self._control = own, control
        self._form_group = form_group
        self._pause = pause
        self._serving: dict[tuple[str, int, int, int], Donor] = {}
        self._copies: weakref.WeakValueDictionary[tuple[int, int, int, str], Snapshot]
        self._copies = weakref.WeakValueDictionary()
        """Copies that some donor still has, by piece, tick, last landing and codec."""
        self._shown = ShownPieces(own, control, client, background)

    @property
    def busy(self) -> bool:
        """Whether a site is waiting for pieces of this rank."""
        return any(not donor.done for donor in self._serving.values()) or bool(self._new())

    def _cancel_others(self) -> None:
        """Cancel the service of sites that have died, or that have another donor now."""
        mine = {_key(entry) for entry in self._mine()}
        for key, donor in self._serving.items():
            if key not in mine and donor.waiting and not donor.done:
                donor.cancel()

    def serve(self) -> None:
        """Offer every piece that can be taken over now. Called between slots."""
        own = self._own
        self._shown.tell()
        self._cancel_others()
        for entry in self._new():
            self._serving[_key(entry)] = self._start(entry)
        for entry in self._control.news.entering:
            donor = self._serving.get(_key(entry))
            if donor is None or donor.done or own.at.round < entry.from_round:
                continue
            for piece in sorted(donor.waiting):
                if not own.outer.under_way(piece, entry.from_round):
                    donor.offer(self._copy_of(piece))
        self._drop_ended()

    def _copy_of(self, piece: int) -> Snapshot:
        """Return a copy of a piece, which all sites that are served at this tick share.

        At the start of a run the founder serves all other sites at once. With a copy for each site
        the founder would need 8 bytes per parameter and site.
        """
        own = self._own
        state, tick, landed = own.rank.states[piece], own.at.tick, own.outer.landed[piece]
        version = (piece, tick, landed, state.warm_codec)
        found = self._copies.get(version)
        if found is None:
            copies = {name: t.detach().to("cpu", copy=True) for name, t in state.agreed().items()}
            found = Snapshot(piece, tick, copies, state.warm_codec, landed)
            self._copies[version] = found
        return found

    def _drop_ended(self) -> None:
        """Log services that failed, and drop ended services whose entries are over.

        The service of an entry that goes on is kept: `_new` would start the same service again.
        """
        entries = {_key(entry) for entry in self._control.news.entering}
        for key, donor in list(self._serving.items()):
            if not donor.done:
                continue
            if donor.failure:
                log.warning("could not serve %s: %s", key[0], donor.failure)
                donor.failure = None
            if key not in entries:
                del self._serving[key]

    def _mine(self) -> list[Entering]:
        me = self._own.site
        return [entry for entry in self._control.news.entering if entry.donor == me]

    def _new(self) -> list[Entering]:
        return [entry for entry in self._mine() if _key(entry) not in self._serving]

    def _start(self, entry: Entering) -> Donor:
        place = self._own.rank.place
        name = entry_name(entry, place.stage, place.shard)
        return Donor(
            lambda: self._form_group(name, place.site, entry.site),
            entry.site,
            len(self._own.rank.states),
            self._pause,
            lambda piece: self._own.rank.states[piece.piece].digest_of(piece.tensors),
        )


class JoiningSite:
    """Fetches this rank's pieces, and follows the rounds until a plan includes the site.

    The coordinator names another donor if the donor is lost, or gives a state that most sites do
    not hold. The missing pieces are then fetched from that donor.
    """

    def __init__(
        self,
        own: RankState,
        control: LeaseControl,
        client: ControlPlane,
        entry: Entering,
        form_group: FormGroup,
        patience: float,
        first: FirstState | None = None,
        published: PublishedState | None = None,
    ):
        """Start to fetch the pieces of `own` from the donor of `entry`, in a thread.

        Args:
            form_group: connects this rank to its donor.
            patience: seconds after a link broke within which another donor must be named.
            first: checks theta_0 of a run that starts. May be None: the run has already started.
            published: bundles from which the state may come. May be None: there are none.
        """
        self._first, self._rounded = first, False
        self._published = published
        self._own, self._control, self._client = own, control, client
        self._entry = entry
        self._form_group = form_group
        self._patience = patience
        self._arrived: list[Snapshot] = []
        self._lock = threading.Lock()
        self._error: DilocoxError | None = None
        self._broke_at = 0.0
        self._tries = 0
        self._fetched = -1
        """Number of the latest try whose transfers are complete."""
        self._checks = CheckedPieces(own, client)
        self._refused: set[str] = set()
        """Donors that gave a state that most sites do not hold."""
        self._unchecked = False
        """Whether the pieces are theta_0, which cannot be compared with other sites."""
        self._whole = False
        """Whether all pieces have arrived and the coordinator has been told so."""
        own.outer.status.expect(range(len(own.rank.states)))
        self._thread = self._fetch()

    def _fetch(self) -> threading.Thread:
        """Start a thread that fetches from the donor of the current entry, and return it."""
        own, entry = self._own, self._entry
        assert entry.donor is not None
        with self._lock:
            self._tries += 1
            self._error = None
        number, donor, place = self._tries, entry.donor, own.rank.place
        name = entry_name(entry, place.stage, place.shard)
        known = [digest_of(state.anchor.cpu()) for state in own.rank.states]
        here = set(range(len(known))) - own.outer.status.awaiting
        # Anchor, momentum, and the warm start Q, which is smaller than the anchor.
        limits = [3 * state.anchor.nbytes for state in own.rank.states]

        def run() -> None:
            try:
                same = fetch(
                    lambda: self._form_group(name, donor, place.site),
                    donor,
                    known,
                    limits,
                    lambda snapshot: self._take(number, snapshot),
                    here,
                    self._published,
                )
                if same:
                    log.info("%d pieces are those of %s, which sent the others", same, donor)
                self._is_through(number)
            except DilocoxError as error:
                with self._lock:
                    if number == self._tries:
                        self._error, self._broke_at = error, time.monotonic()

        thread = threading.Thread(target=run, name="entry", daemon=True)
        thread.start()
        return thread

    def _is_through(self, number: int) -> None:
        """Note that try `number` has fetched all pieces.

        When a run starts, all sites take theta_0 from the founder, so no site can confirm it.
        """
        starting = self._control.news.phase == "starting"
        with self._lock:
            if number != self._tries:
                return
            self._fetched = number
            self._whole = self._unchecked = starting
        if starting:
            self._client.ready()

    def catch_up(self) -> None:
        """Follow the rounds until the next plan includes this site. The anchor is then the run's.

        Raises `RunEndedError` if the run ends first, `EntryStopped` if the run stops or the site
        is asked to leave, and `TrainingError` if the pieces cannot be fetched.
        """
        own = self._own
        own.at.round = self._entry.from_round
        while True:
            # A resumed run has plans before its sites are back, and exchanges nothing until then.
            # The phase is read before the plan: a plan that is polled after the start is current.
            starting = self._control.news.phase == "starting"
            reply = self._client.poll_plan(own.at.round, 1.0 if self._checks.empty else PAUSE)
            plan = reply.plan
            self.adopt()
            if reply.leave:
                raise EntryStopped(leaves=True)
            if plan is None or starting:
                self._control.touch()
                if plan is None and self._control.news.stop_tick is not None:
                    self._stop()
                if starting:
                    self._control.hurry()
                    time.sleep(PAUSE)
                continue
            # The plan of the flush may name a site that was left behind after the plan was made.
            if plan.kind == "flush" and (own.site not in plan.members or reply.receive):
                raise RunEndedError(f"site {own.site}: the run ends before it has entered")
            self._reach(plan.first_tick)
            if plan.kind == "flush" or (own.site in plan.members and not reply.receive):
                break
            # The plan may have been made before this site was overtaken, and so still name it.
            others = {name: each for name, each in plan.members.items() if name != own.site}
            plan = plan.model_copy(update={"members": others})
            for slot in range(1, plan.slots + 1):
                self._reach(plan.first_tick + slot)
                own.outer.end_of_slot(plan, slot)
                self._control.touch()
                self.adopt()
            own.at.round += 1
        while own.outer.status.awaiting:
            self._control.touch()
            self._thread.join(0.05)
            self.adopt()
        # The caller may keep this object for the whole run. The replayed state is as large as
        # anchor and momentum, and nothing is fetched any more.
        self._published = None
        own.outer.reset_to_anchor()
        # Bytes and waits of catching up must not count in this site's first round, because plans
        # are made from a round's counts.
        own.outer.status.take_counts()
        own.rank.model.sync_tied(moments=own.config.shares_moments)

    def _reach(self, tick: int) -> None:
        """Wait until the lease lets training sites reach `tick`, then move this rank to `tick`.

        Raises `EntryStopped` if the run stops before `tick`.
        """
        while (news := self._control.news).lease < tick:
            if news.stop_tick is not None:
                self._stop()
            self._control.touch()
            self.adopt()
            time.sleep(GLANCE)
        self._own.at.tick = tick

    def _stop(self) -> None:
        """Handle a stop of the run before this site has trained; there is no checkpoint to write.

        Raises `EntryStopped` at an active site. A site that lacks pieces waits for the end of the
        run, which the control then raises as an error.
        """
        if self._control.news.role == "active":
            raise EntryStopped(leaves=False)
        self._control.touch()
        time.sleep(GLANCE)

    def adopt(self) -> None:
        """Adopt the pieces that have arrived and that most sites hold, or fetch from a new donor.

        Raises `TrainingError` if the transfer failed, and `OtherStartError` for a wrong theta_0.
        """
        with self._lock:
            arrived, self._arrived = self._arrived, []
            error, since = self._error, time.monotonic() - self._broke_at
            fetched, unchecked = self._fetched == self._tries, self._unchecked
            if self._control.news.phase == "starting" and not unchecked:
                # Whether pieces must be checked is only known when all of them have arrived.
                arrived, self._arrived = [], arrived
        for snapshot in arrived:
            # A piece of an earlier donor is kept: exchanges may have landed on it since.
            if snapshot.piece in self._own.outer.status.awaiting:
                (self._own.outer.adopt if unchecked else self._checks.add)(snapshot)
        self._take_confirmed(fetched)
        if fetched and self._checks.empty and not self._whole and error is None:
            self._whole = not self._own.outer.status.awaiting
            if self._whole:
                self._client.ready()
        if self._whole and error is None:
            return
        entry = self._next_entry()
        if entry is not None:
            donor, why = self._entry.donor, "is gone"
            if entry.donor == donor:
                why = "gave what the others have left behind"
            elif donor in self._refused:
                why = "is not believed"
            log.warning("%s %s: fetching from %s", donor, why, entry.donor)
            self._entry = entry
            self._checks.clear()
            self._thread = self._fetch()
        elif isinstance(error, OtherStartError):
            raise error
        elif error is not None and (not isinstance(error, ExchangeError) or since > self._patience):
            raise TrainingError(f"entering the run failed: {error}")

    def _take_confirmed(self, all_came: bool) -> None:
        """Adopt the pieces that most sites have confirmed, and refuse a donor that they contradict.

        Raises `TrainingError` if no other site can be the donor.
        """
        donor = self._entry.donor
        good, refused = self._checks.confirmed(self._entry, all_came)
        for snapshot in good:
            self._own.outer.adopt(snapshot)
        if refused is None:
            return
        log.warning("%s gave a state that most sites do not hold", donor)
        self._refused.add(str(donor))
        self._checks.clear()
        if refused.donor is None:
            raise TrainingError(
                f"entering the run failed: the state that {donor} gave is not the one that most "
                "sites hold, and no other site can give it; join again when more sites are there"
            )

    def _next_entry(self) -> Entering | None:
        """Return the new entry, if the coordinator named another donor or asked to fetch again.

        Otherwise returns None. While a run starts the answer is always None: pieces of a founder
        that died in the middle are useless, so the site starts again.
        """
        news = self._control.news
        if news.phase == "starting":
            self._patience = 0.0
            return None
        mine = self._entry
        for entry in news.entering:
            same = _key(entry)[:3] == _key(mine)[:3]
            if same and (entry.donor, entry.renewals) != (mine.donor, mine.renewals):
                return entry if entry.donor is not None else None
        return None

    def _take(self, number: int, snapshot: Snapshot) -> None:
        self._check_first(snapshot)
        with self._lock:
            if number == self._tries:
                self._arrived.append(snapshot)

    def _check_first(self, snapshot: Snapshot) -> None:
        """Check a piece of theta_0 against the run file, before this site reports to be ready.

        A rounding difference, as between processors, is reported once as a warning. Raises
        `OtherStartError` for any other difference.
        """
        if self._first is None:
            return
        own, state = self._own, self._own.rank.states[snapshot.piece]
        starting = self._control.news.phase == "starting"
        off = self._first.difference(snapshot, state.anchor, state.momentum, starting)
        if off and not self._rounded:
            self._rounded, text = True, self._first.rounding(off)
            log.warning("%s", text)
            if own.rank.place.leads:
                self._client.report(0, {"text": text}, kind="warning")
