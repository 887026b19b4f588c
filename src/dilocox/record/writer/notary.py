"""The notary: writes the log of a run, in the coordinator's process."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import EnrolRequest, RankId, RoundPlan
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.server.generations import refuse_fenced, refuse_standby
from dilocox.coordinator.server.notary import Decision
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance
from dilocox.record.log.attestation_statements import check_taken
from dilocox.record.log.audit_verdicts import BAD
from dilocox.record.log.canonical import dumps
from dilocox.record.log.digests import sealed
from dilocox.record.log.manifest import code_digest as code_digest
from dilocox.record.log.manifest import manifest
from dilocox.record.log.recommitments import Base
from dilocox.record.log.signed_note import LogCheckpoint
from dilocox.record.log.transparency_log import ENTRIES, LogWriter
from dilocox.record.log.verdict_statements import check_planned, taken_in
from dilocox.record.writer.checkpoint_publisher import CheckpointPublisher
from dilocox.record.writer.custody_rules import certified_of, custody_problem
from dilocox.record.writer.exchange_statements import commitment, contribution
from dilocox.record.writer.log_summary import MARK_EVERY, MARK_FILE, Memory, marked, read_mark
from dilocox.record.writer.patient_log import PatientLog
from dilocox.record.writer.state_rules import taken_apart
from dilocox.utils.storage import when_there_is_room

log = logging.getLogger(__name__)

KEY_FILE = "record-key"
"""File in the coordinator's folder, readable only by its owner: the log's private key, hex."""


@dataclass
class TransparencyLogSink:
    """A `RecordSink` that writes the transparency log. The run waits while the disk fails."""

    config: RunConfig
    writer: LogWriter
    signer: s.Signer
    on_message: Callable[[str], None]
    memory: Memory = field(default_factory=Memory)
    """Summary of the log."""
    marks: Path | None = None
    """File of the log's marks; None: no marks are written."""

    def __post_init__(self) -> None:
        self.log = PatientLog(self.writer, self.on_message)
        self._next_mark = self.writer.size + MARK_EVERY
        self._abandoned = False

    @property
    def run(self) -> str:
        """See `RecordSink`."""
        return self.memory.run

    @property
    def resumes(self) -> int:
        """See `RecordSink`."""
        return self.memory.resumes

    @classmethod
    def open(
        cls, config: RunConfig, coordinator: Path, on_message: Callable[[str], None]
    ) -> TransparencyLogSink:
        """Begin the log of a run, or continue it.

        `coordinator`: folder of the coordinator's own files. Raises `RecordError` if the log cannot
        be written, or is not the one that the coordinator's key has signed. Raises `TrainingError`
        if another machine writes the log: two logs signed by one key would differ.
        """
        refuse_fenced(coordinator)
        refuse_standby(coordinator)
        folder = record_folder(config)
        try:
            key = _log_key(coordinator / KEY_FILE, fresh=not (folder / ENTRIES).exists())
            origin = f"dilocox/{config.run.name}/{key.public_key().public_bytes_raw().hex()[:16]}"
            memory, writer = _opened(folder, origin, key, coordinator / MARK_FILE)
        except OSError as error:
            raise RecordError(
                f"{folder}: cannot be written ({error.strerror}); free the disk, or set "
                "record.enabled = false"
            ) from None
        notary = cls(config, writer, s.Signer(key), on_message, memory, coordinator / MARK_FILE)
        if not writer.size:
            entry = notary._first(manifest(config, str(writer.public)))
            notary.log.append(entry)
            memory.take(entry)
            notary.sync()
        if memory.resumed_lately:
            notary._look_back()
        if config.record.anchor:
            notary.log.anchor = CheckpointPublisher(
                config.record.anchor, config.network.link_timeout
            )
        return notary

    def _first(self, said: Mapping[str, Any]) -> str:
        """Sign the log's first entry, whose digest is the run's id; a nonce makes it unique."""
        subjects = {"run-file": said["config_digest"]}
        nonce = secrets.token_hex(16)
        return self.signer.sign(s.Statement(s.MANIFEST, subjects, {"nonce": nonce, **said}))

    @property
    def manifest(self) -> str:
        """See `RecordSink`."""
        return self.memory.acceptances.manifest

    def close(self) -> None:
        """Sign and publish a last checkpoint, and close the log, unless `abandon` was called."""
        if not self._abandoned:
            self.log.close()

    def abandon(self) -> None:
        """Close the log without another signature: another coordinator goes on with it."""
        self._abandoned = True
        self.log.abandon()

    def enrolled(self, request: EnrolRequest, incarnation: int) -> None:
        """See `RecordSink`."""
        if request.record_key is None:
            raise Refused("join", f"site {request.site}: it has no key for the run's record")
        said = {
            "run": self.run,
            "site": request.site,
            "incarnation": incarnation,
            "key": request.record_key,
            "data": request.data_digest,
            "versions": request.versions.named(),
            **({} if request.base_digest is None else {"base": request.base_digest}),
            **({} if request.stake is None else {"stake": request.stake.model_dump()}),
        }
        if self.memory.acceptances.enrolments.get(request.site) != said:
            key = hashlib.sha256(request.record_key.encode()).hexdigest()
            statement = s.Statement(s.ENROLMENT, {f"key of {request.site}": key}, said)
            # Before the site is admitted: if the entry cannot be written, the site asks again.
            self.log.append(self.signer.sign(statement))
            self.memory.remember(statement)
        self.sync()

    def stake_of(self, site: str) -> str:
        """See `RecordSink`."""
        said = self.memory.acceptances.enrolments.get(site, {})
        return str(said.get("stake", {}).get("signature", ""))

    def standing(self, site: str, change: str) -> None:
        """See `RecordSink`."""
        self._say(s.STANDING, {"site": site, "change": change}, {})
        self.sync()

    def committed(self, rank: RankId, key: ExchangeKey, statement: str, *, bound: bool) -> bool:
        """See `RecordSink`."""
        found = self._signed(rank, statement, s.COMMITMENT)
        named = {"values", "payload"} if bound else {"values"}
        said = dict(commitment(self.run, rank, key, "", None).predicate)
        if dumps(dict(found.predicate)) != dumps(said) or set(found.subjects) != named:
            raise Refused("refused", f"{rank}: its signed commitment does not match {key.text}")
        known = self.memory.commitments.get(key.text, {}).get((rank.site, rank.shard))
        if known is not None and known != dict(found.subjects):
            raise Refused(
                "refused", f"{rank}: has committed to another contribution to {key.text} before"
            )
        self._file(statement, found)
        return known is None

    def commitments(self, key: ExchangeKey) -> Collection[tuple[str, int]]:
        """See `RecordSink`."""
        return self.memory.commitments.get(key.text, {}).keys()

    def contribution(
        self,
        rank: RankId,
        key: ExchangeKey,
        attempt: int,
        digest: str,
        statement: str,
        *,
        in_time: bool = True,
    ) -> bool:
        """See `RecordSink`."""
        found = self._signed(rank, statement, s.CONTRIBUTION)
        expected = contribution(self.run, rank, key, attempt, digest)
        # Compare bytes: in Python True equals 1, but their encodings differ.
        if found.to_bytes() != expected.to_bytes():
            raise Refused("refused", f"{rank}: its signed contribution does not match {key.text}")
        before = self.memory.commitments.get(key.text, {}).get((rank.site, rank.shard))
        if before is None or not in_time:
            return False
        self._file(statement, found)
        bound = sealed(digest, self.run, key.text, rank.site, rank.shard)
        return before.get("payload", bound) == bound

    def contributions(self, key: ExchangeKey, attempt: int) -> Mapping[tuple[str, int], str]:
        """See `RecordSink`."""
        known = self.memory.payloads.get(f"{key.text}#{attempt}", {})
        places = {place: place.rsplit("/", 1) for place in known}
        return {(site, int(shard)): known[place] for place, (site, shard) in places.items()}

    def checkpoint(self, rank: RankId, statement: str) -> None:
        """See `RecordSink`. A malformed statement would stop every reader, so it is refused."""
        kinds = (s.CHECKPOINT, s.ROUND, s.ANCHOR, s.ATTESTATION, s.REPORT, s.ACCEPTANCE)
        found = self._signed(rank, statement, *kinds)
        if found.kind == s.ACCEPTANCE:
            self._accept(rank, statement, found)
            return
        if found.kind == s.ATTESTATION:
            self.attest(rank.site, statement)
            return
        said = found.predicate
        try:
            state = taken_apart(found)
        except RecordError as error:
            raise Refused("refused", f"{rank}: its signed {error}") from None
        place = (said.get("site"), said.get("stage"), said.get("shard", rank.shard))
        if place != (rank.site, rank.stage, rank.shard):
            raise Refused("refused", f"{rank}: its signed {found.kind} is another rank's")
        by_gradient = self.config.exchanges_gradients
        steps = None if by_gradient else self.memory.steps.values()
        why = None if state is None else self.memory.holds.why_not(state, steps)
        if why is not None:
            raise Refused("refused", f"{rank}: {why}")
        self._file(statement, found)
        # A rank sends its statement only once, so it is synced before the answer. Reports decide
        # nothing: a power cut may take them, and a sync per site and round would cost too much.
        if found.kind != s.REPORT:
            self.sync()

    def head(self) -> LogCheckpoint:
        """See `RecordSink`."""
        return self.writer.covered

    def attest(self, site: str, statement: str) -> None:
        """See `RecordSink`."""
        found = self._signed(RankId(site=site, stage=0, shard=0), statement, s.ATTESTATION)
        try:
            check_taken(found, self.run, site, self.memory.acceptances.enrolments.get(site, {}))
        except RecordError as error:
            raise Refused("refused", f"{site}: its signed {error}") from None
        self._file(statement, found)
        self.sync()

    def _accept(self, rank: RankId, text: str, statement: s.Statement) -> None:
        try:
            found = Acceptance.of(statement, 0)
        except RecordError as error:
            raise Refused("refused", f"{rank}: its signed {error}") from None
        why = self.memory.acceptances.why_not(found)
        if found.site != rank.site or why is not None:
            raise Refused("refused", f"{rank}: {why or 'its acceptance names another site'}")
        self._file(text, statement)
        self.sync()

    def custody(self, rank: RankId, statement: str | None, asked: Sequence[str]) -> dict[str, str]:
        """See `RecordSink`."""
        if statement is not None:
            found = self._signed(rank, statement, s.CUSTODY)
            why = custody_problem(self.config, rank, found)
            if why is not None:
                raise Refused("refused", f"{rank}: {why}")
            self._file(statement, found)
        certified = certified_of(self.config, self.memory.custody, rank.shard, asked)
        if certified:  # sites may remove payloads now, so a power cut must not take the statements
            self.sync()
        return certified

    def verdict(self, by: str, statement: str) -> str | None:
        """See `RecordSink`."""
        known = self.memory
        try:
            found = taken_in(statement, self.run, by, self.writer.size)
            check_planned(found, self.config.sites, max(known.plans, default=known.resumed_in - 1))
        except RecordError as error:
            raise Refused("refused", f"verdict: {error}") from None
        news = self._file(statement, found.statement(self.run))
        self.sync()
        return f"audit: {found.text}" if news and found.verdict in BAD else None

    def planned(self, plan: RoundPlan) -> None:
        """See `RecordSink`. Only audits need a plan, as the given input of a repeated round."""
        self.memory.holds.planned(plan)
        said = {"round": plan.round, "plan": plan.model_dump(mode="json")}
        if self.config.record.states_every and self.memory.plans.get(plan.round) != said["plan"]:
            self._say(s.PLAN, said, {})

    def decided(self, decision: Decision) -> None:
        """See `RecordSink`."""
        if decision.key.kind != "outer":
            return
        attempt = f"{decision.key.text}#{decision.attempt}"
        payloads = {
            place: digest
            for place, digest in self.memory.payloads.get(attempt, {}).items()
            if place.rsplit("/", 1)[0] in decision.set
        }
        predicate = {
            **outer_step(decision, self.config.site.stages, self._behind(decision)),
            "aggregation": self.config.admission.aggregation,
        }
        # After a restart the coordinator repeats decisions that the log may have already. The
        # coordinator may no longer know the owners of chunks then, so an equal decision is not
        # appended again.
        known = self.memory.steps.get(decision.key.text, {})
        if (known.get("attempt"), known.get("set")) != (decision.attempt, list(decision.set)):
            # Sites hear of the decision next, and do not ask for it again.
            self._say(s.STEP, predicate, payloads, synced=True)

    def _behind(self, decision: Decision) -> list[str]:
        """List the sites whose text enters the model by a decision, now or by error feedback."""
        known = self.memory.commitments.get(decision.key.text, {})
        kept = {site for site, _ in known} if self.config.compression.error_feedback else set()
        return [name for name in decision.plan.members if name in decision.set or name in kept]

    def resumed(self, round_: int, tick: int) -> None:
        """See `RecordSink`."""
        self._say(s.RESUME, {"round": round_, "tick": tick}, {}, synced=True)
        self._look_back()

    def _look_back(self) -> None:
        """Read the commitments made before a resume from the log; the summary has dropped them."""
        shards = self.config.site.shards
        try:
            when_there_is_room(lambda: self.memory.look_back(self.log.lines(), shards), "record")
        except OSError as error:
            self.on_message(
                f"record: cannot be read back ({error.strerror}); this run will not notice a site "
                "that changes a commitment after the resume, but `dilocox verify` will"
            )

    def recommitted(self, rank: RankId, key: ExchangeKey, plan: RoundPlan) -> bool:
        """See `RecordSink`."""
        said = self.memory.commitments.get(key.text, {}).get((rank.site, rank.shard))
        if self.memory.courses is None or said is None:
            return False
        base = Base.of_plan(key, plan, self.config.site.stages)
        return self.memory.courses.again((key.text, rank.site, rank.shard), said, base)

    def sync(self) -> None:
        """See `RecordSink`."""
        self.log.sync()

    def settle(self) -> None:
        """See `RecordSink`."""
        self.log.settle()

    def tend(self) -> None:
        """See `RecordSink`."""
        self.log.tend()

    def cover(self) -> None:
        """See `RecordSink`."""
        mark = None
        if self.marks is not None and self.writer.size >= self._next_mark and self.log.settled:
            self._next_mark = self.writer.size + MARK_EVERY
            if self.memory.courses is None or self.memory.courses.idle:
                mark = marked(self.marks, self.memory, self.writer.mark())
        self.log.cover(mark)

    def _signed(self, rank: RankId, text: str, *kinds: str) -> s.Statement:
        try:
            public = self.memory.keys.get(rank.site, "")
            found = s.open_signed(text, public, run=self.run, kinds=kinds)
        except RecordError as error:
            raise Refused("refused", f"{rank}: {error}") from None
        if found.kind != s.ACCEPTANCE and self.memory.acceptances.lacks(rank.site):
            raise Refused("refused", f"{rank}: its site has not signed an acceptance of the run")
        return found

    def _file(self, text: str, statement: s.Statement) -> bool:
        """Append a statement of a site or an auditor; return False if the log has it already.

        A statement comes again if its sender missed the answer."""
        if hashlib.sha256(statement.to_bytes()).digest() in self.memory.filed:
            return False
        self.log.append(text)
        self.memory.remember(statement)
        return True

    def _say(
        self,
        kind: str,
        predicate: dict[str, Any],
        subjects: Mapping[str, str],
        *,
        synced: bool = False,
    ) -> None:
        statement = s.Statement(kind, subjects, {"run": self.run, **predicate})
        self.log.owe(self.signer.sign(statement), synced=synced)
        self.memory.remember(statement)


