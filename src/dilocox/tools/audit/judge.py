"""Judges one round of one site: compares what the site has signed with a replay of the round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dilocox.config.methods import exchanges_gradients
from dilocox.config.run_config import RunConfig
from dilocox.config.site import GradientSync, SiteSection
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, RecordError
from dilocox.inner.compilation import Compile
from dilocox.record.log.audit_verdicts import Verdict
from dilocox.record.log.blob_store import DOCUMENT_BYTES, MissingError, Store, Stores, states_of
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.round_document import Document, steps_from_bytes
from dilocox.record.log.state_statements import RoundState
from dilocox.record.verify.audit_sampling import decided, exchanges_of, sites_of
from dilocox.record.verify.origins import Has
from dilocox.record.verify.replay import Get
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.audit.base_check import base_problem
from dilocox.tools.audit.comparison import JudgedError, SignedRound, compared
from dilocox.tools.audit.round_replay import Progress, RankJob, RankReplay
from dilocox.tools.audit.start_state import under_way, wrong_start
from dilocox.tools.audit.state_document import (
    UNFIT,
    DocumentError,
    absent,
    other_code,
    replaced,
    unfit,
)
from dilocox.training.builder import Hooks, RankPlace

_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
"""Precision in a determinism class, by `site.precision`. `auto` is not in it: each site chooses."""

Repeat = Callable[[Sequence[RankJob], Progress], list[RankReplay]]
"""Function that replays a round with all ranks of a site, and returns their results in the order
of the jobs."""


@dataclass(frozen=True)
class Case:
    """A run whose rounds are judged, with the places of its files."""

    course: RunHistory
    config: RunConfig
    get: Get
    stores: tuple[str, ...]
    data: Path
    hooks: Hooks | None = None
    """The functions on which the run agreed (`run.code`). None: the auditor has not got them."""
    has: Has = lambda _: False
    """Returns whether a store holds an object with this SHA-256."""
    look_again: Callable[[], object] = lambda: None
    """Brings `course` up to date, if the run still goes on."""
    expect: Callable[[Iterable[TensorDigest]], None] = lambda _: None
    """Announces tensors that a site has signed, so that `get` reads at most their sizes."""

    def of_round(self, round_: int) -> Case:
        """Return the case with the stores of the states at the start of this and the next round."""
        stores = self.stores + tuple(
            states_of(where, number) for number in (round_, round_ + 1) for where in self.stores
        )
        found = Stores([Store(each) for each in stores], most=DOCUMENT_BYTES)
        return replace(self, stores=stores, get=found.get, has=found.has, expect=found.expect)


def judge(case: Case, site: str, round_: int, repeat: Repeat, progress: Progress) -> Verdict:
    """Return the verdict on one round of one site.

    `repeat`: replays the round. `progress`: called with the number of inner steps done.
    """
    case = case.of_round(round_)
    states: dict[str, str] = {}
    try:
        _check_possible(case, site, round_)
        _check_kept(case, round_)
        began = [_signed_round(case, site, place, round_) for place in _places(case.config, site)]
        states |= {f"{b.place.stage}/{b.place.shard}": b.state.document for b in began}
        _check_begun(case, began)
        plan = RoundPlan.model_validate(case.course.plans[round_])
        try:
            replays = repeat([_job(case, each, plan) for each in began], progress)
        except MissingError as error:
            raise _missing(case, round_, error) from None
        except DocumentError as error:
            raise JudgedError(*unfit(case.course, site, error)) from None
        except DilocoxError as error:
            raise JudgedError("NOT_RUN", f"the round cannot be repeated here: {error}") from None
        found = compared(case.config, site, round_, plan, began, replays)
    except JudgedError as judged:
        found = Verdict(site, round_, judged.verdict, judged.reason, judged.step)
    return replace(found, states=states)


def _places(config: RunConfig, site: str) -> list[RankPlace]:
    layout = config.site
    return [
        RankPlace(site, stage, shard)
        for stage in range(layout.stages)
        for shard in range(layout.shards)
    ]


def _check_possible(case: Case, site: str, round_: int) -> None:
    course, every = case.course, case.course.states_every
    method = course.config["outer"]["method"]
    if exchanges_gradients(method):
        raise JudgedError("NOT_RUN", f"method {method} exchanges gradients, which are not kept")
    if every == 0:
        raise JudgedError("NOT_RUN", "this run kept no states (record.states_every = 0)")
    if not decided(course, round_):
        raise JudgedError("NOT_RUN", "the log does not decide all exchanges of this round")
    if not course.keeps_state(round_):
        raise JudgedError("NOT_RUN", f"no state is kept of this round: every {every} rounds only")
    if site not in sites_of(course, round_):
        raise JudgedError("NOT_RUN", "the site did not train this round: nothing of it is in it")
    named = {str(each["data"]) for each in course.enrolments if each["site"] == site}
    if course.config["sites"][site]["data"]:
        raise JudgedError("NOT_RUN", "the site trains on text of its own, which does not leave it")
    try:
        digest = TokenFiles.open(case.data).digest
    except DilocoxError as error:
        raise JudgedError("NOT_RUN", f"{error}; say with --data where they are") from None
    if digest not in named:
        raise JudgedError("NOT_RUN", f"{case.data}: other token files than the site's")
    if why := base_problem(case.config, course.enrolments, site):
        raise JudgedError("NOT_RUN", why)


def _signed_round(case: Case, site: str, place: RankPlace, round_: int) -> SignedRound:
    """Return what a rank has signed about the round.

    Raises `JudgedError` if the rank has withheld a statement or a state, or if its state is no
    longer kept.
    """
    rounds = case.course.rounds
    where = (site, place.stage, place.shard)
    state, after = rounds.get((round_, *where)), rounds.get((round_ + 1, *where))
    if state is None or state.served == "no":
        raise JudgedError("FAIL", f"{place} has signed no state of this round: withheld")
    if state.served != "yes":
        raise JudgedError("FAIL", f"{place} withholds its state ({state.served}) without a reason")
    decisions = (
        case.course.numbers[key]
        for key in exchanges_of(case.course, round_)
        if ExchangeKey.parse(key).stage == place.stage
    )
    if state.number > min(decisions):
        raise JudgedError("FAIL", f"{place} has signed its state only after what was made from it")
    start = _document(case, state, place)
    missing, wrong = absent(start, case.get)
    if wrong is not None:
        raise JudgedError("FAIL", f"{place}: {wrong}")
    if missing is not None and _dropped(case, round_):
        keep = case.course.config["record"]["states_keep"]
        what = f"the states of {keep} rounds are kept (record.states_keep), newer ones than this"
        raise JudgedError("NOT_RUN", what)
    if missing is not None:
        raise JudgedError(
            "FAIL", f"{place}: {missing.name} of its state is not in the store: withheld"
        )
    steps, end = None, None
    course, before = case.course, math.inf if after is None else after.number
    # A rank that was restarted during the round has no fingerprints of all its steps.
    if not course.began_again(site, state.number, before):
        if after is not None and after.steps is None:
            raise JudgedError("FAIL", f"{place} has signed no fingerprints of its steps: withheld")
        if after is None and course.contributed(*where, round_ + 1):
            raise JudgedError("FAIL", f"{place} has not signed what the round ended in: withheld")
    if after is not None and after.steps is not None:
        try:
            steps = steps_from_bytes(case.get(after.steps))
        except RecordError as error:
            raise JudgedError("FAIL", f"{place}: its fingerprints: {error}") from None
        end = _document(case, after, place)
    own = _contributed(case.course, place, state)
    return SignedRound(place, state, start, steps, after, end, own)


def _contributed(course: RunHistory, place: RankPlace, state: RoundState) -> tuple[str, ...]:
    """Return the keys of the exchanges whose payloads of a rank a replay has to repeat.

    The log has a payload of the rank in the attempt that decided the exchange. Of exchanges that
    were in flight when the round began, only those count whose average has the payload: a rank that
    has lost its state since may have signed the other payloads before.
    """
    begun = [
        step
        for key in exchanges_of(course, state.round)
        if (step := course.steps[key]).key.stage == place.stage and step.set
    ]
    before = under_way(course, place.stage, state.round, state.tick)
    return tuple(
        step.key.text
        for step in (*begun, *(each for each in before if place.site in each.set))
        if (step.key.text, step.attempt, place.site, place.shard) in course.contributions
    )


def _document(case: Case, state: RoundState, place: RankPlace) -> Document:
    try:
        document = Document.from_bytes(case.get(state.document))
    except RecordError as error:
        raise JudgedError("FAIL", f"{place}: its state is withheld: {error}") from None
    if document.root != state.root:
        raise JudgedError("FAIL", f"{place}: its state has another root than it has signed")
    case.expect(document.tensors)
    return document


def _dropped(case: Case, round_: int) -> bool:
    """Return whether the round is so old that ranks may have deleted its states.

    A rank deletes states when it begins a round, and the log covers that round's plan by then.
    """
    keep = int(case.course.config["record"].get("states_keep", 0))
    if keep == 0:
        return False
    case.look_again()
    return max(case.course.plans) >= round_ + (keep + 1) * case.course.states_every


def _check_kept(case: Case, round_: int) -> None:
    """Raise `JudgedError` if payloads of the round were deleted because of `record.keep`."""
    course = case.course
    if course.keep == "all":
        return
    needed = [step for step in course.steps.values() if step.key.round == round_]
    tick = course.plans[round_]["first_tick"]
    for stage in range(course.stages):
        needed += under_way(course, stage, round_, tick)
    for step in needed:
        gone = next((each for each in step.payloads.values() if not case.has(each)), None)
        if gone is not None:
            raise _missing(case, round_, MissingError(f"a payload of {step.key.text} is gone"))


def _missing(case: Case, round_: int, error: MissingError) -> JudgedError:
    """Return the verdict on a round with missing payloads, which cannot be replayed."""
    keep = case.course.keep
    if keep == "all":
        return JudgedError("NOT_RUN", f"{error}; name more stores with --store")
    return JudgedError(
        "NOT_RUN",
        f"payloads that round {round_} needs are in no store: older ones are removed as "
        f"record.keep = {keep} says; name more stores with --store",
    )


def _check_begun(case: Case, began: Sequence[SignedRound]) -> None:
    for each in began:
        code = None if case.hooks is None else case.hooks.replaced
        if each.start.replaced and code is None:
            raise JudgedError(*replaced(case.course, each.place.site, each.start.replaced))
        if code is not None and sorted(each.start.replaced) != sorted(code):
            raise JudgedError(*other_code(case.course, each.place.site, each.start.replaced, code))
        try:
            wrong = wrong_start(case.course, each.place, each.state, each.start, case.get, case.has)
        except MissingError as error:
            raise _missing(case, each.state.round, error) from None
        except DilocoxError as error:
            raise JudgedError("NOT_RUN", str(error)) from None
        except UNFIT as error:
            what = f"{each.place}: its state is not one of this run ({error})"
            raise JudgedError("FAIL", what) from None
        if wrong:
            raise JudgedError("MISMATCH", f"{each.place}: before the first step {wrong}", -1)


def _job(case: Case, began: SignedRound, plan: RoundPlan) -> RankJob:
    facts = began.start.facts
    agreed = _PRECISIONS.get(case.config.site.precision)
    if agreed not in (None, facts.get("precision")):
        what = f"{began.place} says that it computes in {facts.get('precision')}"
        raise JudgedError("FAIL", f"{what}; the run file says {agreed}")
    try:
        on_gpu = facts["device"] != "cpu"
        site = case.config.site.model_copy(
            update={
                # The determinism class of a rank on a GPU has no number of processor threads.
                "threads": case.config.site.threads if on_gpu else int(facts["threads"]),
                "precision": {dtype: name for name, dtype in _PRECISIONS.items()}[
                    facts["precision"]
                ],
                "device": "auto" if on_gpu else "cpu",
                "gradient_sync": gradient_sync_again(case.config.site, facts),
            }
        )
    except (KeyError, TypeError, ValueError):
        raise JudgedError("FAIL", f"{began.place} names no determinism class") from None
    compiled = compile_again(case.config.model.compile, facts)
    model = case.config.model.model_copy(update={"compile": compiled})
    adapter = case.config.adapter
    if adapter is not None:
        # The state that is repeated from has all adapters: no folder of first ones is needed.
        adapter = adapter.model_copy(update={"handover": None, "path": None})
    served = began.after is not None and began.after.served == "yes"
    return RankJob(
        config=case.config.model_copy(update={"site": site, "model": model, "adapter": adapter}),
        place=began.place,
        course=case.course,
        plan=plan,
        start=began.start,
        end=began.end if served else None,
        stores=case.stores,
        data=case.data,
        hooks=case.hooks or Hooks(),
    )


def compile_again(agreed: Compile, facts: Mapping[str, Any]) -> Compile:
    """Return `model.compile` for the replay of a rank with the determinism class `facts`.

    Sites must agree on `true` only: one site may have `false` and another one "auto".
    """
    if agreed is True:
        return True
    return "auto" if facts.get("compile") else False


def gradient_sync_again(site: SiteSection, facts: Mapping[str, Any]) -> GradientSync:
    """Return `site.gradient_sync` for the replay of a rank with the determinism class `facts`.

    `auto` depends on the memory of the site's GPUs, and the auditor's GPUs may have more or less.
    """
    if site.gradient_sync != "auto" or site.stages > 1:
        return site.gradient_sync
    layout = facts.get("layout")
    whole = isinstance(layout, Mapping) and layout.get("gradient_sync") == "step"
    return "step" if whole else "micro-batch"
