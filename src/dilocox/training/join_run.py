"""How a site takes up its place: theta_0 at the start, a running site's state later.

The founder has made theta_0 itself. Every other site that enters fetches its pieces from a
donor in a thread, and until a plan counts it in it follows the rounds without inner steps:
receiving what the others exchange, and landing it on what it has fetched. It goes no further than
the lease lets those who train, and so is where they are when its own rounds begin. A site that was
overtaken enters in the same way, but keeps its inner state, and its residual with all that it has
trained.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import DilocoxError, ExchangeError, RunEndedError, TrainingError
from dilocox.outer.first_state import FirstState, OtherStartError
from dilocox.outer.in_flight import Counts
from dilocox.outer.snapshot import Snapshot
from dilocox.training.anchor_digests import CheckedPieces, ShownPieces
from dilocox.training.rank_state import RankState
from dilocox.transport.groups import PeerGroup
from dilocox.transport.state_transfer import Donor, digest_of, fetch
from dilocox.utils.background import BackgroundQueue

log = logging.getLogger(__name__)

PAUSE = 0.5
"""Seconds between two looks whether a run that starts has started."""
GLANCE = 0.05
"""Seconds between two looks whether the lease goes on."""

FormGroup = Callable[[str, str, str], PeerGroup]
"""(name, donor, receiver) -> the group of these two ranks."""


def entry_name(entry: Entering, stage: int, shard: int) -> str:
    """Rendezvous name of one entering rank and its donor. A site may enter more than once, have
    more than one donor, and fetch from one more than once."""
    who = f"{entry.site}/{entry.incarnation}/{entry.from_round}/{entry.renewals}"
    return f"run/entry/{who}/{entry.donor}/{stage}/{shard}"


def _key(entry: Entering) -> tuple[str, int, int, int]:
    """Of one service of a donor."""
    return entry.site, entry.incarnation, entry.from_round, entry.renewals


class EntryStopped(Exception):  # noqa: N818 - not an error: the site was asked not to go on
    """This site goes before it has trained a round since it entered."""

    def __init__(self, leaves: bool) -> None:
        """`leaves`: the site was asked to leave; else the run stops."""
        super().__init__(leaves)
        self.leaves = leaves


class Donors:
    """What this rank gives to entering sites, at its slot ends."""

    def __init__(
        self,
        own: RankState,
        control: RankControl,
        client: CoordinatorClient,
        background: BackgroundQueue,
        form_group: FormGroup,
        pause: float,
    ) -> None:
        """`pause`: seconds without an offer after which a receiver is told to go on waiting."""
        self._own, self._control = own, control
        self._form_group = form_group
        self._pause = pause
        self._serving: dict[tuple[str, int, int, int], Donor] = {}
        self._shown = ShownPieces(own, control, client, background)

    @property
    def busy(self) -> bool:
        """True while a site is waiting for pieces of this rank."""
        return any(not donor.done for donor in self._serving.values()) or bool(self._new())

    def _cancel_others(self) -> None:
        """End the service of sites that have died, or have another donor now."""
        mine = {_key(entry) for entry in self._mine()}
        for key, donor in self._serving.items():
            if key not in mine and donor.waiting and not donor.done:
                donor.cancel()

    def serve(self) -> None:
        """Offer every piece that may be taken over now; called between slots."""
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
                    state = own.rank.states[piece]
                    copies = {
                        name: t.detach().to("cpu", copy=True) for name, t in state.agreed().items()
                    }
                    landed = own.outer.landed[piece]
                    donor.offer(Snapshot(piece, own.at.tick, copies, state.warm_codec, landed))
        for key, donor in list(self._serving.items()):
            if donor.done and donor.failure:
                log.warning("could not serve %s: %s", key[0], donor.failure)
                donor.failure = None

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
        )


class JoiningSite:
    """Fetches this rank's pieces and follows the rounds until the site is counted in.

    If its donor goes, or gives a state that most sites do not hold, it fetches what is missing from
    the one that the coordinator names then; a link that broke is given `patience` seconds for that.
    """

    def __init__(
        self,
        own: RankState,
        control: RankControl,
        client: CoordinatorClient,
        entry: Entering,
        form_group: FormGroup,
        patience: float,
        first: FirstState | None = None,
    ):
        """`first`: judges theta_0, of a run that begins; None for a run that has begun."""
        self._first, self._rounded = first, False
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
        """The latest try that is through with its transfers."""
        self._checks = CheckedPieces(own, client)
        self._refused: set[str] = set()
        """Donors that gave a state that most sites do not hold."""
        self._unchecked = False
        """The state is that of the start."""
        self._whole = False
        """All pieces have come, and the coordinator knows."""
        own.outer.awaiting = set(range(len(own.rank.states)))
        self._thread = self._fetch()

    def _fetch(self) -> threading.Thread:
        """Begin to fetch from the donor of the present entry, in a thread."""
        own, entry = self._own, self._entry
        assert entry.donor is not None
        with self._lock:
            self._tries += 1
            self._error = None
        number, donor, place = self._tries, entry.donor, own.rank.place
        name = entry_name(entry, place.stage, place.shard)
        known = [digest_of(state.anchor.cpu()) for state in own.rank.states]
        here = set(range(len(known))) - own.outer.awaiting
        # Anchor, momentum, and Q, which is smaller than what it stands for.
        limits = [3 * state.anchor.nbytes for state in own.rank.states]

        def run() -> None:
            try:
                fetch(
                    lambda: self._form_group(name, donor, place.site),
                    donor,
                    known,
                    limits,
                    lambda snapshot: self._take(number, snapshot),
                    here,
                )
                self._is_through(number)
            except DilocoxError as error:
                with self._lock:
                    if number == self._tries:
                        self._error, self._broke_at = error, time.monotonic()

        thread = threading.Thread(target=run, name="entry", daemon=True)
        thread.start()
        return thread

    def _is_through(self, number: int) -> None:
        """Try `number` has all pieces. At the start all take theta_0 from the founder, so there is
        nobody to compare it with."""
        starting = self._control.news.phase == "starting"
        with self._lock:
            if number != self._tries:
                return
            self._fetched = number
            self._whole = self._unchecked = starting
        if starting:
            self._client.ready()

    def catch_up(self) -> None:
        """Return when the next plan counts this site in; the anchor is then the run's.

        Raises `RunEndedError` if the run ends before, `EntryStopped` if the run stops or the site
        is to leave.
        """
        own = self._own
        own.at.round = self._entry.from_round
        while True:
            # A resumed run has plans before its sites are back, and exchanges nothing until then.
            # To be asked first: what is answered from then on is of a run that has started.
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
            # The flush may name a site that was left behind since it was planned.
            if plan.kind == "flush" and (own.site not in plan.members or reply.receive):
                raise RunEndedError(f"site {own.site}: the run ends before it has entered")
            self._reach(plan.first_tick)
            if plan.kind == "flush" or (own.site in plan.members and not reply.receive):
                break
            # A plan may be older than the news that this site was overtaken.
            others = {name: each for name, each in plan.members.items() if name != own.site}
            plan = plan.model_copy(update={"members": others})
            for slot in range(1, plan.slots + 1):
                self._reach(plan.first_tick + slot)
                own.outer.end_of_slot(plan, slot)
                self._control.touch()
                self.adopt()
            own.at.round += 1
        while own.outer.awaiting:
            self._control.touch()
            self._thread.join(0.05)
            self.adopt()
        own.outer.reset_to_anchor()
        # What was received and waited for on the way is no part of this site's first round: plans
        # are made from that.
        own.outer.counts = Counts()
        own.rank.model.sync_tied(moments=own.config.shares_moments)

    def _reach(self, tick: int) -> None:
        """Stand at `tick` when those who train may have got there. Raises `EntryStopped` if
        they never do."""
        while (news := self._control.news).lease < tick:
            if news.stop_tick is not None:
                self._stop()
            self._control.touch()
            self.adopt()
            time.sleep(GLANCE)
        self._own.at.tick = tick

    def _stop(self) -> None:
        """The run stops before this site has trained: it has no checkpoint to write. Raises
        `EntryStopped`; of a site that has not got all pieces, in the end, that the run is over."""
        if self._control.news.role == "active":
            raise EntryStopped(leaves=False)
        self._control.touch()
        time.sleep(GLANCE)

    def adopt(self) -> None:
        """Take over what has arrived and most sites hold. Raises what ended the transfer."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            error, since = self._error, time.monotonic() - self._broke_at
            fetched, unchecked = self._fetched == self._tries, self._unchecked
            if self._control.news.phase == "starting" and not unchecked:
                # Whether it has to be checked is known when all has come.
                arrived, self._arrived = [], arrived
        for snapshot in arrived:
            # Of two donors the first counts: what has landed since on its piece is not undone.
            if snapshot.piece in self._own.outer.awaiting:
                (self._own.outer.adopt if unchecked else self._checks.add)(snapshot)
        self._take_confirmed(fetched)
        if fetched and self._checks.empty and not self._whole and error is None:
            self._whole = not self._own.outer.awaiting
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
        """Raises `TrainingError` if no donor is left that gives what most sites hold."""
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
        """By what this site fetches on, if the coordinator has named another donor, or has told it
        to fetch again.

        While a run starts there is none: what came from a founder that died in the middle is of no
        use to anyone, and the site begins anew.
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
        """Raise `OtherStartError` for a theta_0 that is not what the run file says, before this
        site says that it is ready. A difference as between processors is told once."""
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