def record_folder(config: RunConfig) -> Path:
    """Return the folder of a run's log."""
    return config.folder / "record"


def _opened(
    folder: Path, origin: str, key: Ed25519PrivateKey, marks: Path
) -> tuple[Memory, LogWriter]:
    """Open the log; return its summary and its writer. Starts from the mark if one fits."""
    memory, mark = read_mark(marks)
    if mark is not None:
        try:
            return memory, LogWriter(folder, origin, key, memory.take, mark)
        except RecordError as error:
            log.warning("%s: ignored, the whole log is read (%s)", marks, error)
    memory = Memory()
    return memory, LogWriter(folder, origin, key, memory.take)


def outer_step(decision: Decision, stages: int, behind: Collection[str]) -> dict[str, Any]:
    """Return the predicate of an outer step: all inputs of its replay except the payloads.

    The predicate also names the token ranges of the sites that are `behind` the step."""
    key, plan = decision.key, decision.plan
    flush = plan.kind == "flush"
    slot = (
        0 if flush else boundary_slots(key.stage, stages, plan.fragments, plan.slots)[key.fragment]
    )
    return {
        "round": key.round,
        "kind": plan.kind,
        "exchange_key": key.text,
        "stage": key.stage,
        "fragment": key.fragment,
        "attempt": decision.attempt,
        "tick": plan.first_tick + slot,
        "set": list(decision.set),
        "owners": list(decision.owners),
        "members": list(plan.members),
        "weights": {site: plan.members[site].weight for site in decision.set},
        "codec": plan.codec,
        "exchange": plan.exchange,
        "overlap": plan.overlap,
        "keep": plan.keep,
        "delay": plan.delay,
        "fragments": plan.fragments,
        "inner_steps": plan.inner_steps,
        "first_tick": plan.first_tick,
        "slots": plan.slots,
        "spaces": {site: plan.members[site].space for site in behind},
        "ranges": {site: [list(each) for each in plan.members[site].ranges] for site in behind},
        "learning_rate": plan.learning_rate,
        "momentum": plan.momentum,
        "residual_decay": plan.residual_decay,
        "residual_view": plan.residual_view,
        "verdicts": {
            site: verdict.model_dump(exclude_none=True)
            for site, verdict in decision.verdicts.items()
        },
        "shares": {site: [list(own) for own in by_shard]
                   for site, by_shard in decision.shares.items()},
    }  # fmt: skip


def _log_key(path: Path, fresh: bool) -> Ed25519PrivateKey:
    if path.exists():
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    if not fresh:
        raise RecordError(
            f"{path}: missing, and the run's log cannot be continued without it; put it back, "
            "or begin a new run"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = Ed25519PrivateKey.generate().private_bytes_raw().hex()
    write_private(path, seed.encode())
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
