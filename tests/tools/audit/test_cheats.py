"""What a site may do instead of its work, and at which step an audit says that it began.

One run: paris is honest, lyon cheats in another way in every round. Every round begins from a state
that lyon has signed, so each is judged by itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.support.neighbours import STEPS, Neighbour, trained_in

from dilocox.compression import Compressor
from dilocox.compression.second_moments import due_rows
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import blob_store as stores
from dilocox.record.log import bounded_reads
from dilocox.record.log.audit_verdicts import Verdict
from dilocox.record.log.blob_store import Store
from dilocox.record.log.round_document import Document
from dilocox.record.verify.audit_sampling import due_rounds
from dilocox.tools.audit import judge as judging
from dilocox.tools.audit import round_replay as replaying
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import judge
from dilocox.tools.audit.round_replay import Progress, RankJob, RankReplay, repeat
from dilocox.training import builder


def around_step(
    number: int, before: Callable[[Neighbour], Any], after: Callable[[Neighbour, Any], object]
) -> Callable[[Neighbour], Any]:
    """Do something before and after one inner step of the round."""

    @contextmanager
    def cheat(site: Neighbour) -> Iterator[None]:
        model, taken = site.rank.model, iter(range(STEPS))
        step = model.inner_step

        def inner_step(*given: Any) -> Any:
            if next(taken) != number:
                return step(*given)
            kept = before(site)
            result = step(*given)
            after(site, kept)
            return result

        model.inner_step = inner_step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.inner_step

    return cheat


def copies(site: Neighbour) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    live = {name: each.detach().clone() for name, each in site.rank.live.items()}
    inner = {name: each.clone() for name, each in site.rank.model.optimizer_state().items()}
    return live, inner


@torch.no_grad()
def put_back(site: Neighbour, kept: tuple[dict[str, torch.Tensor], Any]) -> None:
    for name, each in site.rank.live.items():
        each.copy_(kept[0][name])
    site.rank.model.load_optimizer_state(kept[1])


@torch.no_grad()
def forget(site: Neighbour) -> None:
    for name, each in site.rank.model.optimizer_state().items():
        if name.startswith("exp_avg/"):
            each.mul_(0.5)


@contextmanager
def other_rate(site: Neighbour) -> Iterator[None]:
    """From the third step on."""
    model, taken = site.rank.model, iter(range(STEPS))
    step = model.inner_step

    def inner_step(inputs: Any, labels: Any, rate: float, *more: Any) -> Any:
        return step(inputs, labels, rate * (1.05 if next(taken) >= 2 else 1.0), *more)

    model.inner_step = inner_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.inner_step


def other_text(change: Callable[[Any, list[tuple[int, int]], int, int], Any]) -> Any:
    @contextmanager
    def cheat(site: Neighbour) -> Iterator[None]:
        batches = site.trainer.batches
        read = batches.step

        def step(ranges: Any, batch: int, number: int, members: Any = ()) -> Any:
            assert not members, "these sites exchange no gradients"
            return change(read, ranges, batch, number)

        batches.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del batches.step

    return cheat


def shard(read: Any, ranges: Any, batch: int, number: int) -> Any:
    """A site's share of another site's text."""
    (start, count) = ranges[0]
    return read([(start + 5000, count)], batch, number)


def swapped(read: Any, ranges: Any, batch: int, number: int) -> Any:
    return read(ranges, batch, {1: 2, 2: 1}.get(number, number))


def half(read: Any, ranges: Any, batch: int, number: int) -> Any:
    found = read(ranges, batch, number)
    if number == 3:
        inputs, labels = (torch.cat([each[: batch // 2]] * 2) for each in found[:2])
        return found._replace(inputs=inputs, labels=labels)
    return found


@contextmanager
def stale(site: Neighbour) -> Iterator[None]:
    """What lands at the third slot's end is not taken up: it trains on from its own."""
    outer, slots = site.outer, iter(range(1, STEPS + 1))
    end = outer.end_of_slot

    def end_of_slot(plan: Any, slot: int) -> bool:
        number = next(slots)
        kept = copies(site)
        owner = end(plan, slot)
        if number == 3:
            put_back(site, kept)
        return owner

    with patch.object(outer, "end_of_slot", end_of_slot):
        yield


@contextmanager
def residual(site: Neighbour) -> Iterator[None]:
    """The residual is made larger just before the boundary at the second slot's end."""
    outer, slots = site.outer, iter(range(1, STEPS + 1))
    end = outer.end_of_slot

    def end_of_slot(plan: Any, slot: int) -> bool:
        if next(slots) == 2:
            for state in outer.states:
                assert state.residual is not None
                state.residual.mul_(3.0)
        return end(plan, slot)

    with patch.object(outer, "end_of_slot", end_of_slot):
        yield


