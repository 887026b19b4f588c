"""The history of a run, built from the statements of its log. Pure: nothing is replayed.

A resume abandons the part of the history after the checkpoint's tick: exchanges that began after
that tick no longer count. If an exchange was decided again, the later decision counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.config.availability import PieceCode
from dilocox.config.methods import exchanges_gradients
from dilocox.config.site import MOST_RANKS, SITE_NAME
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance, digest_of_entry, is_bound, run_of
from dilocox.record.log.attestation_statements import Attestation
from dilocox.record.log.custody import Certificates, Custody
from dilocox.record.log.packed import Commitments, Contributions, packed_step
from dilocox.record.log.reader import Line, read_lines
from dilocox.record.log.recommitments import Recommitments, commitment_of
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.site_keys import SiteKeys
from dilocox.record.log.state_statements import (
    AnchorState,
    Report,
    RoundState,
    State,
    whole,
)
from dilocox.record.log.step_statements import Step
from dilocox.record.log.verdict_statements import HandedIn

_SITE = re.compile(SITE_NAME)
MOST_TYPES = 100
"""Most unknown types of statements that are listed; a stranger's log may have any number."""


@dataclass
class RunHistory:
    """The history of one run, as far as its log has been read."""

    run: str
    """Id of the run."""
    log: str
    """The log's key."""
    manifest: Mapping[str, Any]
    enrolments: list[Mapping[str, Any]] = field(default_factory=list)
    acceptances: list[Acceptance] = field(default_factory=list)
    """Sites' acceptances of the manifest, in the log's order."""
    accepted: set[str] = field(default_factory=set)
    """Sites that have signed an acceptance since their latest enrolment."""
    unaccepted: dict[str, int] = field(default_factory=dict)
    """By site: index of the first statement that the site signed without an acceptance after its
    latest enrolment. Sites of an older dilocox signed no acceptances."""
    first: str = ""
    """SHA-256, hex, of the log's first entry."""
    keys: SiteKeys = field(default_factory=SiteKeys)
    starts: dict[str, list[int]] = field(default_factory=dict)
    """By site: indices, from 0, of its enrolments in the log. Each enrolment starts its ranks."""
    steps: dict[str, Step] = field(default_factory=dict)
    """Outer steps that stand at the end, by exchange key."""
    contributions: Contributions = field(default_factory=Contributions)
    """SHA-256 of payloads by (exchange key, attempt, site, shard)."""
    commitments: Commitments = field(default_factory=Commitments)
    """Commitments by (exchange key, site, shard)."""
    votes: dict[tuple[str, int], int] = field(default_factory=dict)
    """Index of the first contribution statement, by (exchange key, attempt)."""
    since: int = 0
    """Number of statements before the latest resume."""
    resumes: list[int] = field(default_factory=list)
    """Indices of the resume statements."""
    slots: list[int] = field(default_factory=list)
    """Ticks that these resumes go back to."""
    recommitments: Recommitments = field(default_factory=Recommitments)
    """Commitments that sites changed after a resume."""
    begun: int | None = None
    """Index of the first commitment, contribution or outer step; None before there is one."""
    states: list[State] = field(default_factory=list)
    """Initial and final states that sites have signed."""
    plans: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Plans by round, as JSON of `RoundPlan`; recorded only in runs that can be audited."""
    rounds: dict[tuple[int, str, int, int], RoundState] = field(default_factory=dict)
    """States in which rounds began, by (round, site, stage, shard)."""
    again: set[tuple[int, str, int, int]] = field(default_factory=set)
    """Keys of `rounds` that may be signed once more, because a resume went back to that state."""
    anchors: list[AnchorState] = field(default_factory=list)
    """States that a replay may begin from."""
    attestations: list[Attestation] = field(default_factory=list)
    reports: dict[tuple[str, int, str], set[str]] = field(default_factory=dict)
    """SHA-256 of a site's reports, by (kind, round, site)."""
    custody: Certificates = field(default_factory=Certificates)
    """Custody of pieces, including that of cuts whose payloads no longer count."""
    wrong_custody: list[str] = field(default_factory=list)
    """One line for each custody that is not of the run's code; none of them counts."""
    verdicts: list[HandedIn] = field(default_factory=list)
    """Verdicts of auditors, including those from before a resume."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Index of the statement that decided an exchange, by exchange key."""
    first_numbers: dict[str, int] = field(default_factory=dict)
    """Index of the statement that first decided an exchange, by exchange key. A repeated decision
    does not renew it, unless a resume has abandoned the earlier one."""
    read: int = 0
    """Number of statements read so far."""
    unknown: int = 0
    """Number of statements of unknown types."""
    unknown_types: set[str] = field(default_factory=set)
    """Some of these types."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The run file that all sites agreed on, as sections and keys."""
        found: Mapping[str, Any] = self.manifest["config"]
        return found

    @property
    def bound(self) -> bool:
        """True if the run's id is the digest of its manifest."""
        return is_bound(self.manifest)

    @property
    def states_every(self) -> int:
        """Rounds between two stored states; 0: no states are stored."""
        return int(self.config["record"].get("states_every", 0))

    @property
    def keep(self) -> int | str:
        """The run's `record.keep`; `all` if the run did not remove any payloads.

        Runs from before this key continue with "auto". With "auto" the ranks of a large model sign
        anchors before they remove payloads, so without anchors nothing was removed.
        """
        found: int | str = self.config.get("record", {}).get("keep", "auto")
        by_gradient = exchanges_gradients(self.config["outer"].get("method"))
        return "all" if by_gradient or (found == "auto" and not self.anchors) else found

    def keeps_state(self, round_: int) -> bool:
        """Return True if the start state of a planned round is stored.

        The state of the flush is always stored, except in runs of earlier versions.
        """
        if self.states_every and self.plans[round_]["kind"] == "flush":
            return bool(self.manifest.get("flush_states"))
        return self.states_every > 0 and round_ % self.states_every == 0

    @property
    def stages(self) -> int:
        """Pipeline stages of a site."""
        return int(self.config["site"]["stages"])

    @property
    def shards(self) -> int:
        """FSDP ranks of a stage."""
        return int(self.config["site"]["shards"])

    @property
    def momentum_dtype(self) -> str:
        """Dtype of the outer momentum; fp32 in runs from before this key."""
        return str(self.config.get("outer", {}).get("momentum_dtype", "fp32"))

    @property
    def pieces(self) -> int:
        """Number of pieces of each stage; an exchange carries neighbouring pieces as a fragment."""
        return int(self.config["outer"]["fragments"])

    def began_again(self, site: str, after: int, before: float = math.inf) -> bool:
        """Return True if the ranks of a site were started between two statements, by index."""
        return any(after < number < before for number in self.starts.get(site, ()))

    def contributed(self, site: str, stage: int, shard: int, round_: int) -> bool:
        """Return True if a rank signed a contribution to an exchange of a round, in any attempt."""
        keys = (key for key, _, *who in self.contributions if who == [site, shard])
        found = map(ExchangeKey.parse, keys)
        return any((key.stage, key.round) == (stage, round_) for key in found)

    def of(self, stage: int) -> list[Step]:
        """Return the outer steps of a stage, in the order in which they land on each piece."""
        found = [step for step in self.steps.values() if step.key.stage == stage]
        return sorted(found, key=lambda step: (step.key.round, step.key.fragment))

    def state(self, kind: str, stage: int) -> list[State]:
        """Return the signed states of a stage; with `kind` "initial", at most the one that counts.

        A site that makes theta_0 may die before any training, and the next site makes another. The
        state that counts was signed before the first commitment, by a site that did not restart
        until then. Of several such sites the first one in the run file's order counts.
        """
        found = [each for each in self.states if (each.kind, each.stage) == (kind, stage)]
        if kind != "initial" or self.begun is None:
            return found[-1:] if kind == "initial" else found
        early = [each for each in found if each.number < self.begun]
        first = self.steps.get(ExchangeKey.outer(0, stage, 0).text)
        for site in [] if first is None else first.said.get("members", ()):
            own = [
                each for each in early
                if each.site == site and not self.began_again(site, each.number, self.begun)
            ]  # fmt: skip
            if own:
                return own[-1:]
        return early[-1:]


