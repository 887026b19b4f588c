"""A coordinator with a notary, and sites that sign: what tests of the record share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server.notary import Decision
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance, OwnFacts, digest_of_entry
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import check_log, read_log
from dilocox.record.log.verdict_statements import HandedIn
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.record.writer.exchange_statements import commitment, contribution
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.coordinator_driver import VERSIONS, Driver, run_config

KEYS = {name: RecordKey.of(f"{number:02x}" * 32) for number, name in enumerate("abc", 1)}
SIGNERS = {name: s.Signer.from_hex(key.private) for name, key in KEYS.items()}
ONE = "1" * 64
KEY = ExchangeKey.outer(0, 0, 0)


def own_digest(site: str, key: ExchangeKey = KEY) -> str:
    """Of the payload that a site has for an exchange: no other is the same."""
    return hashlib.sha256(f"{site} {key.text}".encode()).hexdigest()


OF_ALL = {f"{site}/0": own_digest(site) for site in "abc"}


class Scene:
    """A coordinator with a notary, and sites that sign."""

    def __init__(self, root: Path, **sections: Any) -> None:
        self.config = run_config(run={"folder": str(root / "run")}, **sections)
        self.folder, self.messages = root / "coordinator", list[str]()
        self.notary = TransparencyLogSink.open(self.config, self.folder, self.messages.append)
        self.driver = Driver(self.folder, self.config, notary=self.notary)

    def enrol(self, vouch: Callable[[str], Any] = lambda site: None) -> None:
        """All sites enrol and accept. `vouch`: returns a site's `StakeProof`, or None."""
        for site, key in KEYS.items():
            self.driver.enrol(site, key, stake=vouch(site))
            self.accept(site)
        for site in SIGNERS:
            self.driver.ready(site)

    def accept(self, site: str, /, **changes: Any) -> None:
        """Sign what the site takes part in, fields of the acceptance changed."""
        manifest = changes.pop("entry", self.notary.manifest)
        facts = {"data": None, "own_data": None, "code": ONE, "versions": VERSIONS.named(),
                 **changes.pop("facts", {})}  # fmt: skip
        said = {
            "site": site, "incarnation": self.driver.incarnations[site],
            "key": SIGNERS[site].public, "manifest": digest_of_entry(manifest),
            "facts": OwnFacts(**facts), "number": 0,
        }  # fmt: skip
        signer = SIGNERS[changes.pop("signer", site)]
        statement = Acceptance(**{**said, **changes}).statement(self.notary.run)
        request = m.StateRequest(
            rank=m.RankId(site=site, stage=0, shard=0), statement=signer.sign(statement)
        )
        self.driver.core.witness.state(request)

    def reopen(self) -> None:
        self.notary.close()
        self.notary = TransparencyLogSink.open(self.config, self.folder, self.messages.append)
        self.driver.options["notary"] = self.notary
        self.driver.reopen()

    def signed(self, site: str, key: ExchangeKey = KEY, attempt: int = 1, digest: str = ONE,
               run: str | None = None, signer: str | None = None) -> str:  # fmt: skip
        rank = m.RankId(site=site, stage=key.stage, shard=0)
        said = contribution(run or self.notary.run, rank, key, attempt, digest)
        return SIGNERS[signer or site].sign(said)

    def vote(self, site: str, key: ExchangeKey = KEY, **changes: Any) -> m.VoteReply:
        fields: dict[str, Any] = {
            "held": list("abc"), "digests": {site: own_digest(site, key)},
            "statement": self.signed(site, key, digest=own_digest(site, key)),
        }  # fmt: skip
        return self.driver.vote(key, site, **{**fields, **changes})

    def commit(self, site: str, key: ExchangeKey = KEY, **changes: Any) -> m.BeginReply:
        """Begin with a commitment, whose fields may be changed; the reply."""
        said: dict[str, Any] = {
            "run": self.notary.run, "key": key,
            "rank": m.RankId(site=site, stage=key.stage, shard=0),
            "values": own_digest("values of " + site), "payload": own_digest(site, key),
        }  # fmt: skip
        signer = SIGNERS[changes.pop("signer", site)]
        text = signer.sign(commitment(**{**said, **changes}))
        return self.driver.begin(key, site, commitment=text)

    def begin(self, key: ExchangeKey = KEY) -> None:
        for site in "abc":
            self.commit(site, key)

    def exchange(self, key: ExchangeKey = KEY) -> None:
        self.begin(key)
        for site in "abc":
            self.vote(site, key)

    def entries(self) -> list[str]:
        return (self.config.folder / "record/statements.jsonl").read_text().splitlines()

    def kinds(self) -> list[str]:
        return [s.opened(entry)[0].kind for entry in self.entries()]

    def decisions(self) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Copies of predicate and subjects of all outer steps of the log."""
        opened = (s.opened(each)[0] for each in self.entries())
        return [(json.loads(json.dumps(dict(each.predicate))), dict(each.subjects))
                for each in opened if each.kind == s.STEP]  # fmt: skip

    def decide(self, said: dict[str, Any], subjects: dict[str, str]) -> None:
        """Append an outer step as the coordinator says it; its sites sign the payloads."""
        key = ExchangeKey.parse(said["exchange_key"])
        for site in said["set"]:
            rank = m.RankId(site=site, stage=key.stage, shard=0)
            digest = subjects[f"{site}/0"]
            signed = contribution(self.notary.run, rank, key, said["attempt"], digest)
            self.notary.writer.append(SIGNERS[site].sign(signed))
        self.notary.writer.append(self.notary.signer.sign(s.Statement(s.STEP, subjects, said)))

    def hand_in(self, auditor: s.Signer, site: str, round_: int, verdict: Any) -> None:
        """Append a verdict of an auditor who has read the whole log."""
        size = len(self.entries())
        digest = hashlib.sha256(f"{site} {round_} {verdict}".encode()).hexdigest()
        found = HandedIn(site, round_, verdict, auditor.public, "", digest, size, size)
        self.notary.writer.append(auditor.sign(found.statement(self.notary.run)))

    def last_decision(self) -> Decision:
        state = self.driver.core.state
        exchange = state.exchanges[KEY.text]
        assert exchange.decision is not None
        return Decision(KEY, exchange.attempt, exchange.decision, list("abc"), state.plans[0])

    def course(self) -> RunHistory:
        self.notary.close()
        content = read_log(self.config.folder / "record")
        key = NoteKey.parse(content.public)
        check_log(content, key)
        return read_history(content.entries, key)