@contextmanager
def poison(site: Neighbour) -> Iterator[None]:
    """Honest steps; what is sent has another sign."""
    site.change = lambda u: -u
    try:
        yield
    finally:
        site.change = lambda u: u


@contextmanager
def other_moments(site: Neighbour) -> Iterator[None]:
    """It says that its second moments are large, so that the others' steps get smaller."""

    def tell(compressor: Compressor) -> Compressor:
        due = due_rows(compressor.geometry)
        return compressor.carrying(torch.full((due,), 200, dtype=torch.uint8))

    site.tell = tell
    try:
        yield
    finally:
        site.tell = lambda compressor: compressor


@contextmanager
def between_rounds(site: Neighbour) -> Iterator[None]:
    """The moments are changed when the round is over: the next one begins from others."""
    yield
    forget(site)


CHEATS: dict[str, tuple[Any, int, str]] = {
    "skipped step": (around_step(2, copies, put_back), 2, "other parameters"),
    "wrong learning rate": (other_rate, 2, "other parameters"),
    "other shard": (other_text(shard), 0, "loss"),
    "swapped batches": (other_text(swapped), 1, "loss"),
    "half a batch": (other_text(half), 3, "loss"),
    "stale base": (stale, 3, "loss"),
    "tampered optimizer": (around_step(1, forget, lambda *_: None), 1, "other parameters"),
    "changed between rounds": (between_rounds, STEPS - 1, "inner/exp_avg/"),
    "tampered residual": (residual, 1, "another payload"),
    "other moments": (other_moments, 1, "another payload"),
    "poison": (poison, 1, "another payload"),
}
"""The cheat, the first bad step, and what is said of it."""
ROUND_OF = {name: number + 1 + (name == "poison") for number, name in enumerate(CHEATS)}
"""One after the other, but what a changed residual has sent is to land before the last begins."""
ROUNDS = ROUND_OF["poison"] + 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cheats = {ROUND_OF[name]: cheat for name, (cheat, _, _) in CHEATS.items()}
    return trained_in(tmp_path_factory.mktemp("cheats"), ROUNDS, cheats)


def here(jobs: Sequence[RankJob], progress: Progress) -> list[RankReplay]:
    """Repeat in this process: all sites have one rank."""
    return [repeat(job, progress) for job in jobs]


def audit(folder: Path, site: str, round_: int) -> Verdict:
    return judge(AuditedRun(folder, (), None).case(), site, round_, here, lambda step: None)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found_at_its_first_step(trained: Path, name: str) -> None:
    _, first, said = CHEATS[name]
    verdict = audit(trained, "lyon", ROUND_OF[name])
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", first), verdict
    assert said in verdict.reason
    assert verdict.same_class


@pytest.mark.parametrize(("site", "round_"), [("paris", 3), ("paris", 11), ("lyon", 0)])
def test_honest_rounds_are_exact(trained: Path, site: str, round_: int) -> None:
    """With overlap and error feedback; beside a cheat; and what is under way at the beginning."""
    verdict = audit(trained, site, round_)
    assert verdict.verdict == "EXACT", verdict
    # Two boundaries; in later rounds one exchange is under way at the beginning.
    assert verdict.reason == f"{STEPS} steps, {2 if round_ == 0 else 3} payloads, the same bits"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The run, whose store may be changed."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    return folder


def object_of(folder: Path, round_: int, name: str = "") -> Path:
    """Of lyon's state: its document, or a tensor."""
    course = AuditedRun(folder, (), None).course
    state = course.rounds[(round_, "lyon", 0, 0)]
    store = Store(str(folder / "record" / "store"))
    digest = state.document
    if name:
        document = Document.from_bytes(store.get(digest))
        digest = next(each.sha256 for each in document.tensors if each.name == name)
        store = store.states(round_)
    return Path(store.path(digest))


@pytest.mark.parametrize("name", ["", "outer/0/residual"])
def test_a_withheld_state_fails(copied: Path, name: str) -> None:
    object_of(copied, 2, name).unlink()
    verdict = audit(copied, "lyon", 2)
    assert verdict.verdict == "FAIL"
    assert "withheld" in verdict.reason


