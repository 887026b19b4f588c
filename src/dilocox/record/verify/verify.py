"""`verify`: judges every claim about a run from its log, its store and a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.config.methods import exchanges_gradients
from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log.audit_verdicts import FOLDER
from dilocox.record.log.blob_store import DOCUMENT_BYTES, MissingError, Store, Stores
from dilocox.record.log.run_file_check import agreed_run
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.state_statements import State
from dilocox.record.log.transparency_log import (
    LogContent,
    as_signed,
    check_grown,
    check_log,
    open_log,
)
from dilocox.record.verify import claims as c
from dilocox.record.verify.acceptance_claims import accepted, accepted_code
from dilocox.record.verify.audit_claims import Audits
from dilocox.record.verify.availability_claim import judge_availability
from dilocox.record.verify.completeness import broken_commitments, gaps, need_extensions
from dilocox.record.verify.counts import told_commitments, told_complete, told_signers
from dilocox.record.verify.further_claims import further
from dilocox.record.verify.machine_claims import machine_checks
from dilocox.record.verify.model_files import check_other_files, check_plain_files, published_files
from dilocox.record.verify.outside_claims import outside
from dilocox.record.verify.places import Places
from dilocox.record.verify.rebuilt_payloads import rebuilt_payloads
from dilocox.record.verify.release_signature import check_release, is_released
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.record.writer.notary import code_digest

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.record.log.digests import TensorDigest
    from dilocox.record.log.step_statements import Step
    from dilocox.record.verify.origins import Origin
    from dilocox.record.verify.replay import Stage

Progress = Callable[[str, float], None]
"""Callback (name of the activity, share of it done from 0 to 1)."""


@dataclass
class Report:
    """The verdicts of one verification."""

    run: str
    log: str
    """The log's key."""
    statements: int
    rounds: int
    checkpoint: str
    """The log's newest signed checkpoint, which the reader may keep for `--seen`."""
    findings: list[c.Finding]

    @property
    def exit_code(self) -> int:
        """See `exit_code` of `dilocox.record.verify.claims`."""
        return c.exit_code(self.findings)


def verify(places: Places, progress: Progress) -> Report:
    """Judge every claim of a record. Raises `RecordError` if there is no readable record."""
    return _Verification(places, open_log(places.run / "record"), progress).report()


