"""Requests that submit verdicts of audits for the record."""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.protocol.audit_messages import (
    HandInReply,
    HandInRequest,
    TokenHandInRequest,
)
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.notary import RecordHook
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.tokens import SiteTokens


class AuditVerdicts:
    """Takes verdicts from the operator, from sites, and from holders of a site's token.

    A request that is not allowed raises `Refused` with one line.
    """

    def __init__(
        self,
        run: RunLog,
        budgets: Budgets,
        witness: RecordHook,
        tokens: SiteTokens,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` shows a message to the run's operator."""
        self._run, self._budgets, self._witness = run, budgets, witness
        self._tokens, self._tell = tokens, tell

    def take(self, request: HandInRequest, caller: Caller) -> HandInReply:
        """Take a verdict from a caller with a certificate."""
        return self._take(request.statement, "" if caller.operator else caller.site)

    def take_by_token(self, request: TokenHandInRequest) -> HandInReply:
        """Take a verdict from a holder of a site's valid token. The site need not be training."""
        holder = self._tokens.holder(request.token, self._run.state.tokens_in_force)
        if holder is None:
            raise Refused("join", "token: not a token of this run, or no longer valid")
        return self._take(request.statement, holder)

    def _take(self, statement: str | None, by: str) -> HandInReply:
        if not self._witness.run:
            raise Refused("refused", "verdict: this run keeps no record (record.enabled = false)")
        if statement is not None:
            if by:  # The operator has no budget: it is the operator's own disk.
                self._budgets.spend(by, "verdicts")
            text = self._witness.verdict(by, statement)
            if text is not None:
                self._tell(text)
        return HandInReply(run=self._witness.run, by=by)
