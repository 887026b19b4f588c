"""How a site takes up its place: theta_0 at the start, a running site's state later.

The founder has made theta_0 itself. Every other site that enters fetches its fragments from a
donor in a thread, and until a plan counts it in it follows the rounds without inner steps:
receiving what the others exchange, and landing it on what it has fetched. A site that was overtaken
enters in the same way, but keeps its inner state, and its residual with all that it has trained.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dilocox.errors import DilocoxError, TrainingError
from dilocox.outer.coordinator.messages import Entering
from dilocox.outer.entry import Donor, Snapshot, digest_of, fetch
from dilocox.outer.groups import PeerGroup

if TYPE_CHECKING:
    from dilocox.trainer import Trainer

log = logging.getLogger(__name__)

FormGroup = Callable[[str, str, str], PeerGroup]
"""(name, donor, receiver) -> the group of these two ranks."""


def entry_name(entry: Entering, stage: int, shard: int) -> str:
    """Rendezvous name of one entering rank and its donor. A site may enter more than once."""
    return f"run/entry/{entry.site}/{entry.incarnation}/{entry.from_round}/{stage}/{shard}"


def _key(entry: Entering) -> tuple[str, int, int]:
    return entry.site, entry.incarnation, entry.from_round


class Donors:
    """What this rank gives to entering sites, at its slot ends."""

    def __init__(self, trainer: Trainer, form_group: FormGroup, timeout: float) -> None:
        self._trainer = trainer
        self._form_group = form_group
        self._timeout = timeout
        self._serving: dict[tuple[str, int, int], Donor] = {}

    @property
    def busy(self) -> bool:
        """True while a site is waiting for fragments of this rank."""
        return any(not donor.done for donor in self._serving.values()) or bool(self._new())

    def serve(self) -> None:
        """Offer every fragment that may be taken over now; called between slots."""
        trainer = self._trainer
        for entry in self._new():
            self._serving[_key(entry)] = self._start(entry)
        for entry in trainer.control.news.entering:
            donor = self._serving.get(_key(entry))
            if donor is None or donor.done or trainer.at.round < entry.from_round:
                continue
            for fragment in sorted(donor.waiting):
                if not trainer.outer.under_way(fragment, entry.from_round):
                    state = trainer.rank.states[fragment]
                    copies = {name: t.detach().cpu().clone() for name, t in state.agreed().items()}
                    donor.offer(Snapshot(fragment, trainer.at.tick, copies, state.warm_codec))
        for key, donor in list(self._serving.items()):
            if donor.done and donor.failure:
                log.warning("could not serve %s: %s", key[0], donor.failure)
                donor.failure = None

    def _new(self) -> list[Entering]:
        me = self._trainer.rank.place.site
        return [
            entry
            for entry in self._trainer.control.news.entering
            if entry.donor == me and _key(entry) not in self._serving
        ]

    def _start(self, entry: Entering) -> Donor:
        place = self._trainer.rank.place
        name = entry_name(entry, place.stage, place.shard)
        return Donor(
            lambda: self._form_group(name, place.site, entry.site),
            entry.site,
            len(self._trainer.rank.states),
            self._timeout,
        )


class Newcomer:
    """Fetches this rank's fragments and follows the rounds until the site is counted in."""

    def __init__(self, trainer: Trainer, entry: Entering, form_group: FormGroup, timeout: float):
        assert entry.donor is not None
        self._trainer = trainer
        self._entry = entry
        self._arrived: list[Snapshot] = []
        self._lock = threading.Lock()
        self._error: DilocoxError | None = None
        trainer.outer.awaiting = set(range(len(trainer.rank.states)))
        place = trainer.rank.place
        name = entry_name(entry, place.stage, place.shard)
        donor = entry.donor
        known = [digest_of(state.anchor.cpu()) for state in trainer.rank.states]
        # Anchor, momentum, and Q, which is smaller than what it stands for.
        limits = [3 * state.anchor.nbytes for state in trainer.rank.states]

        def run() -> None:
            try:
                fetch(
                    lambda: form_group(name, donor, place.site),
                    donor,
                    known,
                    limits,
                    self._take,
                    timeout,
                )
                trainer.client.ready()
            except DilocoxError as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="entry", daemon=True)
        self._thread.start()

    def follow(self) -> None:
        """Return when the next plan counts this site in; the anchor is then the run's."""
        trainer = self._trainer
        trainer.at.round = self._entry.from_round
        while True:
            reply = trainer.client.poll_plan(trainer.at.round, 1.0)
            plan = reply.plan
            self.adopt()
            if plan is None:
                trainer.control.touch()
                continue
            trainer.at.tick = plan.first_tick
            if plan.kind == "flush" or (trainer.me in plan.members and not reply.receive):
                break
            # A plan may be older than the news that this site was overtaken.
            others = {site: own for site, own in plan.members.items() if site != trainer.me}
            plan = plan.model_copy(update={"members": others})
            for slot in range(1, plan.slots + 1):
                trainer.outer.end_of_slot(plan, slot)
                trainer.at.tick = plan.first_tick + slot
                trainer.control.touch()
                self.adopt()
            trainer.at.round += 1
        while trainer.outer.awaiting:
            self._thread.join(0.05)
            self.adopt()
        trainer.outer.reset_to_anchor()
        trainer.rank.model.sync_tied()

    def adopt(self) -> None:
        """Take over what has arrived. Raises what ended the transfer."""
        if self._error is not None:
            raise TrainingError(f"entering the run failed: {self._error}")
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for snapshot in arrived:
            self._trainer.outer.adopt(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._arrived.append(snapshot)
