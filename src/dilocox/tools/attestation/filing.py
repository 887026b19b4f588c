"""Files evidence of this machine in the record of a run, once or again and again."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

from dilocox.coordinator.protocol.attestation_messages import AttestReply
from dilocox.errors import AttestationError, DilocoxError
from dilocox.record.log.attestation_statements import MACHINE, Attestation, MachineFacts
from dilocox.record.log.blob_store import Store
from dilocox.record.log.statements import Signer
from dilocox.tools.attestation.collecting import Collector
from dilocox.tools.attestation.machine import judge_machine
from dilocox.tools.attestation.policy import PolicyFile
from dilocox.tools.attestation.runtime_data import RuntimeData, nonce_of

FIRST_PAUSE, MOST_PAUSE = 1.0, 30.0
"""Seconds between two looks at the run; the pause doubles while nothing is to be filed."""


@dataclass
class Filing:
    """Files evidence of one machine of one site."""

    call: Callable[[str | None], AttestReply]
    """Files a statement; None only asks what evidence has to name."""
    collector: Collector
    store: Store
    """The site's store, which keeps the evidence."""
    signer: Signer
    policy: PolicyFile | None = None
    """Policy by which evidence is judged before it is filed. None: it is filed as it is, in a run
    whose sites agreed on no policy."""
    node: int = 0
    nodes: int = 1
    randomness: Callable[[], str] = lambda: ""
    """Returns public randomness, hex; empty if none is at hand."""
    filed: int = 0
    """Number of statements that were filed."""
    _last: tuple[int, int] = field(default=(0, -1))
    """Start of the site and newest planned round when evidence was filed last."""

    def asked(self) -> AttestReply:
        """Return what evidence has to name now.

        Raises `AttestationError` if the site has not joined, training has not begun, or the run has
        another policy.
        """
        return self._checked(self.call(None))

    def _checked(self, reply: AttestReply) -> AttestReply:
        """Return `reply`. Raises like `asked`, and `WrongPolicyError` for another policy."""
        if self.policy is None and reply.policy is not None:
            raise WrongPolicyError(
                f"the sites agreed on the policy {reply.policy[:12]}… (record.tee): give its file "
                "with --policy, since one piece of evidence that breaks it makes the run's claim "
                "FAIL"
            )
        if self.policy is not None and reply.policy not in (None, self.policy.digest):
            raise WrongPolicyError(
                f"--policy: has SHA-256 {self.policy.digest[:12]}…, the run file names "
                f"{reply.policy[:12]}… (record.tee)"
            )
        if reply.incarnation < 1:
            raise AttestationError(f"site {reply.site} has not joined the run yet: join first")
        if reply.size < 1:
            raise AttestationError("training has not begun: the log has no signed checkpoint yet")
        return reply

    def file(self, reply: AttestReply) -> str:
        """Collect evidence, judge it, and file it. Returns a line on it.

        Raises `DilocoxError` if a step fails; then nothing was filed.
        """
        randomness = self.randomness()
        nonce = nonce_of(reply.size, bytes.fromhex(reply.root), bytes.fromhex(randomness))
        said = RuntimeData(
            reply.run, reply.manifest, reply.site, reply.incarnation, self.node, self.nodes,
            self.signer.public, nonce, reply.evm,
        )  # fmt: skip
        evidence = self.collector.collect(said.to_bytes())
        now = int(time.time())
        shown = ""
        if self.policy is not None:
            when = datetime.datetime.fromtimestamp(now, datetime.UTC)
            machine = judge_machine(evidence, self.policy.policy, when)
            shown = f" ({', '.join(machine.notes)}{', SIMULATED' if machine.simulated else ''})"
        digest = self.store.put(evidence.to_bytes())
        facts = MachineFacts(
            reply.incarnation, self.node, self.nodes, reply.size, reply.root, randomness, now
        )
        statement = Attestation(reply.site, MACHINE, digest, facts).statement(reply.run)
        self.call(self.signer.sign(statement))
        self._last = (reply.incarnation, reply.round)
        self.filed += 1
        return (
            f"machine {self.node} of {self.nodes} of {reply.site}: evidence {digest[:12]}… filed "
            f"in round {reply.round}{shown}"
        )

    def is_due(self, reply: AttestReply, every: int) -> bool:
        """Return whether new evidence is due: each start of the site, and every `every` rounds."""
        start, round_ = self._last
        return reply.incarnation != start or reply.round >= round_ + every

    def follow(
        self,
        every: int,
        patience: float,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """File evidence until the run ends, or its coordinator is gone for `patience` seconds.

        A failure is said once, until it changes or ends; what could not be filed is tried again.
        Evidence that is due at the run's end is filed then: a site may have begun anew in its last
        rounds. Raises `WrongPolicyError`, since no new attempt would help.

        Args:
            every: Rounds after which evidence is renewed.
            patience: Seconds.
            say: Gets lines for people.
            sleep: Waits for a number of seconds.
            now: Monotonic clock, in seconds.
        """
        told, heard, pauses, round_ = _Troubles(say), now(), _pauses(), -1
        while True:
            try:
                reply = self.call(None)
            except DilocoxError as error:
                told.tell(str(error))
                if now() > heard + patience:
                    say(
                        f"the coordinator has not answered for {patience:g} s; if the run goes "
                        "on, start this command again"
                    )
                    return
            else:
                heard = now()
                told.note(self._filed_if_due(reply, every, say))
                if reply.over:
                    return
                if reply.round != round_:  # look more often while rounds pass
                    round_, pauses = reply.round, _pauses()
            sleep(min(next(pauses), patience / 4))

    def _filed_if_due(self, reply: AttestReply, every: int, say: Callable[[str], None]) -> str:
        """File evidence if it is due. Returns the trouble, or an empty text."""
        try:
            self._checked(reply)
            if self.is_due(reply, every):
                say(self.file(reply))
        except WrongPolicyError:
            raise
        except DilocoxError as error:
            return str(error)
        return ""


class WrongPolicyError(AttestationError):
    """The operator's policy is not the one that the sites agreed on, or is not given."""


class _Troubles:
    """Says each trouble once, until it is another one or over."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, ""

    def tell(self, trouble: str) -> None:
        if trouble != self._last:
            self._last = trouble
            self._say(f"not filed: {trouble}; it is tried again")

    def note(self, trouble: str) -> None:
        """Tell `trouble`; empty: there is none."""
        if trouble:
            self.tell(trouble)
        else:
            self._last = ""


def _pauses() -> Iterator[float]:
    rising = (FIRST_PAUSE * 2**step for step in range(5))
    return chain(rising, repeat(MOST_PAUSE))