def read_history(entries: Iterable[str], key: NoteKey) -> RunHistory:
    """Read the history from a log's entries, checking signatures on all cores.

    `key`: the log's key. Raises `RecordError` naming the first entry that is malformed, not signed
    by the required key, or about another run.
    """
    reader = HistoryReader(key)
    reader.take(entries)
    return reader.course


class HistoryReader:
    """Reads the history of a growing log, in several calls."""

    def __init__(self, key: NoteKey) -> None:
        self._key = key
        self._keys: dict[str, str] = {}
        self._course: RunHistory | None = None

    @property
    def course(self) -> RunHistory:
        """The history read so far. Raises `RecordError` if no entry has been read."""
        if self._course is None:
            raise RecordError("the log holds no statement")
        return self._course

    def take(self, entries: Iterable[str]) -> None:
        """Read the next entries. Raises `RecordError` naming the first bad entry."""
        with contextlib.closing(read_lines(entries)) as lines:
            for line in lines:
                number = 0 if self._course is None else self._course.read
                try:
                    self._course = _take(self._course, self._keys, line, self._key)
                except RecordError as error:
                    raise RecordError(f"statement {number}: {error}") from None
                self._course.read = number + 1


def _take(course: RunHistory | None, keys: dict[str, str], line: Line, log: NoteKey) -> RunHistory:
    statement = line.statement
    if statement is None:
        raise RecordError(line.fault)
    kind, said = statement.kind, statement.predicate
    if course is None:
        if kind != s.MANIFEST:
            raise RecordError(f"a log begins with a {s.MANIFEST}, this one with {kind}")
        _check_signer(line, log.public.hex())
        if said.get("log") != str(log):
            raise RecordError("the manifest names another log")
        _check_bounds(said)
        held = SiteKeys(kept=said.get("kept_keys") is True)
        first = digest_of_entry(line.text)
        return RunHistory(run_of(line.text, said), str(log), said, first=first, keys=held)
    if not statement.known:
        course.unknown += 1
        if len(course.unknown_types) < MOST_TYPES:
            course.unknown_types.add(statement.kind)
        return course
    if statement.run != course.run:
        raise RecordError(f"{kind} of run {statement.run[:12]!r}, this is {course.run[:12]}")
    signer = log.public.hex()
    if kind in s.BY_SITE:
        site = str(said.get("site"))
        if site not in keys:
            raise RecordError(f"{kind} of site {site!r}, which has not enrolled")
        signer = keys[site]
        if kind != s.ACCEPTANCE and site not in course.accepted:
            course.unaccepted.setdefault(site, course.read)
    elif kind in s.BY_AUDITOR:
        signer = str(said.get("auditor"))
    _check_signer(line, signer)
    if kind in (s.COMMITMENT, s.CONTRIBUTION, s.STEP) and course.begun is None:
        course.begun = course.read
    with whole(statement):
        _TAKE[kind](course, keys, statement)
    return course


