"""Requests that file evidence of machines for the record."""

from __future__ import annotations

import hashlib

from dilocox.coordinator.protocol.attestation_messages import AttestReply, TokenAttestRequest
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.notary import RecordHook
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.tokens import SiteTokens


class Attestations:
    """Takes evidence from holders of a site's token. Training does not know of it."""

    def __init__(
        self, state: CoordinatorState, budgets: Budgets, witness: RecordHook, tokens: SiteTokens
    ) -> None:
        self._state, self._budgets = state, budgets
        self._witness, self._tokens = witness, tokens

    def take(self, request: TokenAttestRequest) -> AttestReply:
        """File a statement, if there is one. Returns what evidence has to name now.

        Raises `Refused` if the token is not valid, the run keeps no record, or the statement is
        wrong.
        """
        state = self._state
        site = self._tokens.holder(request.token, state.tokens_in_force)
        if site is None:
            raise Refused("join", "token: not a token of this run, or no longer valid")
        if not self._witness.run:
            raise Refused("refused", "attest: this run keeps no record (record.enabled = false)")
        if request.statement is not None:
            self._budgets.spend(site, "attestations")
            self._witness.attest(site, request.statement)
        size, root = self._witness.head()
        known, config = state.sites.get(site), state.config
        accounts = {} if config.settlement is None else config.settlement.accounts
        return AttestReply(
            run=self._witness.run,
            manifest=hashlib.sha256(self._witness.manifest.encode()).hexdigest(),
            site=site,
            incarnation=0 if known is None else known.incarnation,
            evm=accounts.get(site),
            policy=config.record.tee,
            size=size,
            root=root,
            round=max(state.plans, default=0),
            over=state.over,
        )
