"""What a site may sign so that a round cannot be repeated: an audit fails, or the site is named.

Lyon contributes noise throughout: an audit of an honest account of it is a mismatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.neighbours import SLOTS, STEPS, Neighbour, trained_in
from tests.tools.audit.test_cheats import audit, here

from dilocox.inner import mean_cross_entropy
from dilocox.record.log.audit_verdicts import Selection, Signed, Verdict, write
from dilocox.record.log.digests import TensorDigest, sha256
from dilocox.record.log.round_document import Document
from dilocox.record.log.statements import Signer
from dilocox.record.verify.audit_claims import Audits
from dilocox.record.verify.claims import NotRunError
from dilocox.record.writer.notary import code_digest
from dilocox.tools.audit import judge as judging
from dilocox.tools.audit import state_document
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import Case, judge
from dilocox.training.builder import Hooks

AUDITOR = Signer.from_hex("0a" * 32)


@contextmanager
def noise(site: Neighbour) -> Iterator[None]:
    site.change = lambda u: torch.randn(u.shape, generator=torch.Generator().manual_seed(1))
    try:
        yield
    finally:
        site.change = lambda u: u


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("declined"), 2, {0: noise, 1: noise})


def test_an_honest_account_of_noise_is_a_mismatch(trained: Path) -> None:
    assert audit(trained, "lyon", 1).verdict == "MISMATCH"


def says(
    trained: Path, change: Callable[[Document], Document], config: dict[str, Any] | None = None
) -> Case:
    """The run, in which lyon has signed another document of round 1, as it is changed."""
    case = AuditedRun(trained, (), None).case()
    key = (1, "lyon", 0, 0)
    state = case.course.rounds[key]
    document = change(Document.from_bytes(case.get(state.document)))
    data = document.to_bytes()
    digest = sha256(data)
    case.course.rounds[key] = replace(state, document=digest, root=document.root)
    case.course.config["sites"]["lyon"].update(config or {})
    plain = Case.of_round

    class Told(Case):
        def of_round(self, round_: int) -> Case:
            found = plain(self, round_)
            inner = found.get
            return replace(found, get=lambda d: data if d == digest else inner(d))

    fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return Told(**fields)


def tensors(change: Callable[[list[TensorDigest]], object]) -> Callable[[Document], Document]:
    def changed(document: Document) -> Document:
        found = list(document.tensors)
        change(found)
        return replace(document, tensors=tuple(found))

    return changed


def without(name: str) -> Callable[[Document], Document]:
    def drop(found: list[TensorDigest]) -> None:
        (place,) = [n for n, each in enumerate(found) if each.name == name]
        del found[place]

    return tensors(drop)


def as_another(name: str, **fields: Any) -> Callable[[Document], Document]:
    def change(found: list[TensorDigest]) -> None:
        (place,) = [n for n, each in enumerate(found) if each.name == name]
        found[place] = replace(found[place], **fields)

    return tensors(change)


def numbers(**said: Any) -> Callable[[Document], Document]:
    return lambda document: replace(document, state={**document.state, **said})


def one_more(document: Document) -> Document:
    more = replace(document.tensors[0], name="inner/other/x")
    return replace(document, tensors=(*document.tensors, more))


NORM = "inner/exp_avg/model.norm.weight"
UNFIT: dict[str, tuple[Callable[[Document], Document], str]] = {
    "no generator": (without("random/cpu"), "its state has no random/cpu"),
    "no moments": (without("inner/exp_avg/model.norm.weight"), "its state has no inner/exp_avg/"),
    "no step": (without("inner/step"), "its state has no inner/step"),
    "no residual": (without("outer/0/residual"), "its state has no outer/0/residual"),
    "other shape": (as_another(NORM, shape=(4, 4)), r"is float32 \[4, 4\]; with this run file"),
    "other dtype": (as_another(NORM, dtype="int32"), r"is int32 \[16\]; with this run file it is"),
    "other length": (as_another(NORM, shape=(5,)), r"bytes of inner/.* are no float32 \[5\]"),
    "no dtype": (as_another(NORM, dtype="Tensor"), r"are no Tensor \[16\]"),
    "one more": (one_more, "inner/other/x of its state is no tensor of such a rank"),
    "no landings": (numbers(owner_landings=None), "its state is not one of this run"),
    "no number": (numbers(round="first"), "its state is not one of this run"),
    "no codecs": (numbers(warm_codecs=[]), "its state is not one of this run"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_state_that_no_rank_can_have_fails(trained: Path, name: str) -> None:
    change, said = UNFIT[name]
    found = judge(says(trained, change), "lyon", 1, here, lambda step: None)
    assert found.verdict == "FAIL", found
    assert re.search(said, found.reason), found.reason


@pytest.mark.parametrize(
    "said",
    [{"slot": SLOTS}, {"slot": 2}, {"slot": "0"}, {"slot": None}, {"dropping": True},
     {"dropping": None}],
)  # fmt: skip
def test_a_state_of_the_middle_of_a_round_is_no_beginning(
    trained: Path, said: dict[str, Any]
) -> None:
    """From the last slot on a replay would find nothing to compare."""
    found = judge(says(trained, numbers(**said)), "lyon", 1, here, lambda step: None)
    assert (found.verdict, found.first_bad_step) == ("MISMATCH", -1), found
    assert "before the first step the state is one of the middle of a round" in found.reason


@pytest.mark.parametrize("facts", [{}, {"machine": "another"}], ids=["same", "elsewhere"])
def test_a_replay_that_repeats_nothing_shows_nothing(
    trained: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way a state finds to have steps left out."""
    monkeypatch.setattr(judging, "wrong_start", lambda *_: None)
    case = says(trained, lambda d: numbers(slot=SLOTS)(replace(d, facts={**d.facts, **facts})))
    found = judge(case, "lyon", 1, here, lambda step: None)
    assert (found.verdict, found.first_bad_step) == ("MISMATCH", -1), found
    assert found.same_class is not bool(facts)
    assert f"from its state 0 steps follow instead of {STEPS}" in found.reason


