"""Of the lists of final tensors that sites have signed, one that can be used is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError, Store, Stores
from dilocox.record.log.digests import stage_root, tensor_digest
from dilocox.record.log.state_statements import State
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.completeness import gaps
from dilocox.record.verify.final_lists import final_list, published_list
from dilocox.record.verify.needed_payloads import Needed, read_needed
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import listing_of
from tests.record.verify.test_needed_payloads import step_of

TENSORS = [tensor_digest("weight", torch.ones(2))]
OTHERS = [tensor_digest("weight", torch.zeros(2))]
ROOT, OTHER_ROOT = stage_root(TENSORS).hex(), stage_root(OTHERS).hex()
BAD = {
    "in no store": b"",
    "another state's": listing_of(OTHERS),
    "no list": b"{",
    "no tensors": b'["weight"]',
    "without an end": b"[" * 100_000,
}


class Signed:
    """A run's final states, with the lists that are in a store."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(str(folder))
        self.stores = Stores([self.store])
        self.good = self.store.put(listing_of(TENSORS))

    def bad(self, name: str) -> str:
        return self.store.put(BAD[name]) if BAD[name] else "00" * 32

    def course(self, *states: State) -> RunHistory:
        manifest = {"config": {
            "site": {"stages": 1, "shards": 1}, "outer": {"fragments": 1}, "record": {},
        }}  # fmt: skip
        step = step_of(0)
        return RunHistory("run", "log", manifest, states=list(states), steps={step.key.text: step})


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


def final(site: str, listing: str, published: tuple[str, str] | None = None) -> State:
    return State("final", site, 0, ROOT, listing, {}, 0, published)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("last", [True, False])
def test_a_useless_list_is_passed_over(signed: Signed, name: str, last: bool) -> None:
    """Of the state, and of its published form."""
    good, bad = signed.good, signed.bad(name)
    states = [final("a", good), final("b", good), final("c", bad)]
    course = signed.course(*states[:: 1 if last else -1])
    found = final_list(course, 0, signed.stores.get)
    assert found is not None
    assert (found.listing, found.tensors, found.others) == (good, TENSORS, ["c"])
    assert published_list(course, 0, signed.stores.get) == found
    assert final_list(course, 0, signed.stores.get, published=True) is None
    # A sloppy publisher, of which the state itself is in order.
    states = [final("a", good, (ROOT, good)), final("c", good, (ROOT, bad))]
    course = signed.course(*states[:: 1 if last else -1])
    found = published_list(course, 0, signed.stores.get)
    assert found is not None
    assert (found.tensors, found.others) == (TENSORS, ["c"])


@pytest.mark.parametrize("name", BAD)
def test_if_no_list_can_be_used_its_signers_are_named(signed: Signed, name: str) -> None:
    bad = signed.bad(name)
    course = signed.course(final("c", bad), final("d", bad))
    with pytest.raises(RecordError, match="list of stage 0's final tensors, signed by c, d: "):
        final_list(course, 0, signed.stores.get)
    # One that is in a store that the reader has not named may be in order.
    course = signed.course(final("c", bad), final("a", "11" * 32))
    with pytest.raises(MissingError):
        final_list(course, 0, signed.stores.get)


def test_who_has_signed_a_useless_list_is_told(signed: Signed) -> None:
    course = signed.course(final("a", signed.good), final("c", "00" * 32))
    course.steps.clear()
    needed = Needed(signed.stores.get)
    read_needed(course, {}, lambda state: [], needed, lambda share: None)
    assert (needed.count, needed.others) == (1, {"c"})
    course = signed.course(final("c", "00" * 32))
    with pytest.raises(NotRunError, match=r"signed by c: .*; name more stores with --store"):
        read_needed(course, {}, lambda state: [], needed, lambda share: None)


@pytest.mark.parametrize(
    ("states", "count"),
    [
        ([final("a", "11" * 32, (ROOT, "11" * 32)), final("c", "00" * 32, (ROOT, "00" * 32))], 1),
        ([final("a", "11" * 32, (ROOT, "11" * 32)), final("c", "11" * 32)], 2),
        (
            [
                final("a", "11" * 32, (ROOT, "11" * 32)),
                final("c", "11" * 32, (OTHER_ROOT, "11" * 32)),
            ],
            2,
        ),
    ],
)
def test_another_list_is_no_other_state(signed: Signed, states: list[State], count: int) -> None:
    found = gaps(signed.course(*states))
    said = f"stage 0: {count} different final states are signed"
    assert (said in found) == (count > 1)