@dataclass
class _Verification:
    places: Places
    content: LogContent
    progress: Progress
    course: RunHistory | None = None
    bad: dict[str, str] = field(default_factory=dict)
    """Verdicts other than PASS so far, by claim."""
    origins: dict[tuple[int, int], Origin] = field(default_factory=dict)
    """Start state of the replay, by (stage, shard); replays not listed start with theta_0."""

    def report(self) -> Report:
        folder = self.places.run / "record"
        own = str(folder / "store")
        self.stores = Stores([*map(Store, (own, *self.places.stores))], most=DOCUMENT_BYTES)
        checks: list[tuple[c.Claim, Callable[[], str]]] = [
            (c.LOG, self.log),
            (c.SIGNATURES, self.signatures),
            (c.COMPLETE, self.complete),
            (c.COMMITMENTS, self.commitments),
            (c.RUN_FILE, self.run_file),
            (c.PAYLOADS, self.payloads),
            (c.REPLAY, self.replay),
            (c.MODEL, self.model),
        ]
        if self.places.release_key is not None or is_released(self._model_folder()):
            checks.append((c.RELEASE, self.release))
        checks += [(c.DATA, self.data), (c.CODE, self.code)]
        agreed = partial(self._need, c.LOG, c.SIGNATURES)
        where = self.places.start, self.places.adapters, self.places.run
        checks += further(agreed, self._listing, self._get, *where, self.progress)
        findings = [self._judge(claim, check) for claim, check in checks]
        course = self.course
        if course is not None and course.keep != "all":
            findings.insert(7, self._judge(c.HISTORY, self.history))
        if self._trains_adapters():
            findings.append(self._judge(c.BASE, self.base))
        places = self.places
        if course is not None and (self._audited(course) or places.auditors):
            audits = Audits(
                course, self.content.entries, places.run, places.auditors, places.randomness
            )
            findings.append(self._judge(c.AUDITS, audits.verdicts))
            beacon = c.asked(c.BEACON) if places.randomness else c.BEACON
            findings.append(self._judge(beacon, audits.beacon))
        evidence = self.places.machines, course, agreed, self.content.entries, self._get
        findings += [self._judge(*each) for each in machine_checks(*evidence)]
        if course is not None and course.config.get("availability") is not None:
            findings.append(self._judge(c.AVAILABILITY, partial(judge_availability, course)))
        asked = self.places.chain, self.places.witnesses, self.places.run
        for claim, check in outside(*asked, self.content, course, agreed):
            findings.append(self._judge(claim, check))
        rounds = {step.key.round for step in course.steps.values()} if course else set()
        return Report(
            run=course.run if course else "",
            log=self.content.public,
            statements=len(self.content.entries),
            rounds=len(rounds),
            checkpoint=self.content.note,
            findings=findings,
        )

    def _trains_adapters(self) -> bool:
        return self.course is not None and self.course.config.get("adapter") is not None

    def _audited(self, course: RunHistory) -> bool:
        every = course.states_every
        return every > 0 or bool(course.verdicts) or (self.places.run / "record" / FOLDER).is_dir()

    def _judge(self, claim: c.Claim, check: Callable[[], str]) -> c.Finding:
        verdict: c.Verdict = "PASS"
        asked = self.places.asked(self._trains_adapters())
        claim = next((each for each in asked if each.name == claim.name), claim)
        try:
            reason = check()
        except c.NotRunError as why:
            verdict, reason = "NOT_RUN", str(why)
        except c.SimulatedError as told:
            verdict, reason = "SIMULATED", str(told)
        except DilocoxError as error:
            verdict, reason = "FAIL", str(error)
        if verdict != "PASS":
            self.bad[claim.name] = verdict
        return c.Finding(claim, verdict, reason)

    def _need(self, *claims: c.Claim) -> RunHistory:
        for claim in claims:
            if claim.name in self.bad:
                raise c.NotRunError(f"claim {claim.name} is {self.bad[claim.name]}")
        assert self.course is not None
        return self.course

    def log(self) -> str:
        """Judge: the log is what its key has signed."""
        key = NoteKey.parse(self.places.key or self.content.public)
        checkpoint = check_log(self.content, key)
        text = f"{checkpoint.size} statements, signed by {key.name}"
        if self.places.seen is not None:
            try:
                seen = self.places.seen.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RecordError(f"{self.places.seen}: cannot be read ({error})") from None
            text += f"; grown from the {check_grown(self.content, key, seen).size} seen"
        return text

    def signatures(self) -> str:
        """Judge: every statement is signed by the required key."""
        self._need_log()
        key = NoteKey.parse(self.content.public)
        self.course = read_history(as_signed(self.content, key), key)
        own = str(self.places.run / "record" / "store")
        self.stores.besides = rebuilt_payloads(self.course, [own, *self.places.stores])
        return told_signers(self.course)

    def _need_log(self) -> None:
        if c.LOG.name in self.bad:
            raise c.NotRunError(f"claim log is {self.bad[c.LOG.name]}")

    def complete(self) -> str:
        """Judge: no round and no signature is missing."""
        course = self._need(c.LOG, c.SIGNATURES)
        if not any(state.kind == "final" for state in course.states):
            raise c.NotRunError("no final state is signed: the run has not finished")
        need_extensions(course)
        if _by_gradient(course):
            return "theta_0 and the final state of every stage"
        problems = gaps(course)
        if problems:
            raise RecordError(f"{problems[0]}{_more(len(problems) - 1)}")
        return told_complete(course)

    def commitments(self) -> str:
        """Judge: no contribution was made from another site's payload."""
        course = self._need(c.LOG, c.SIGNATURES)
        if _by_gradient(course):
            raise c.NotRunError("gradients are exchanged without commitments")
        if not course.manifest.get("commitments"):
            raise c.NotRunError("the run was recorded by a dilocox version without commitments")
        self._need(c.COMPLETE)
        problems = broken_commitments(course)
        if problems:
            raise RecordError(f"{problems[0]}{_more(len(problems) - 1)}")
        return told_commitments(course)

    def run_file(self) -> str:
        """Judge: `run.toml` is the run file of the run."""
        course = self._need(c.LOG, c.SIGNATURES)
        path = self.places.run / "run.toml"
        if not path.exists():
            raise c.NotRunError(f"{path}: not there")
        need_extensions(course)
        agreed_run(path, course.manifest)
        said = accepted(course, "which run file it was")
        return f"digest {course.manifest['config_digest'][:12]}…, {said}"

    def payloads(self) -> str:
        """Judge: every object that a replay needs is there."""
        from dilocox.record.verify.needed_payloads import Needed, read_needed
        from dilocox.record.verify.origins import may_lack, origins_of

        course = self._need(c.LOG, c.SIGNATURES)
        need_extensions(course)
        if may_lack(course, self._listing):
            self.origins = origins_of(course, self.stores.has, self._get)
        needed = Needed(self._get)
        done = partial(self.progress, "checking payloads")
        read_needed(course, self.origins, self._listing, needed, done)
        others = ", ".join(sorted(needed.others))
        odd = f"; not used: another list of final tensors, signed by {others}" if others else ""
        return f"{needed.count} objects, {needed.size / 1e6:.1f} MB{self._since()}{odd}"

    def _since(self) -> str:
        """Return a phrase with the rounds that the replay covers; empty if it covers all."""
        first = max((origin.state.round for origin in self.origins.values()), default=0)
        return f", of rounds from {first} on" if self.origins else ""

    def history(self) -> str:
        """Judge: the replay begins with theta_0."""
        course = self._need(c.LOG, c.SIGNATURES, c.PAYLOADS)
        if not self.origins:
            return "the payloads of all rounds are there"
        last = max(origin.state.round for origin in self.origins.values()) - 1
        rounds = "round 0 is" if last == 0 else f"rounds 0 to {last} are"
        raise c.NotRunError(
            f"{rounds} not replayable: payloads were removed as record.keep = {course.keep} says; "
            f"the replay begins with a state that {self._signers()} signed"
        )

    def _signers(self, stage: int | None = None) -> str:
        """List the sites that signed start states of replays, of one stage or of all (None)."""
        from dilocox.record.verify.origins import signers

        course = self._need(c.LOG, c.SIGNATURES)
        found = {
            site
            for (number, _), origin in self.origins.items()
            if stage in (None, number)
            for site in signers(course, origin.state)
        }
        return ", ".join(sorted(found))

    def _get(self, digest: str) -> bytes:
        return self.stores.get(digest)

    def _listing(self, state: State) -> list[TensorDigest]:
        """Read the list of a signed state's tensors."""
        from dilocox.record.verify.replay import read_listing

        try:
            tensors = read_listing(self._get, state.listing, state.root)
        except MissingError as error:
            raise c.NotRunError(
                f"list of stage {state.stage}'s {state.kind} tensors: {error}; name site "
                f"{state.site}'s with --store"
            ) from None
        self.stores.allow(sum(each.size for each in tensors))
        return tensors

    def replay(self) -> str:
        """Judge: all outer steps lead from theta_0, or from a signed anchor, to the final state."""
        course = self._need(c.LOG, c.SIGNATURES)
        if _by_gradient(course):
            raise c.NotRunError(
                f"method {course.config['outer']['method']} exchanges the gradients of every inner "
                "step; there are no outer steps, and gradients are not kept"
            )
        self._need(c.COMPLETE, c.PAYLOADS)
        from dilocox.record.verify.replay import Stage, replay_stage

        done = 0
        total = len(course.steps) * course.shards

        def count() -> None:
            nonlocal done
            done += 1
            self.progress("replaying outer steps", done / total)

        for number in range(course.stages):
            state = course.state("initial", number)[-1]
            stage = Stage.of(course, number, self._listing(state))
            whole = replay_stage(course, stage, self._get, count, self._replay_of(stage, count))
            self._compare(course.state("final", number)[-1], whole)
        stages = f"{course.stages} stages"
        if self.origins:
            return f"outer steps of {stages}{self._since()}, equal bit for bit"
        return f"{len(course.steps)} outer steps of {stages}, equal bit for bit"

    def _replay_of(
        self, stage: Stage, count: Callable[[], None]
    ) -> Callable[[int, range, list[Step]], tuple[Tensor, Tensor]] | None:
        """Return the function that replays a shard's steps; None if all shards start at theta_0."""
        if not any(number == stage.stage for number, _ in self.origins):
            return None
        from dilocox.record.verify.origins import replay_from

        course = self._need(c.LOG, c.SIGNATURES)

        def replay(shard: int, run: range, steps: list[Step]) -> tuple[Tensor, Tensor]:
            origin = self.origins.get((stage.stage, shard))
            dtype = course.momentum_dtype
            return replay_from(origin, steps, stage, run, shard, self._get, dtype, count)

        return replay

    def _begun_from(self, stage: int) -> str:
        """Return a phrase on the signed anchor that a stage's replay began with; else empty."""
        first = max((o.state.round for (n, _), o in self.origins.items() if n == stage), default=-1)
        if first < 0:
            return ""
        who = self._signers(stage)
        return f"; the replay began with the anchor of round {first} that {who} signed"

    def _compare(self, signed: State, whole: dict[str, Tensor]) -> None:
        """Compare a replayed stage with the signed final state and with its published form.

        Raises `RecordError` if either differs.
        """
        from dilocox.record.log.digests import stage_root
        from dilocox.record.verify.replay import digests_of
        from dilocox.utils.rounding import round_to_bf16

        root = stage_root(digests_of(whole)).hex()
        if root != signed.root:
            raise RecordError(
                f"stage {signed.stage}: the payloads lead to state {root[:12]}…, "
                f"{signed.site} has signed {signed.root[:12]}…{self._begun_from(signed.stage)}"
            )
        if signed.published is None:
            return
        rounded = {name: round_to_bf16(tensor) for name, tensor in whole.items()}
        root = stage_root(digests_of(rounded)).hex()
        if root != signed.published[0]:
            raise RecordError(
                f"stage {signed.stage}: the final state, rounded to bf16, is {root[:12]}…, "
                f"{signed.site} has signed {signed.published[0][:12]}… as published"
            )

    def model(self) -> str:
        """Judge: the published folder holds the final state."""
        course = self._need(c.LOG, c.SIGNATURES)
        folder = self._model_folder()
        if not any(state.kind == "final" for state in course.states):
            raise c.NotRunError("no final state is signed: the run has not finished")
        if not folder.is_dir():
            raise c.NotRunError(f"{folder}: not there; give the model's folder with --model")
        if not all(course.state("final", stage) for stage in range(course.stages)):
            raise c.NotRunError("the final states of some stages are not signed")
        check_plain_files(folder)
        published = published_files(course.state("final", 0))
        check_other_files(folder, published)
        count, unsigned = self._tensors(folder)
        told = f"{count} tensors and {len(published)} other files of {folder}"
        if not unsigned:
            return told
        first, more = unsigned[0], f" and {len(unsigned) - 1} more" if len(unsigned) > 1 else ""
        return f"{told}; not {first}{more}: buffers that are not trained, and that nobody signs"

    def _model_folder(self) -> Path:
        return self.places.model or self.places.run / "model"

    def release(self) -> str:
        """Judge: the model's folder is what its release key has signed."""
        check_plain_files(self._model_folder())
        return check_release(self._model_folder(), self.places.release_key)

    def _tensors(self, folder: Path) -> tuple[int, list[str]]:
        """Compare the tensors of `folder` with the signed final states; see `published_model`."""
        from dilocox.record.verify.final_lists import published_list
        from dilocox.record.verify.published_model import (
            compare_adapters,
            compare_model,
            compare_tensors,
        )

        course = self._need(c.LOG, c.SIGNATURES)
        try:
            lists = [published_list(course, stage, self._get) for stage in range(course.stages)]
        except MissingError as error:
            raise c.NotRunError(f"{error}; name these sites' with --store") from None
        except RecordError:
            self._need(c.PAYLOADS)
            raise
        signed = [each for found in lists if found is not None for each in found.tensors]
        self.stores.allow(sum(each.size for each in signed))
        adapter = course.config.get("adapter")
        if adapter is not None:
            seed = int(course.config["run"]["seed"]) if adapter.get("freeze_a") else None
            return compare_adapters(folder, signed, seed, self.progress), []
        if course.config.get("model", {}).get("own"):
            return compare_tensors(folder, signed, self.progress), []
        return compare_model(folder, signed, self.progress)

    def base(self) -> str:
        """Judge: the base model here is the one on which the sites trained adapters."""
        from dilocox.record.verify.base_model import judge_base

        return judge_base(self._need(c.LOG, c.SIGNATURES), self.places.start, self.progress)

    def data(self) -> str:
        """Judge: the token files here are those that the sites named."""
        from dilocox.record.verify.token_files import judge_data

        course = self._need(c.LOG, c.SIGNATURES)
        return judge_data(course, self.places.data, self.places.run, self.progress)

    def code(self) -> str:
        """Judge: this dilocox has the code of the run."""
        course = self._need(c.LOG, c.SIGNATURES)
        theirs, ours = str(course.manifest["code"]), code_digest()
        if theirs != ours:
            version = course.manifest["versions"]["dilocox"]
            raise c.NotRunError(
                f"the run had dilocox {version} with code {theirs[:12]}…, this one has {ours[:12]}…"
            )
        return f"digest {ours[:12]}…; {accepted_code(course)}"


def _by_gradient(course: RunHistory) -> bool:
    return exchanges_gradients(course.config["outer"]["method"])


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