def test_a_payload_that_was_under_way_is_not_left_out(trained: Path) -> None:
    """The exchange lands in the round. Its payload is made from the signed contribution."""

    def hidden(document: Document) -> Document:
        pending = [{**each, "contribution": False} for each in document.state["pending"]]
        assert [each["key"] for each in pending] == ["outer/0/0/1"]
        return numbers(pending=pending)(document)

    found = judge(says(trained, hidden), "lyon", 1, here, lambda step: None)
    assert (found.verdict, found.first_bad_step) == ("MISMATCH", -1), found
    assert "no payload of outer/0/0/1 follows from its state" in found.reason


def test_under_another_dilocox_nobody_is_blamed_for_a_form(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions may keep other tensors. What the site says of its own code is no excuse."""
    said = says(trained, without("random/cpu"))
    own = says(trained, lambda d: replace(
        without("random/cpu")(d), facts={**d.facts, "code": "00" * 32}
    ))  # fmt: skip
    assert judge(own, "lyon", 1, here, lambda step: None).verdict == "FAIL"
    monkeypatch.setattr(state_document, "code_digest", lambda: "11" * 32)
    found = judge(said, "lyon", 1, here, lambda step: None)
    assert found.verdict == "NOT_RUN"
    assert "audit with the run's dilocox (" in found.reason
    assert code_digest()[:12] in found.reason


def own_loss(document: Document) -> Document:
    return replace(document, replaced=("loss",))


@pytest.mark.parametrize(
    ("own_code", "verdict", "said"),
    [
        (False, "FAIL", r"replaces loss; the run file does not allow it \(sites.lyon.own_code"),
        (True, "NOT_RUN", r"replaces loss, as the run file allows \(sites.lyon.own_code\)"),
        (None, "NOT_RUN", "the site's own program replaces loss$"),
    ],
)
def test_own_code_is_what_the_run_file_allows(
    trained: Path, own_code: bool | None, verdict: str, said: str
) -> None:
    """Older runs had no such key."""
    case = says(trained, own_loss, {"own_code": own_code})
    found = judge(case, "lyon", 1, here, lambda step: None)
    assert found.verdict == verdict, found
    assert re.search(said, found.reason), found.reason


@pytest.mark.parametrize(
    ("own_code", "stated", "verdict", "said"),
    [
        (False, (), "FAIL", "replaces no part of a step; the code .* replaces loss"),
        (False, ("dataset",), "FAIL", "replaces dataset of a step; the code .* replaces loss"),
        (True, ("dataset",), "NOT_RUN", "replaces dataset, as the run file allows"),
        # Lyon's noise, found by repeating the round with the loss of the file.
        (False, ("loss",), "MISMATCH", ""),
    ],
)
def test_an_auditor_with_the_agreed_code(
    trained: Path, own_code: bool, stated: tuple[str, ...], verdict: str, said: str
) -> None:
    case = says(trained, lambda d: replace(d, replaced=stated), {"own_code": own_code})
    found = judge(
        replace(case, hooks=Hooks(loss=lambda logits, labels: mean_cross_entropy(logits, labels))),
        "lyon", 1, here, lambda step: None,
    )  # fmt: skip
    assert found.verdict == verdict, found
    assert re.search(said, found.reason), found.reason


def claim(trained: Path, tmp_path: Path, *found: Verdict, sites: Any = None) -> str:
    """What `verify` says of these verdicts."""
    run = AuditedRun(trained, (), None)
    for name, more in (sites or {}).items():
        run.course.config["sites"][name].update(more)
    for each in found:
        signed = Signed(each, Selection("request"), AUDITOR.public, run.course.run, run.seen())
        write(tmp_path, signed, AUDITOR, "00")
    return Audits(run.course, run.entries, tmp_path, ()).verdicts()


def test_a_site_that_claims_another_class_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be judged in bf16. So no round of it is good, and the claim says so."""
    paris = audit(trained, "paris", 1)
    assert paris.verdict == "EXACT"
    class_ = {"precision": "bfloat16", "code": "00" * 32}
    case = says(trained, lambda d: replace(d, facts={**d.facts, **class_}))
    monkeypatch.setattr(judging, "_PRECISIONS", {"bf16": "bfloat16"})
    lyon = judge(case, "lyon", 1, here, lambda step: None)
    assert lyon.verdict == "NOT_RUN", lyon
    with pytest.raises(NotRunError) as caught:
        claim(trained, tmp_path, lyon, paris)
    text = str(caught.value)
    assert "no round of lyon was found good; good, of the verdicts in this folder: " in text
    assert "lyon 0 of 2, paris 1 of 2" in text
    assert "NOT_RUN, auditor and site are of different determinism classes" in text


def test_sites_that_the_run_file_exempts_are_named_and_not_asked(
    trained: Path, tmp_path: Path
) -> None:
    good = audit(trained, "paris", 1)
    for key, why in (("data", "text of its own"), ("own_code", "code of its own")):
        said = claim(trained, tmp_path / key, good, sites={"lyon": {key: True}})
        assert f"lyon 0 of 2 ({why}), paris 1 of 2" in said
