"""The ranks' side of the control plane: blocking calls over kept-alive, mutually proven TLS."""

from __future__ import annotations

import base64
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dilocox.coordinator.client.errors import CoordinatorError
from dilocox.coordinator.client.transport import Reply, Transport, pool_of_site
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.verdicts import RankOpinion, VotePhase
from dilocox.errors import ExchangeError


class CoordinatorClient:
    """Typed calls to the coordinator for one rank (or, with the operator's identity, for tools).

    Thread-safe: every thread that waits has a connection of its own. Connection errors are
    retried with back-off for `timeouts.coordinator` seconds, then `CoordinatorUnreachableError` is
    raised. Every call may raise `SiteGoneError` (this incarnation was declared gone) and
    `CoordinatorError` (refused). All calls may be repeated without harm. Make one after a fork,
    not before.
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
        """`url` is `https://HOST:PORT`. `rank` may be none for calls that name no rank."""
        self.url, self.identity, self.timeouts = url, identity, timeouts
        self._rank, self._now = rank, now
        self._transport = Transport(
            pool_of_site(url, identity, connections),
            request=timeouts.request,
            away=timeouts.coordinator,
            pause=timeouts.beat,
            now=now,
            sleep=sleep,
        )

    @property
    def rank(self) -> m.RankId:
        """The rank that speaks. Raises `CoordinatorError` if the client was made without one."""
        if self._rank is None:
            raise CoordinatorError("this client was made without a rank: give one to make the call")
        return self._rank

    def close(self) -> None:
        """End waits in other threads (they raise `CoordinatorError`) and drop all connections."""
        self._transport.close()

    # --- membership -------------------------------------------------------------------------

    def ready(self) -> None:
        """This rank of an entering site holds the full state."""
        self._post("ready", m.ReadyRequest(rank=self.rank), m.Done)

    def building(self) -> m.BeatReply:
        """Say that this rank is alive, and not there yet: its model takes long to be built."""
        request = m.BeatRequest(rank=self.rank, tick=0, round=0, slot=0, building=True)
        limit = self.timeouts.heartbeat / 2
        return self._transport.call("POST", "beat", request, m.BeatReply, limit=limit)

    def beat(
        self, tick: int, round_: int, slot: int, slot_seconds: float | None = None
    ) -> m.BeatReply:
        """Say that this rank is alive and has finished `tick` slots; learn lease and members.

        To be called every `timeouts.beat` seconds, and at once when the lease is used up.
        """
        request = m.BeatRequest(
            rank=self.rank, tick=tick, round=round_, slot=slot, slot_seconds=slot_seconds
        )
        # A lost packet must not cost the site its life: try again well within the heartbeat.
        limit = self.timeouts.heartbeat / 2
        return self._transport.call("POST", "beat", request, m.BeatReply, limit=limit)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Take the whole site out of the run, at once."""
        request = m.LeaveRequest(rank=self.rank, reason=_line(reason), failed=failed)
        self._post("leave", request, m.Done)

    def retire(self, site: str, reason: str, *, now: bool = False) -> str:
        """Have a site finish the rounds that are planned for it and go, or go `now`.

        One line on what becomes of it. A site may ask for itself, the operator for any.
        """
        request = m.RetireRequest(site=site, reason=_line(reason), now=now)
        return self._post("retire", request, m.RetireReply).text

    def change_standing(self, site: str, change: m.StandingChange) -> str:
        """Ban a name, take that back, or free it of its key: one line on what becomes of it. For
        the operator."""
        request = m.StandingRequest(site=site, change=change)
        return self._post("standing", request, m.RetireReply).text

    def depart(self) -> None:
        """This rank of a leaving site owes the run nothing any more."""
        self._post("depart", m.DepartRequest(rank=self.rank), m.Done)

    def stop(self, reason: str) -> int:
        """Stop the run at a slot end; the tick of it. Again gives the same tick."""
        return self._post("stop", m.StopRequest(reason=_line(reason)), m.StopReply).stop_tick

    def fail(self, reason: str) -> None:
        """The run cannot go on: every site is told so."""
        self._post("fail", m.FailRequest(rank=self.rank, reason=_line(reason)), m.Done)

    def finish(self, *, complete: bool = True) -> None:
        """This rank is done; `complete` is false when it ended at a stop."""
        self._post("finish", m.FinishRequest(rank=self.rank, complete=complete), m.Done)

    # --- plans ------------------------------------------------------------------------------

    def plan(self, round_: int, *, limit: float | None = None) -> m.RoundPlan:
        """The plan of a round; waits for it, for as long as the run lasts if `limit` is none.

        Raises `CoordinatorError` after `limit` seconds, naming what was waited for.
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
        """The plan of a round if it can be issued within `wait` seconds (up to 20)."""
        return self._get(f"plan/{round_}?wait={wait:.3f}", m.PlanReply, wait)

    def round_done(self, round_: int, measured: m.Measured | None = None) -> None:
        """This rank is through with the round: its token ranges are trained on.

        `measured`: of the whole site, from its leading rank; plans to come depend on it.
        """
        request = m.RoundDoneRequest(rank=self.rank, round=round_, measured=measured)
        self._post("round_done", request, m.Done)

    def show_pieces(self, pieces: Sequence[em.PieceDigest]) -> None:
        """While a site enters: what this rank of an active site holds."""
        for start in range(0, len(pieces), em.MOST):
            part = list(pieces[start : start + em.MOST])
            self._post("pieces/show", em.ShowPiecesRequest(rank=self.rank, pieces=part), m.Done)

    def check_pieces(
        self, entry: m.Entering, pieces: Sequence[em.PieceDigest], all_came: bool
    ) -> em.CheckPiecesReply:
        """Whether most sites hold what the donor of `entry` has given to this entering rank:
        `em.MOST` pieces at most. `all_came`: it gives nothing more."""
        assert entry.donor is not None
        request = em.CheckPiecesRequest(
            rank=self.rank, donor=entry.donor, pieces=list(pieces), renewals=entry.renewals,
            all_came=all_came,
        )  # fmt: skip
        return self._post("pieces/check", request, em.CheckPiecesReply)

    # --- exchange ---------------------------------------------------------------------------

    def begin(
        self, key: m.ExchangeKey, commitment: str | None = None, *, limit: float | None = None
    ) -> m.BeginReply:
        """Attempt and group of an exchange, once all who vote are there for it; with a signed
        `commitment` once all have given theirs.

        Without a `limit` in seconds it waits for as long as the coordinator answers: who lets the
        others wait for too long, or dies, votes no more. Raises `ExchangeError` after `limit`,
        naming the ranks that were waited for.
        """
        end = math.inf if limit is None else self._now() + limit
        while True:
            wait = min(self.timeouts.poll, max(0.0, end - self._now()))
            request = m.BeginRequest(key=key.text, rank=self.rank, commitment=commitment, wait=wait)
            reply = self._post("exchange/begin", request, m.BeginReply, wait)
            if not reply.waiting_for:
                return reply
            if self._now() >= end:
                raise ExchangeError(
                    f"exchange {key.text}: not all are there for it after {limit:g} s; waited for "
                    f"{', '.join(reply.waiting_for[:8])}"
                )

    def attempt(self, key: m.ExchangeKey) -> int:
        """The attempt that an exchange is at; waits for nobody."""
        request = m.BeginRequest(key=key.text, rank=self.rank)
        return self._post("exchange/begin", request, m.BeginReply).attempt

    def vote(
        self,
        key: m.ExchangeKey,
        attempt: int,
        *,
        held: Sequence[str] = (),
        contributes: bool = True,
        phase: VotePhase = "held",
        digests: Mapping[str, str] | None = None,
        statement: str | None = None,
        opinions: Mapping[str, RankOpinion] | None = None,
        limit: float | None = None,
    ) -> m.VoteReply:
        """Vote and wait for the decision: "commit", "average", "fetch" or "repeat".

        It waits as `begin` does. Raises `ExchangeError` after `limit` seconds, if there is one,
        naming the ranks that were waited for; time in which all have voted and are fewer than
        `min_sites` does not count.
        """
        fields = {
            "phase": phase,
            "held": list(held),
            "contributes": contributes,
            "digests": dict(digests or {}),
            "statement": statement,
            "opinions": dict(opinions or {}),
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
        """What `vote` returns, for an entering rank: waits without a vote of its own."""
        return self._vote(key, attempt, {"phase": phase, "observer": True}, limit)

    def report_broken(
        self, key: m.ExchangeKey, attempt: int, failed: Sequence[str] = ()
    ) -> m.VoteReply:
        """The attempt cannot be completed here; `failed` are sites whose link broke, if known.

        The reply is "repeat", or the decision if there was one already.
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
            reply = self._post("exchange/vote", request, m.VoteReply, wait)
            if reply.decision != "wait":
                return reply
            if not reply.waiting_for and not request.observer and limit is not None:
                # All who are there have voted, and they are fewer than `min_sites`: that may last.
                end = self._now() + limit
            elif self._now() >= end:
                missing = ", ".join(reply.waiting_for[:8]) or "enough live sites"
                raise ExchangeError(
                    f"exchange {key.text} attempt {attempt}: no decision after {limit:g} s; "
                    f"waited for {missing}"
                )

    # --- checkpoints, reports, display ------------------------------------------------------

    def checkpoint(self, tick: int, round_: int, slot: int, digests: Mapping[str, str]) -> None:
        """This rank's part of the checkpoint at `tick` is on disk; SHA-256 by file name."""
        request = m.CheckpointRequest(
            rank=self.rank, tick=tick, round=round_, slot=slot, digests=dict(digests)
        )
        self._post("checkpoint", request, m.Done)

    def spoiled(self, tick: int, reason: str) -> None:
        """This rank's part of the checkpoint at `tick` is damaged: the run goes on from the one
        before, and the sites have to join again."""
        request = m.SpoiledRequest(rank=self.rank, tick=tick, reason=_line(reason))
        self._post("spoiled", request, m.Done)

    def record_state(self, statement: str) -> None:
        """What model state this rank holds, signed; for a run that is recorded."""
        self._post("state", m.StateRequest(rank=self.rank, statement=statement), m.Done)

    def hand_in(self, statement: str | None = None) -> am.HandInReply:
        """Give an auditor's signed statement of a verdict to the run's record; by whom it is."""
        return self._post("verdict", am.HandInRequest(statement=statement), am.HandInReply)

    def checkpoints(self) -> list[m.Checkpoint]:
        """All checkpoints of this course of the run, complete or not, by tick."""
        return self._get("checkpoints", m.Checkpoints).checkpoints

    def report(self, round_: int, metrics: Mapping[str, Any], kind: m.ReportKind = "round") -> None:
        """Metrics (JSON values) of this site's round."""
        request = m.ReportRequest(rank=self.rank, round=round_, kind=kind, metrics=dict(metrics))
        self._post("report", request, m.Done)

    def status(self, since: int = 0, wait: float = 0.0) -> m.Status:
        """The run in one picture; waits up to `wait` seconds for something after `since`."""
        wait = min(wait, self.timeouts.poll)
        return self._get(f"status?since={since}&wait={wait:.3f}", m.Status, wait)

    def ledger(self) -> m.Ledger:
        """Token ranges: who was given which, and what became of them."""
        return self._get("ledger", m.Ledger)

    # --- key-value store --------------------------------------------------------------------

    def kv_set(self, key: str, value: bytes) -> None:
        """Set a key (see `StoreSetRequest` for names); values up to 64 KiB."""
        text = base64.b64encode(value).decode()
        self._post("kv/set", m.StoreSetRequest(key=key, value=text), m.Done)

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """Values of all keys. Raises `ExchangeError` naming the missing ones after `limit` s."""
        end = self._now() + limit
        while True:
            wait = min(self.timeouts.poll, max(0.0, end - self._now()))
            request = m.StoreGetRequest(keys=list(keys), wait=wait)
            reply = self._post("kv/get", request, m.StoreGetReply, wait)
            if not reply.missing:
                return {key: base64.b64decode(value) for key, value in reply.values.items()}
            if self._now() >= end:
                raise ExchangeError(
                    f"rendezvous: {', '.join(reply.missing[:8])} not set after {limit:g} s; "
                    "the rank that sets it is late or gone"
                )

    def kv_add(self, key: str, amount: int) -> int:
        """Add to a decimal number (absent: 0); the sum."""
        request = m.StoreAddRequest(key=key, amount=amount, nonce=secrets.token_hex(8))
        return self._post("kv/add", request, m.StoreAddReply).value

    def kv_check(self, keys: Sequence[str]) -> bool:
        """Are all keys set?"""
        return self._post(
            "kv/check", m.StoreCheckRequest(keys=list(keys)), m.StoreCheckReply
        ).present

    def kv_delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._post("kv/delete", m.StoreDeleteRequest(key=key), m.StoreDeleteReply).deleted

    # --- transport --------------------------------------------------------------------------

    def _post(self, name: str, request: Message, reply: type[Reply], wait: float = 0.0) -> Reply:
        return self._transport.call("POST", name, request, reply, wait)

    def _get(self, name: str, reply: type[Reply], wait: float = 0.0) -> Reply:
        return self._transport.call("GET", name, None, reply, wait)


def _line(text: str) -> str:
    """One line of at most 500 characters, which is what the coordinator accepts."""
    return " ".join(text.split())[:500]