def _check_signer(line: Line, public: str) -> None:
    if line.signer != public:
        raise RecordError(f"the signature is not one of key {public[:12]}…")


def _check_bounds(manifest: Mapping[str, Any]) -> None:
    """Raise `RecordError` for a run of more ranks or pieces than any run file may ask for.

    The judges of a record iterate over its stages, shards and pieces, so these must be bounded.
    """
    try:
        config = manifest["config"]
        ranks = [config["site"]["stages"], config["site"]["shards"]]
        pieces = config["outer"]["fragments"]
    except (KeyError, TypeError):
        raise RecordError("the manifest's run file is malformed") from None
    for number in (*ranks, pieces):
        if type(number) is not int or not 1 <= number <= MOST_RANKS:
            raise RecordError(f"the manifest's run file has {str(number)[:20]} stages, shards or "
                              f"fragments; a run has 1 to {MOST_RANKS}")  # fmt: skip
    if math.prod(ranks) > MOST_RANKS:
        raise RecordError(f"the manifest's run file has {math.prod(ranks)} ranks in a site; a run "
                          f"has {MOST_RANKS} at the most")  # fmt: skip


def _again(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    raise RecordError("a second manifest")


def _enrolled(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    said = statement.predicate
    if not _SITE.fullmatch(str(said["site"])):
        raise RecordError(f"site {str(said['site'])[:40]!r}: not a name that a run file can give")
    course.keys.enrolled(str(said["site"]), str(said["key"]))
    keys[str(said["site"])] = str(said["key"])
    course.enrolments.append(said)
    course.accepted.discard(str(said["site"]))
    course.starts.setdefault(str(said["site"]), []).append(course.read)


def _accepted(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    found = Acceptance.of(statement, course.read)
    course.acceptances.append(found)
    course.accepted.add(found.site)


def _stood(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.keys.standing(statement.predicate)


def _committed(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    said, subjects = statement.predicate, statement.subjects
    key = _key_of(said)
    found = commitment_of(subjects, course.read)
    where = (key.text, str(said["site"]), int(said["shard"]))
    known = course.commitments.get(where)
    if known is None or known.number < course.since:
        course.commitments[where] = found
    elif (known.values, known.payload) != (found.values, found.payload):
        raise RecordError(f"{said['site']} has committed to two contributions to {key.text}")


_parsed = functools.lru_cache(maxsize=1024)(ExchangeKey.parse)
"""Cached parser, because all ranks of all sites name the same exchanges."""


def _key_of(said: Mapping[str, Any]) -> ExchangeKey:
    key = _parsed(said["exchange_key"])
    if int(said["round"]) != key.round:
        raise RecordError(f"{said['site']}'s contribution to {key.text} names another round")
    return key


def _contributed(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    said = statement.predicate
    key, attempt = _key_of(said), int(said["attempt"])
    where = (key.text, attempt, str(said["site"]), int(said["shard"]))
    course.contributions[where] = statement.subjects["payload"]
    if course.votes.get((key.text, attempt), -1) < course.since:
        course.votes[key.text, attempt] = course.read


def _stepped(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    step = packed_step(Step.of(statement))
    course.recommitments.stepped(step, course.commitments, course.shards)
    if step.key.text not in course.steps:
        course.first_numbers[step.key.text] = course.read
    course.steps[step.key.text] = step
    course.numbers[step.key.text] = course.read


def _planned(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    plan = RoundPlan.model_validate(statement.predicate["plan"])
    course.plans[plan.round] = plan.model_dump(mode="json")


def _began(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    state = RoundState.of(statement, course.read)
    key = (state.round, state.site, state.stage, state.shard)
    known = course.rounds.get(key)
    # The first statement counts, so that a site which knows what is audited cannot choose another
    # state. After a resume sites may sign once more, because they may be on other machines.
    if known is None:
        course.rounds[key] = state
    elif key in course.again:
        course.again.remove(key)
        course.rounds[key] = replace(state, steps=state.steps or known.steps)


def _held(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.states.append(State.of(statement, course.read))


def _anchored(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.anchors.append(AnchorState.of(statement))


def _attested(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.attestations.append(Attestation.of(statement, course.read))


def _reported(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    found = Report.of(statement)
    course.reports.setdefault((found.kind, found.round, found.site), set()).add(found.digest)


def _kept(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    found = Custody.of(statement)
    try:
        code = PieceCode.of_run(course.config)
    except (KeyError, TypeError, ValueError, AttributeError):
        code = None  # the claim `availability` says what is malformed
    problem = None if code is None else found.problem(code)
    if problem is None:
        course.custody.add(found)
    else:
        course.wrong_custody.append(f"statement {course.read}, custody of {found.site}: {problem}")


def _judged(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.verdicts.append(HandedIn.of(statement, course.read))


def _resumed(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    tick = int(statement.predicate["tick"])
    course.since = course.read
    course.resumes.append(course.read)
    course.slots.append(tick)
    course.recommitments.resumed(tick, course.commitments, course.steps)
    course.steps = {key: step for key, step in course.steps.items() if step.tick <= tick}
    # Contributions to an exchange that begins anew do not count for the new exchange.
    course.contributions.keep(course.steps)
    course.votes = {key: first for key, first in course.votes.items() if key[0] in course.steps}
    course.states = [state for state in course.states if state.kind == "initial"]
    course.plans = {n: plan for n, plan in course.plans.items() if plan["first_tick"] <= tick}
    course.rounds = {key: state for key, state in course.rounds.items() if state.tick <= tick}
    course.anchors = [state for state in course.anchors if state.tick <= tick]
    first = int(statement.predicate["round"])
    course.reports = {key: each for key, each in course.reports.items() if key[1] < first}
    course.again = {key for key, state in course.rounds.items() if state.tick == tick}


_TAKE = {
    s.MANIFEST: _again,
    s.ENROLMENT: _enrolled,
    s.ACCEPTANCE: _accepted,
    s.STANDING: _stood,
    s.COMMITMENT: _committed,
    s.CONTRIBUTION: _contributed,
    s.STEP: _stepped,
    s.PLAN: _planned,
    s.ROUND: _began,
    s.CHECKPOINT: _held,
    s.ANCHOR: _anchored,
    s.ATTESTATION: _attested,
    s.REPORT: _reported,
    s.CUSTODY: _kept,
    s.VERDICT: _judged,
    s.RESUME: _resumed,
}
