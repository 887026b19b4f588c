"""Judges all evidence of a run's machines by a policy: each piece, and that it was renewed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dilocox.config.methods import exchanges_gradients
from dilocox.errors import AttestationError, DilocoxError, RecordError
from dilocox.record.log.attestation_statements import Attestation, MachineFacts
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.state_statements import readable
from dilocox.record.log.transparency_log import leaves_of
from dilocox.record.verify.claims import NotRunError, SimulatedError
from dilocox.record.verify.machine_claims import policy_of
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.machine import Machine, judge_machine
from dilocox.tools.attestation.policy import PolicyFile
from dilocox.tools.attestation.renewal import Filed, check_renewed, idle, round_at
from dilocox.tools.attestation.runtime_data import RuntimeData, nonce_of
from dilocox.tools.attestation.tdx import MissingLibraryError


@dataclass(frozen=True)
class RunJudge:
    """See `dilocox.record.verify.machine_claims.MachineJudge`."""

    file: PolicyFile
    now: datetime.datetime
    """The reader's moment, with a time zone. Verdicts are as of filing; both are told."""
    randomness: Mapping[int, bytes]
    """Public randomness by round, which the reader has looked up at its source."""

    @readable
    def judge(self, course: RunHistory, entries: Sequence[str], get: Callable[[str], bytes]) -> str:
        """See `MachineJudge`."""
        agreed = policy_of(course)
        if agreed not in (None, self.file.digest):
            raise AttestationError(
                f"the policy has SHA-256 {self.file.digest[:12]}…, the sites agreed on "
                f"{agreed[:12]}… (record.tee)"
            )
        filed = [(each, each.machine) for each in course.attestations if each.machine is not None]
        if not filed and agreed is None:
            raise NotRunError("no site has filed evidence that dilocox judges")
        roots = roots_at(leaves_of(entries), {facts.size for _, facts in filed})
        machines, lacking, beside = list[Machine](), list[str](), list[str]()
        held = list[MachineFacts]()
        for each, facts in filed:
            try:
                machines.append(self._one(each, facts, course, roots, get))
                held.append(facts)
            except (NotRunError, AttestationError) as why:
                # Nothing in the model was made under it. Else anybody who has enrolled could spoil
                # the claim of a run without a step of training.
                if idle(course, each.site, each.number):
                    beside.append(str(why))
                elif isinstance(why, AttestationError):
                    raise
                else:  # a later piece may be a FAIL, which counts for more
                    lacking.append(str(why))
        late = check_renewed(
            course,
            [
                Filed(each.site, each.number, facts.node, facts.nodes, round_at(course, facts.size))
                for each, facts in filed
            ],
            self.file.policy.max_age_rounds,
        )
        if late:
            # Sites that have agreed on a policy owe evidence; other sites never promised it.
            raise NotRunError(late) if agreed is None else AttestationError(late)
        if lacking:
            more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
            raise NotRunError(f"{lacking[0]}{more}")
        _need_steps(course, len(filed))
        told = self._told(held, machines, agreed is not None)
        if beside:
            told += (
                f"; {len(beside)} more do not count, as their sites contributed nothing after that "
                f"start: {beside[0]}"
            )
        reasons = [each.not_run for each in machines if each.not_run]
        if reasons:
            raise NotRunError(f"{reasons[0]}; {told}")
        if self.file.policy.environment == "simulation":
            raise SimulatedError(told)
        return told

    def _one(
        self,
        filed: Attestation,
        facts: MachineFacts,
        course: RunHistory,
        roots: Mapping[int, bytes],
        get: Callable[[str], bytes],
    ) -> Machine:
        what = f"statement {filed.number}, machine {facts.node} of {facts.nodes} of {filed.site}"
        try:
            if facts.size > filed.number or roots[facts.size].hex() != facts.root:
                raise AttestationError("it names a moment that this log never had")
            self._check_randomness(course, facts)
            age = round_at(course, filed.number) - round_at(course, facts.size)
            if age > self.file.policy.max_age_rounds:
                raise AttestationError(f"stale: made {age} rounds before it was filed")
            evidence = Evidence.from_bytes(get(filed.evidence))
            when = datetime.datetime.fromtimestamp(facts.time, datetime.UTC)
            machine = judge_machine(evidence, self.file.policy, when)
            _check_said(machine.said, filed, facts, course, roots[facts.size])
        except MissingLibraryError as error:
            raise NotRunError(f"{what}: {error}") from None
        except MissingError:
            raise NotRunError(
                f"{what}: its evidence {filed.evidence[:12]}… is not here; name site "
                f"{filed.site}'s store with --store"
            ) from None
        except DilocoxError as error:
            raise AttestationError(f"{what}: {error}") from None
        return machine

    def _check_randomness(self, course: RunHistory, facts: MachineFacts) -> None:
        round_ = round_at(course, facts.size)
        known = self.randomness.get(round_)
        if known is not None and known.hex() != facts.randomness:
            raise AttestationError(
                f"it names other public randomness than --randomness gives for round {round_}"
            )

    def _told(
        self, filed: Sequence[MachineFacts], machines: Sequence[Machine], agreed: bool
    ) -> str:
        times = sorted(each.time for each in filed)
        first, last = (f"{_moment(each):%Y-%m-%d %H:%M} UTC" for each in (times[0], times[-1]))
        notes = sorted({note for each in machines for note in each.notes})
        expired = sum(each.expires <= self.now for each in machines)
        since = f", {expired} of them expired since" if expired else ""
        whose = "" if agreed else "; the sites did not agree on this policy (record.tee)"
        return (
            f"{len(machines)} pieces of evidence ({', '.join(notes)}) as of their filing, {first} "
            f"to {last}{since}; read {self.now:%Y-%m-%d %H:%M} UTC{whose}"
        )


