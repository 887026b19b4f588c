"""Client of the coordinator: blocking calls over persistent, mutually authenticated TLS."""

from __future__ import annotations

import base64
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dilocox.coordinator.client.errors import CoordinatorError
from dilocox.coordinator.client.transport import Transport, pool_of_site
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import custody_messages as cm
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.calls import Call, Reply
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.verdicts import RankVote, VotePhase
from dilocox.errors import ExchangeError


class CoordinatorClient:
    """Typed calls to the coordinator for one rank, or for tools with the operator's identity.

    Thread-safe: every waiting thread has its own connection. Connection errors are retried with
    back-off for `timeouts.coordinator` seconds; then `CoordinatorUnreachableError` is raised.
    Every call may raise `SiteGoneError` (the coordinator declared this incarnation lost) and
    `CoordinatorError` (refused). All calls are idempotent. Create a client after a fork, not
    before.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        timeouts: Timeouts,
        rank: m.RankId | None = None,
        *,
        connections: int = 8,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a client; it connects with the first call.

        Args:
            url: `https://HOST:PORT` of the coordinator.
            identity: Proves which site calls.
            timeouts: Time limits of the run.
            rank: The rank that calls. May be None if only calls without a rank are made.
            connections: Largest number of idle connections that are kept.
            now: Monotonic clock, in seconds.
            sleep: Waits for a number of seconds.
        """
        self.url, self.identity, self.timeouts = url, identity, timeouts
        self._rank, self._now = rank, now
        self._transport = Transport(
            pool_of_site(url, identity, connections),
            request=timeouts.request,
            away=timeouts.coordinator,
            pause=timeouts.beat,
            compress=True,
            now=now,
            sleep=sleep,
        )

    @property
    def rank(self) -> m.RankId:
        """The rank that calls. Raises `CoordinatorError` if the client was made without a rank."""
        if self._rank is None:
            raise CoordinatorError("this client was made without a rank: give one to make the call")
        return self._rank

    def close(self) -> None:
        """Close all connections. Waiting calls in other threads raise `CoordinatorError`."""
        self._transport.close()

    def send(self, call: Call[Reply], limit: float | None = None) -> Reply:
        """Send a request and return the coordinator's reply.

        `limit`: seconds for one attempt, instead of `timeouts.request`.
        """
        return self._transport.send(call, limit)

    # --- membership -------------------------------------------------------------------------

    def ready(self) -> None:
        """Report that this rank of an entering site holds the full state."""
        self.send(m.ReadyRequest(rank=self.rank))

    def building(self) -> m.BeatReply:
        """Send a beat that says that the rank still builds its model and cannot take part yet."""
        request = m.BeatRequest(rank=self.rank, tick=0, round=0, slot=0, building=True)
        limit = self.timeouts.heartbeat / 2
        return self.send(request, limit)

    def beat(
        self, tick: int, round_: int, slot: int, slot_seconds: float | None = None
    ) -> m.BeatReply:
        """Send a heartbeat: this rank has finished `tick` slots. Returns lease and members.

        Call it every `timeouts.beat` seconds, and at once when the lease is used up.
        `slot_seconds` are the recent seconds per slot; None: not known.
        """
        request = m.BeatRequest(
            rank=self.rank, tick=tick, round=round_, slot=slot, slot_seconds=slot_seconds
        )
        # A lost packet must not make the site count as lost: retry well within the heartbeat.
        limit = self.timeouts.heartbeat / 2
        return self.send(request, limit)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Take the whole site out of the run at once. `failed`: an error is the reason."""
        request = m.LeaveRequest(rank=self.rank, reason=_line(reason), failed=failed)
        self.send(request)

    def retire(self, site: str, reason: str, *, now: bool = False) -> str:
        """Ask that a site leaves after its planned rounds, or at once if `now` is true.

        Returns one line about how it will leave. A site may ask this for itself, the operator for
        any site.
        """
        request = m.RetireRequest(site=site, reason=_line(reason), now=now)
        return self.send(request).text

    def change_standing(self, site: str, change: m.StandingChange) -> str:
        """Ban a site's name, lift the ban, or release the name from its key; for the operator.

        Returns one line about the consequences.
        """
        request = m.StandingRequest(site=site, change=change)
        return self.send(request).text

    def depart(self) -> None:
        """Report that this rank of a leaving site has finished all of its exchanges."""
        self.send(m.DepartRequest(rank=self.rank))

    def stop(self, reason: str) -> int:
        """Stop the run at the end of a slot and return its tick. A repeat returns the same tick."""
        return self.send(m.StopRequest(reason=_line(reason))).stop_tick

    def fail(self, reason: str) -> None:
        """End the run as failed, at all sites."""
        self.send(m.FailRequest(rank=self.rank, reason=_line(reason)))

    def finish(self, *, complete: bool = True) -> None:
        """Report that this rank is done; `complete` is false if it ended at a stop."""
        self.send(m.FinishRequest(rank=self.rank, complete=complete))

    # --- plans ------------------------------------------------------------------------------

    def plan(self, round_: int, *, limit: float | None = None) -> m.RoundPlan:
        """Wait for the plan of a round and return it.

        Raises `CoordinatorError` after `limit` seconds, with the reason for the wait. Without a
        `limit` it waits as long as the run lasts.
        """
        end = None if limit is None else self._now() + limit
        while True:
            left = self.timeouts.poll if end is None else max(0.0, end - self._now())
            reply = self.poll_plan(round_, min(left, self.timeouts.poll))
            if reply.plan is not None:
                return reply.plan
            if end is not None and self._now() >= end:
                raise CoordinatorError(
                    f"round {round_}: no plan after {limit:g} s; waited for {reply.waiting_for}"
                )

    def poll_plan(self, round_: int, wait: float = 0.0) -> m.PlanReply:
        """Ask for the plan of a round, and wait up to `wait` seconds (at most 20) for it.

        The reply says whether there is a plan, and otherwise what it waits for.
        """
        return self.send(m.PlanQuery(round_, wait))

    def round_done(self, round_: int, measured: m.Measured | None = None) -> None:
        """Report that this rank has finished the round and trained on its token ranges.

        `measured` holds the measurements of the whole site; only its leading rank gives them. Later
        plans depend on them.
        """
        request = m.RoundDoneRequest(rank=self.rank, round=round_, measured=measured)
        self.send(request)

    def show_pieces(self, pieces: Sequence[em.PieceDigest]) -> None:
        """Report the pieces that this rank of an active site holds, while another site enters."""
        for start in range(0, len(pieces), em.MOST):
            part = list(pieces[start : start + em.MOST])
            self.send(em.ShowPiecesRequest(rank=self.rank, pieces=part))

    def check_pieces(
        self, entry: m.Entering, pieces: Sequence[em.PieceDigest], all_came: bool
    ) -> em.CheckPiecesReply:
        """Ask whether pieces that this entering rank got from its donor equal those of most sites.

        Args:
            entry: This site's entry; its donor must not be None.
            pieces: At most `em.MOST` pieces.
            all_came: True if no piece is still being transferred.
        """
        assert entry.donor is not None
        request = em.CheckPiecesRequest(
            rank=self.rank, donor=entry.donor, pieces=list(pieces), renewals=entry.renewals,
            all_came=all_came,
        )  # fmt: skip
        return self.send(request)

    # --- exchange ---------------------------------------------------------------------------

    def begin(
        self, key: m.ExchangeKey, commitment: str | None = None, *, limit: float | None = None
    ) -> m.BeginReply:
        """Begin an exchange, wait for all voting ranks, and return its attempt and group.

        In a recorded run `commitment` is this rank's signed statement, and the call waits until all
        voting ranks have given theirs. Raises `ExchangeError` after `limit` seconds, with the names
        of the missing ranks. Without a `limit` it waits as long as the coordinator answers: a rank
        that is lost or too late is no longer waited for.
        """
        end = math.inf if limit is None else self._now() + limit
        while True:
            wait = min(self.timeouts.poll, max(0.0, end - self._now()))
            request = m.BeginRequest(key=key.text, rank=self.rank, commitment=commitment, wait=wait)
            reply = self.send(request)
            if not reply.waiting_for:
                return reply
            if self._now() >= end:
                raise ExchangeError(
                    f"exchange {key.text}: not all ranks began it after {limit:g} s; waited for "
                    f"{', '.join(reply.waiting_for[:8])}"
                )

    def attempt(self, key: m.ExchangeKey) -> int:
        """Return the current attempt of an exchange, without waiting for other ranks."""
        request = m.BeginRequest(key=key.text, rank=self.rank)
        return self.send(request).attempt

    def vote(
        self,
        key: m.ExchangeKey,
        attempt: int,
        vote: RankVote,
        *,
        limit: float | None = None,
    ) -> m.VoteReply:
        """Vote, wait for the decision ("commit", "average", "fetch" or "repeat") and return it.

        The call waits as `begin` does. Raises `ExchangeError` after `limit` seconds, with the names
        of the missing ranks. Time in which all have voted but are fewer than `outer.min_sites`
        sites does not count.
        """
        fields = {
            "phase": vote.phase,
            "held": list(vote.held),
            "contributes": vote.contributes,
            "digests": dict(vote.digests),
            "statement": vote.statement,
            "opinions": dict(vote.opinions),
        }
        return self._vote(key, attempt, fields, limit)

    def observe(
        self,
        key: m.ExchangeKey,
        attempt: int,
        *,
        phase: VotePhase = "held",
        limit: float | None = None,
    ) -> m.VoteReply:
        """Wait for the decision and return it as `vote` does, for an entering rank (no vote)."""
        return self._vote(key, attempt, {"phase": phase, "observer": True}, limit)

    def report_broken(
        self, key: m.ExchangeKey, attempt: int, failed: Sequence[str] = ()
    ) -> m.VoteReply:
        """Report that this rank cannot complete the attempt.

        `failed` names the sites whose link broke, if known. Returns "repeat", or an earlier
        decision.
        """
        return self._vote(key, attempt, {"broken": True, "failed": list(failed)}, None)

    def _vote(
        self, key: m.ExchangeKey, attempt: int, fields: dict[str, Any], limit: float | None
    ) -> m.VoteReply:
        end = math.inf if limit is None else self._now() + limit
        while True:
            wait = min(self.timeouts.poll, max(0.0, end - self._now()))
            request = m.VoteRequest(
                key=key.text, rank=self.rank, attempt=attempt, wait=wait, **fields
            )
            reply = self.send(request)
            if reply.decision != "wait":
                return reply
            if not reply.waiting_for and not request.observer and limit is not None:
                # All present sites have voted but are fewer than `min_sites`; this may take long.
                end = self._now() + limit
            elif self._now() >= end:
                missing = ", ".join(reply.waiting_for[:8]) or "enough live sites"
                raise ExchangeError(
                    f"exchange {key.text} attempt {attempt}: no decision after {limit:g} s; "
                    f"waited for {missing}"
                )

    # --- checkpoints, reports, display ------------------------------------------------------

    def checkpoint(self, tick: int, round_: int, slot: int, digests: Mapping[str, str]) -> None:
        """Report that this rank's part of a checkpoint is on disk.

        `slot` is the number of finished slots of the round; `digests` are SHA-256 by file name.
        """
        request = m.CheckpointRequest(
            rank=self.rank, tick=tick, round=round_, slot=slot, digests=dict(digests)
        )
        self.send(request)

    def spoiled(self, tick: int, reason: str) -> None:
        """Report that this rank's part of the checkpoint at `tick` is damaged.

        The run then resumes from an earlier checkpoint, and the sites have to join again.
        """
        request = m.SpoiledRequest(rank=self.rank, tick=tick, reason=_line(reason))
        self.send(request)

    def record_state(self, statement: str) -> None:
        """Submit this rank's signed statement of its model state, in a recorded run."""
        self.send(m.StateRequest(rank=self.rank, statement=statement))

    def custody(self, statement: str | None, asked: Sequence[str]) -> dict[str, str]:
        """Submit this rank's signed custody of its pieces; None: only ask.

        Returns the certified root by exchange, for those in `asked` that have a certificate.
        """
        request = cm.CustodyRequest(rank=self.rank, statement=statement, asked=list(asked))
        return self.send(request).certified

    def hand_in(self, statement: str | None = None) -> am.HandInReply:
        """Submit an auditor's signed verdict for the record. The reply says in whose name.

        If `statement` is None, nothing is submitted, and the reply says whose name it would be.
        """
        return self.send(am.HandInRequest(statement=statement))

    def checkpoints(self) -> list[m.Checkpoint]:
        """Return all checkpoints in order of tick, also incomplete ones.

        Checkpoints that a resume has superseded are left out.
        """
        return self.send(m.CheckpointsQuery()).checkpoints

    def report(self, round_: int, metrics: Mapping[str, Any], kind: m.ReportKind = "round") -> bool:
        """Report metrics (JSON values) of this site's round.

        Returns whether the report is in the run's metrics.
        """
        request = m.ReportRequest(rank=self.rank, round=round_, kind=kind, metrics=dict(metrics))
        return self.send(request).kept

    def status(self, since: int = 0, wait: float = 0.0) -> m.Status:
        """Return the run's status; wait up to `wait` seconds for a change after number `since`."""
        wait = min(wait, self.timeouts.poll)
        return self.send(m.StatusQuery(since, wait))

    def ledger(self) -> m.Ledger:
        """Return the ledger of token ranges."""
        return self.send(m.LedgerQuery())

    # --- key-value store --------------------------------------------------------------------

    def kv_set(self, key: str, value: bytes) -> None:
        """Set a key to a value of up to 64 KiB. `StoreSetRequest` says which keys are allowed."""
        text = base64.b64encode(value).decode()
        self.send(m.StoreSetRequest(key=key, value=text))

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """Wait until all keys exist and return their values.

        Raises `ExchangeError` after `limit` seconds, with the names of the missing keys.
        """
        end = self._now() + limit
        while True:
            wait = min(self.timeouts.poll, max(0.0, end - self._now()))
            request = m.StoreGetRequest(keys=list(keys), wait=wait)
            reply = self.send(request)
            if not reply.missing:
                return {key: base64.b64decode(value) for key, value in reply.values.items()}
            if self._now() >= end:
                raise ExchangeError(
                    f"rendezvous: {', '.join(reply.missing[:8])} not set after {limit:g} s; "
                    "the rank that sets it is late or gone"
                )

    def kv_add(self, key: str, amount: int) -> int:
        """Add to the decimal number of a key and return the sum; an absent key counts as 0."""
        request = m.StoreAddRequest(key=key, amount=amount, nonce=secrets.token_hex(8))
        return self.send(request).value

    def kv_check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self.send(m.StoreCheckRequest(keys=list(keys))).present

    def kv_delete(self, key: str) -> bool:
        """Delete a key. Returns whether it existed."""
        return self.send(m.StoreDeleteRequest(key=key)).deleted


def _line(text: str) -> str:
    """Return `text` as one line of at most 500 characters, the coordinator's limit."""
    return " ".join(text.split())[:500]
