"""What the statements of a log say that happened in a run. Pure: nothing is read or replayed.

A run that was resumed left a course behind: what began after the resume's tick does not count any
more, and of what was decided again the later decision does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.config.methods import EXCHANGE_GRADIENTS
from dilocox.config.site import MOST_RANKS, SITE_NAME
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance, digest_of_entry, is_bound, run_of
from dilocox.record.log.packed import Commitments, Contributions, packed_step
from dilocox.record.log.reader import Line, read_lines
from dilocox.record.log.recommitments import Recommitments, commitment_of
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.site_keys import SiteKeys
from dilocox.record.log.state_statements import (
    AnchorState,
    Attestation,
    Report,
    RoundState,
    State,
    whole,
)
from dilocox.record.log.step_statements import Step
from dilocox.record.log.verdict_statements import HandedIn

_SITE = re.compile(SITE_NAME)
MOST_TYPES = 100
"""Unknown types of statements that are named; a stranger's log may have any number of them."""


@dataclass
class RunHistory:
    """A whole run."""

    run: str
    log: str
    """The log's key."""
    manifest: Mapping[str, Any]
    enrolments: list[Mapping[str, Any]] = field(default_factory=list)
    acceptances: list[Acceptance] = field(default_factory=list)
    """What sites have signed when they joined, in the log's order."""
    accepted: set[str] = field(default_factory=set)
    """Sites that have signed one since they were let in last."""
    unaccepted: dict[str, int] = field(default_factory=dict)
    """By site: the first statement that the site has signed without an acceptance under that key.
    Sites of an older dilocox signed none."""
    first: str = ""
    """SHA-256, hex, of the log's first entry."""
    keys: SiteKeys = field(default_factory=SiteKeys)
    starts: dict[str, list[int]] = field(default_factory=dict)
    """By site: which statements of the log are its enrolments, from 0: each begins its ranks."""
    steps: dict[str, Step] = field(default_factory=dict)
    """By exchange key, as they stand at the end."""
    contributions: Contributions = field(default_factory=Contributions)
    """SHA-256 of payloads by (exchange key, attempt, site, shard)."""
    commitments: Commitments = field(default_factory=Commitments)
    """By (exchange key, site, shard)."""
    votes: dict[tuple[str, int], int] = field(default_factory=dict)
    """Which statement was the first contribution to an (exchange key, attempt)."""
    since: int = 0
    """Statements before the latest resume."""
    resumes: list[int] = field(default_factory=list)
    """Which statements are resumes."""
    slots: list[int] = field(default_factory=list)
    """Which slots they go back to."""
    recommitments: Recommitments = field(default_factory=Recommitments)
    """What was committed to anew after a resume."""
    begun: int | None = None
    """Which statement was the first that commits to something trained, or decides on it."""
    states: list[State] = field(default_factory=list)
    plans: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """By round, where rounds can be repeated; as `RoundPlan` says them."""
    rounds: dict[tuple[int, str, int, int], RoundState] = field(default_factory=dict)
    """By (round, site, stage, shard)."""
    again: set[tuple[int, str, int, int]] = field(default_factory=set)
    """Keys of `rounds` that may be signed once more, since the run was resumed there."""
    anchors: list[AnchorState] = field(default_factory=list)
    """States that a replay may begin from."""
    attestations: list[Attestation] = field(default_factory=list)
    reports: dict[tuple[str, int, str], set[str]] = field(default_factory=dict)
    """SHA-256 of what a site has reported, by (kind, round, site)."""
    verdicts: list[HandedIn] = field(default_factory=list)
    """What auditors have handed in, of all courses."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Which statement of the log has decided an exchange, by its key."""
    read: int = 0
    """Statements so far."""
    unknown: int = 0
    """Statements of types that this version does not know."""
    unknown_types: set[str] = field(default_factory=set)
    """Some of these types."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What all sites had agreed on."""
        found: Mapping[str, Any] = self.manifest["config"]
        return found

    @property
    def bound(self) -> bool:
        """The run's id is the digest of its manifest."""
        return is_bound(self.manifest)

    @property
    def states_every(self) -> int:
        """Rounds from one state that is kept to the next; 0: none is."""
        return int(self.config["record"].get("states_every", 0))

    @property
    def keep(self) -> int | str:
        """What of the payloads stays, as `record.keep` says; `all` if nothing was removed by it.

        With "auto", which runs from before there was the key go on with, a model that is large
        enough signs anchors before anything is removed.
        """
        found: int | str = self.config.get("record", {}).get("keep", "auto")
        by_gradient = self.config["outer"].get("method") in EXCHANGE_GRADIENTS
        return "all" if by_gradient or (found == "auto" and not self.anchors) else found

    def keeps_state(self, round_: int) -> bool:
        """Whether the state in which a planned round begins is kept; that of the flush always,
        but in runs of before it was."""
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
        """What the outer momentum is kept in; runs from before there was a choice kept fp32."""
        return str(self.config.get("outer", {}).get("momentum_dtype", "fp32"))

    @property
    def pieces(self) -> int:
        """Pieces of each stage, runs of which are exchanged as fragments."""
        return int(self.config["outer"]["fragments"])

    def began_again(self, site: str, after: int, before: float = math.inf) -> bool:
        """Whether the ranks of a site were started between two statements."""
        return any(after < number < before for number in self.starts.get(site, ()))

    def contributed(self, site: str, stage: int, shard: int, round_: int) -> bool:
        """Whether a rank has signed a contribution to an exchange of a round, in any attempt."""
        keys = (key for key, _, *who in self.contributions if who == [site, shard])
        found = map(ExchangeKey.parse, keys)
        return any((key.stage, key.round) == (stage, round_) for key in found)

    def of(self, stage: int) -> list[Step]:
        """The outer steps of a stage, in the order in which they land on any piece."""
        found = [step for step in self.steps.values() if step.key.stage == stage]
        return sorted(found, key=lambda step: (step.key.round, step.key.fragment))

    def state(self, kind: str, stage: int) -> list[State]:
        """What the sites have signed of a stage; `initial`: what the run began from, if that is
        signed.

        A site that makes theta_0 may die before anything is trained, and the next makes another:
        what counts is signed before the first commitment, by a site that was there until then. Of
        several it is the first in the run file's order that begins a run.
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
    """What a log's entries say, each signed by whom it has to be and about this run; signatures are
    checked on all cores.

    Raises `RecordError` naming the first entry that is not.
    """
    reader = HistoryReader(key)
    reader.take(entries)
    return reader.course


class HistoryReader:
    """Reads the entries of a log that grows."""

    def __init__(self, key: NoteKey) -> None:
        self._key = key
        self._keys: dict[str, str] = {}
        self._course: RunHistory | None = None

    @property
    def course(self) -> RunHistory:
        """What was read so far. Raises `RecordError` if that is nothing."""
        if self._course is None:
            raise RecordError("the log holds no statement")
        return self._course

    def take(self, entries: Iterable[str]) -> None:
        """Read the entries that follow. Raises `RecordError` naming the first bad one."""
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

    Everybody who judges a record goes through its stages, shards and pieces.
    """
    try:
        config = manifest["config"]
        ranks = [config["site"]["stages"], config["site"]["shards"]]
        pieces = config["outer"]["fragments"]
    except (KeyError, TypeError):
        raise RecordError("the manifest's run file is not whole") from None
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
"""Every rank of every site names the same exchange."""


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
    course.steps[step.key.text] = step
    course.numbers[step.key.text] = course.read


def _planned(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    plan = RoundPlan.model_validate(statement.predicate["plan"])
    course.plans[plan.round] = plan.model_dump(mode="json")


def _began(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    state = RoundState.of(statement, course.read)
    key = (state.round, state.site, state.stage, state.shard)
    known = course.rounds.get(key)
    # The first counts: who has seen what is audited is not to choose another state. Where a run
    # was resumed its sites begin again, perhaps on other machines.
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
    course.attestations.append(Attestation.of(statement))


def _reported(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    found = Report.of(statement)
    course.reports.setdefault((found.kind, found.round, found.site), set()).add(found.digest)


def _judged(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    course.verdicts.append(HandedIn.of(statement, course.read))


def _resumed(course: RunHistory, keys: dict[str, str], statement: s.Statement) -> None:
    tick = int(statement.predicate["tick"])
    course.since = course.read
    course.resumes.append(course.read)
    course.slots.append(tick)
    course.recommitments.resumed(tick, course.commitments, course.steps)
    course.steps = {key: step for key, step in course.steps.items() if step.tick <= tick}
    # What was signed for an exchange that begins anew is no part of it.
    course.contributions.keep(course.steps)
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
    s.VERDICT: _judged,
    s.RESUME: _resumed,
}