def _need_steps(course: RunHistory, filed: int) -> None:
    """Raise `NotRunError` if nothing shows which sites owe evidence, and in which rounds."""
    if course.steps:
        return
    pieces = f"{filed} pieces of evidence" if filed else "no site has filed evidence"
    if exchanges_gradients(course.config["outer"]["method"]):
        raise NotRunError(
            f"{pieces}; method {course.config['outer']['method']} has no outer steps, which would "
            "show whose evidence must be renewed, and when"
        )
    raise NotRunError(f"{pieces}, and no site has contributed yet")


def _moment(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _check_said(
    said: RuntimeData, filed: Attestation, facts: MachineFacts, course: RunHistory, root: bytes
) -> None:
    """Compare what a machine vouches for with the log. Raises `AttestationError`."""
    enrolment = _enrolment(course, filed)
    accounts = (course.config.get("settlement") or {}).get("accounts", {})
    account = accounts.get(filed.site)
    own = {
        "run": course.run,
        "manifest": course.first,
        "site": filed.site,
        "incarnation": enrolment["incarnation"],
        "key": enrolment["key"],
        "node": facts.node,
        "nodes": facts.nodes,
        "nonce": nonce_of(facts.size, root, bytes.fromhex(facts.randomness)),
        "evm": said.evm if said.evm is None else account,
    }
    for name, value in own.items():
        found = getattr(said, name)
        if found != value:
            raise AttestationError(f"the machine is bound to another {name}: {str(found)[:12]}")
    if facts.incarnation != enrolment["incarnation"]:
        raise AttestationError("it is of another start of the site")


def _enrolment(course: RunHistory, filed: Attestation) -> Mapping[str, object]:
    """Return the enrolment in force when a statement was filed."""
    own = [each for each in course.enrolments if each["site"] == filed.site]
    starts = course.starts.get(filed.site, [])
    found = [each for each, at in zip(own, starts, strict=True) if at < filed.number]
    if not found:
        raise RecordError(f"{filed.site} had not enrolled")
    return found[-1]
