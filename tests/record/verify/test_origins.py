"""States that a site signs falsely, or damages: what readers make of a bounded record then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dilocox.cli.verify import show
from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError, Store, Stores
from dilocox.record.log.digests import stage_root
from dilocox.record.log.state_statements import AnchorState, State
from dilocox.record.log.transparency_log import LogContent
from dilocox.record.verify import claims as c
from dilocox.record.verify.origins import origin_before
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import Report, _Verification
from dilocox.record.writer import windows
from dilocox.record.writer.rank_recorder import listing_of
from tests.record.writer.test_windows import Kept

ONE, TWO = "1" * 64, "2" * 64


def state(kind: str, root: str, listing: str) -> State:
    return State(kind=kind, site="a", stage=0, root=root, listing=listing, files={}, number=0)


def with_theta(made: Kept) -> Kept:
    """The course with a signed theta_0."""
    listing = made.shelf.put(listing_of(made.theta))
    made.course.states.append(state("initial", stage_root(made.theta).hex(), listing))
    return made


def verification(made: Kept, folder: Path) -> Any:
    found = _Verification(Places(folder), LogContent([], "", ""), lambda what, share: None)
    found.course = made.course

    def get(digest: str) -> bytes:
        if not made.has(digest):
            raise MissingError(f"{digest[:12]}…: in no store")
        return made.shelf.get(digest)

    found.stores = SimpleNamespace(get=get, has=made.has, allow=lambda _: None)  # type: ignore[assignment]
    return found


def test_a_signed_anchor_excuses_no_removal_in_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" a model below the limit keeps all its payloads: nobody removes any honestly."""
    made = with_theta(Kept("int4"))
    made.course.manifest["config"]["record"] = {"keep": "auto"}  # type: ignore[index]
    made.forget(0)
    found = verification(made, tmp_path)
    assert found._judge(c.PAYLOADS, found.payloads).verdict == "NOT_RUN"
    assert found._judge(c.HISTORY, found.history).verdict == "NOT_RUN"
    assert found.origins == {}
    monkeypatch.setattr(windows, "WHOLE_BELOW", 10)
    large = verification(made, tmp_path)
    assert large._judge(c.PAYLOADS, large.payloads).verdict == "PASS"
    assert large.origins[0, 0].state.round == 1


@pytest.mark.parametrize("nonsense", [b"no list", b'[{"name":1}]', b"[]"])
def test_a_state_that_cannot_be_used_is_passed_over(nonsense: bytes) -> None:
    made = Kept("int4")
    made.course.anchors.insert(
        0, AnchorState("c", 0, 0, 0, 0, (-1, -1), ONE, made.shelf.put(nonsense))
    )
    # A state that the third site has signed falsely comes before the others' true one.
    lie = AnchorState("c", 0, 0, 2, 2, (1, 1), TWO, made.shelf.put(nonsense))
    made.course.anchors.append(lie)
    made.forget(0)
    origin = made.origin()
    assert origin is not None
    assert origin.state.round == 1
    del made.course.anchors[:-1]
    with pytest.raises(RecordError, match="the anchor that c signed: "):
        made.origin()


def test_a_state_of_other_pieces_is_passed_over() -> None:
    """With as many as there are not, no fragment can be found in it."""
    made = Kept("int4")
    true = made.course.anchors[0]
    made.course.anchors.insert(0, replace(true, site="c", round=0, landed=(0,)))
    made.forget(0)
    origin = made.origin()
    assert origin is not None
    assert origin.state.landed == true.landed


def test_a_list_that_is_in_no_store_hides_no_state() -> None:
    made = Kept("int4")
    made.course.anchors.insert(0, replace(made.course.anchors[0], site="c", listing=ONE))
    made.forget(0)
    origin = made.origin()
    assert origin is not None
    assert origin.state.site in ("a", "b")


def test_a_replay_that_ends_elsewhere_names_who_signed_its_beginning(tmp_path: Path) -> None:
    made = Kept("int4")
    made.forget(0)
    found = verification(made, tmp_path)
    final = state("final", ONE, TWO)
    with pytest.raises(RecordError, match=r"a has signed 1{12}…$"):
        found._compare(final, {})
    origin = made.origin()
    assert origin is not None
    found.origins = {(0, 0): origin}
    with pytest.raises(RecordError, match=r"began with the anchor of round 1 that a, b signed$"):
        found._compare(final, {})


@pytest.mark.parametrize(
    ("history", "end"),
    [
        (None, "verified: all required claims PASS"),
        ("PASS", "verified: all required claims PASS"),
        (
            "NOT_RUN",
            "verified: all required claims PASS, from a signed state on; what led to it is not "
            "verified (claim history)",
        ),
    ],
)
def test_the_last_line_says_where_verification_begins(history: Any, end: str) -> None:
    findings = [c.Finding(c.REPLAY, "PASS", "")]
    if history is not None:
        findings.append(c.Finding(c.HISTORY, history, ""))
    console = Console(width=200, soft_wrap=True)
    with console.capture() as captured:
        show(Report("run", "log", 1, 1, "", findings), console)
    assert captured.get().splitlines()[-1] == end


def test_a_damaged_copy_hides_no_whole_one(tmp_path: Path) -> None:
    """Sites of one machine share a store, and each keeps windows of its own."""
    store = Store(str(tmp_path))
    copies = [store.window(f"{site}/0.0", 3) for site in ("lyon", "oslo", "paris")]
    for each in copies:
        digest = each.put(b"abc")
    for wrong in (0, 2):
        Path(copies[wrong].path(digest)).write_bytes(b"abd")
    assert Store(store.where).get(digest) == b"abc"
    assert Store(store.where).get(digest) == b"abc"
    Path(copies[1].path(digest)).unlink()
    with pytest.raises(RecordError, match="holds other bytes than its name says"):
        Store(store.where).get(digest)


def test_what_moved_on_to_a_newer_window_is_found(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    digest = store.window("lyon/0.0", 3).put(b"abc")
    reader = Store(store.where)
    assert reader.has(digest)
    store.window("lyon/0.0", 4).put(b"abc")
    store.drop_window("lyon/0.0", 3)
    assert reader.get(digest) == b"abc"
    both = Stores([reader, store])
    assert both.has(digest)
    store.drop_window("lyon/0.0", 4)
    with pytest.raises(MissingError, match="in none of"):
        both.get(digest)


def test_an_audit_trusts_no_site_where_the_payloads_are_kept() -> None:
    """A state that one site has signed falsely would convict another of what it has not done."""
    made = Kept("int4")
    lie = AnchorState("c", 0, 0, 2, 2, (1, 1), TWO, made.shelf.put(b"[]"))
    made.course.anchors.append(lie)

    def origin() -> Any:
        return origin_before(made.course, 0, 0, 2, "a", made.has, made.shelf.get)

    assert origin() is None
    made.forget(0)
    found = origin()
    assert found.state.round == 1, "the list of the newer state does not have the signed root"