def test_an_audit_reads_no_more_than_was_signed(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is anybody's: what it serves under a name may have no end."""
    few, read = 1 << 16, bounded_reads.read
    for module in (judging, replaying, stores):
        monkeypatch.setattr(module, "DOCUMENT_BYTES", few)
    most: dict[str, int] = {}

    def noted(files: Any, path: str, limit: int) -> bytes:
        most[path.replace("/", "")[-64:]] = limit
        return read(files, path, limit)

    monkeypatch.setattr(bounded_reads, "read", noted)
    assert audit(copied, "paris", 2).verdict == "EXACT"
    monkeypatch.setattr(bounded_reads, "read", read)
    course = AuditedRun(copied, (), None).course
    own = Store(str(copied / "record" / "store"))
    signed: dict[str, int] = {}
    for round_ in (2, 3):
        document = Document.from_bytes(own.get(course.rounds[(round_, "paris", 0, 0)].document))
        signed |= {each.sha256: each.size for each in document.tensors}
    assert {most[digest] - size for digest, size in signed.items() if digest in most} == {few}
    assert max(most.values()) <= 2 * sum(signed.values()) + few


def test_a_state_that_may_be_gone_is_not_audited(copied: Path) -> None:
    """With states_keep: those of older rounds are removed, and nobody is blamed."""
    case = AuditedRun(copied, (), None).case()
    case.course.config["record"]["states_keep"] = 2
    newest = max(case.course.plans)
    for round_ in (newest - 3, newest - 2):
        object_of(copied, round_, "outer/0/residual").unlink()
    gone, withheld = (judge(case, "lyon", n, here, lambda step: None)
                      for n in (newest - 3, newest - 2))  # fmt: skip
    assert (gone.verdict, withheld.verdict) == ("NOT_RUN", "FAIL"), (gone, withheld)
    assert "the states of 2 rounds are kept" in gone.reason


def test_a_state_that_is_not_the_signed_one_fails(copied: Path) -> None:
    path = object_of(copied, 2, "outer/0/residual")
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert audit(copied, "lyon", 2).verdict == "FAIL"


def test_a_state_that_was_signed_late_fails(trained: Path) -> None:
    """After the first payload that was made from it was decided on."""
    case = AuditedRun(trained, (), None).case()
    key = (2, "lyon", 0, 0)
    late = case.course.numbers["outer/2/0/0"] + 1
    case.course.rounds[key] = replace(case.course.rounds[key], number=late)
    verdict = judge(case, "lyon", 2, here, lambda step: None)
    assert verdict.verdict == "FAIL"
    assert "only after what was made from it" in verdict.reason


def test_a_reference_that_is_not_theta_0_is_found(tmp_path: Path) -> None:
    """Contributions are taken from it: what is added there is in the payload, and repeated."""

    @contextmanager
    def moved(site: Neighbour) -> Iterator[None]:
        for state in site.outer.states:
            state.reference.add_(0.1)
        yield

    folder = trained_in(tmp_path, 1, {0: moved})
    verdict = audit(folder, "lyon", 0)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict
    assert "the reference of piece 0 is not theta_0" in verdict.reason


@pytest.fixture(scope="module")
def flushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last payloads lyon makes from a residual that it has changed."""

    @contextmanager
    def poisoned(site: Neighbour) -> Iterator[None]:
        for state in site.outer.states:
            assert state.residual is not None
            state.residual.add_(0.1)
        yield

    return trained_in(tmp_path_factory.mktemp("flushed"), 2, {}, flush=poisoned)


def test_the_flush_is_repeated_like_a_round(flushed: Path) -> None:
    """What is sent there is in the model as it is: nothing is trained after it."""
    verdict = audit(flushed, "paris", 2)
    assert verdict.verdict == "EXACT", verdict
    assert verdict.reason.startswith("0 steps, ")
    verdict = audit(flushed, "lyon", 2)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict
    assert "another payload of outer/2/0/0" in verdict.reason


def test_a_flush_of_before_its_state_was_kept_is_not_audited(flushed: Path) -> None:
    case = AuditedRun(flushed, (), None).case()
    assert due_rounds(case.course) == [0, 1, 2]
    manifest = {**case.course.manifest, "flush_states": False}
    object.__setattr__(case.course, "manifest", manifest)
    assert due_rounds(case.course) == [0, 1]
    assert judge(case, "lyon", 2, here, lambda step: None).verdict == "NOT_RUN"


@pytest.mark.parametrize("what", ["no fingerprints", "nothing"])
def test_an_end_that_was_not_signed_fails(trained: Path, what: str) -> None:
    """A state that is changed between two rounds shows at the end of the first, and there alone."""
    case = AuditedRun(trained, (), None).case()
    end = case.course.rounds[(3, "lyon", 0, 0)]
    if what == "nothing":
        del case.course.rounds[(3, "lyon", 0, 0)]
    else:
        case.course.rounds[(3, "lyon", 0, 0)] = replace(end, steps=None)
    verdict = judge(case, "lyon", 2, here, lambda step: None)
    assert verdict.verdict == "FAIL", verdict
    assert "withheld" in verdict.reason
    # Another rank of the site may be further: it is this one's contribution that follows a state.
    elsewhere = {
        where: digest
        for where, digest in case.course.contributions.items()
        if (where[2], ExchangeKey.parse(where[0]).round) != ("lyon", 3)
    }
    own, case.course.contributions = case.course.contributions, elsewhere
    if what == "nothing":
        assert judge(case, "lyon", 2, here, lambda step: None).verdict != "FAIL"
    case.course.contributions = own
    # Ranks that were started in between had nothing to sign.
    case.course.starts["lyon"].append(end.number - 1)
    verdict = judge(case, "lyon", 2, here, lambda step: None)
    assert verdict.verdict != "FAIL", verdict


def computing_in(precision: str, began: Any) -> Any:
    facts = {**began.start.facts, "precision": precision}
    return replace(began, start=replace(began.start, facts=facts))


@pytest.fixture
def says_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites have signed that they compute in bf16."""
    begin = judging._signed_round
    monkeypatch.setattr(
        judging, "_signed_round", lambda *given: computing_in("bfloat16", begin(*given))
    )


def test_another_precision_than_was_agreed_fails(trained: Path, says_bf16: None) -> None:
    """In bf16 another class may differ as it likes: that is not the site's to choose."""
    verdict = audit(trained, "paris", 3)
    assert verdict.verdict == "FAIL"
    assert "computes in bfloat16; the run file says float32" in verdict.reason


def test_other_values_than_were_committed_to(trained: Path) -> None:
    """The payload alone may hide it: low-rank codecs drop most of what they are given."""
    case = AuditedRun(trained, (), None).case()
    where = ("outer/3/0/0", "paris", 0)
    said = case.course.commitments[where]
    case.course.commitments[where] = replace(said, values="00" * 32)
    verdict = judge(case, "paris", 3, here, lambda step: None)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", 1), verdict
    assert "another contribution to outer/3/0/0 than it had committed to" in verdict.reason


# --- between classes ---------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The auditor's machine is another."""
    monkeypatch.setattr(replaying, "facts_here", lambda *given: {"machine": "another"})


def test_other_moments_are_found_between_classes(trained: Path, elsewhere: None) -> None:
    """The values are the same; only what is said behind them is not."""
    verdict = audit(trained, "lyon", ROUND_OF["other moments"])
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", 1), verdict
    assert "carries other second moments" in verdict.reason


def rates_off_by(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A repetition computes a little otherwise, as another processor would."""
    rate = builder.learning_rate
    monkeypatch.setattr(builder, "learning_rate", lambda *given: rate(*given) * (1.0 + share))


def test_equal_bits_are_exact_in_every_class(trained: Path, elsewhere: None) -> None:
    verdict = audit(trained, "paris", 3)
    assert (verdict.verdict, verdict.same_class) == ("EXACT", False)


@pytest.mark.parametrize(
    ("share", "expected"), [(1e-6, "WITHIN_TOL"), (1e-2, "MISMATCH")], ids=["tiny", "not tiny"]
)
def test_differences_between_classes(
    trained: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch, share: float, expected: str
) -> None:
    rates_off_by(monkeypatch, share)
    verdict = audit(trained, "paris", 3)
    assert (verdict.verdict, verdict.same_class) == (expected, False), verdict
    assert verdict.difference is not None
    assert (0.0 < verdict.difference < 1e-4) == (expected == "WITHIN_TOL")


def test_the_same_differences_in_one_class(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates_off_by(monkeypatch, 1e-6)
    assert audit(trained, "paris", 3).verdict == "MISMATCH"


@pytest.mark.parametrize(
    "name", ["skipped step", "wrong learning rate", "tampered optimizer", "changed between rounds"]
)
def test_cheats_are_found_from_another_class(trained: Path, elsewhere: None, name: str) -> None:
    verdict = audit(trained, "lyon", ROUND_OF[name])
    assert verdict.verdict == "MISMATCH", verdict
    assert verdict.first_bad_step is not None
    assert verdict.first_bad_step >= CHEATS[name][1]


def test_bf16_between_classes_says_nothing(
    trained: Path, elsewhere: None, says_bf16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_off_by(monkeypatch, 1e-2)
    job = judging._job
    monkeypatch.setattr(
        judging, "_job", lambda case, began, plan: job(case, computing_in("float32", began), plan)
    )
    verdict = audit(trained, "paris", 3)
    assert verdict.verdict == "NOT_RUN"
    assert "in bf16 honest differences say nothing" in verdict.reason
