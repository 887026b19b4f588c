"""An account signs one root of a place, in whichever folder."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("web3")

from tests.support.chains import account_of

from dilocox.errors import SettlementError
from dilocox.tools.settlement.journal import read_lines
from dilocox.tools.settlement.messages import Domain
from dilocox.tools.settlement.signed_roots import SignedRoots

DOMAIN, OTHER = Domain(7, "0x" + "11" * 20), Domain(7, "0x" + "22" * 20)
RUN = b"\1" * 32
ROOTS = {number: bytes([number]) * 32 for number in range(4)}


def sign(
    root: Path, folder: str, roots: dict[int, bytes], kind: str = "Head",
    domain: Domain = DOMAIN, run: bytes = RUN,
) -> tuple[int, list[int]]:  # fmt: skip
    """Sign roots into the public file of a folder."""
    memory = SignedRoots(root / "owner.key.signed-7.jsonl")
    path = root / folder / "signed.jsonl"
    path.parent.mkdir(exist_ok=True)
    return memory.sign_once(account_of("owner"), domain, run, path, kind, roots)


def public(root: Path, folder: str) -> list[object]:
    return read_lines(root / folder / "signed.jsonl")


def test_a_folder_that_was_restored_leads_to_no_second_root(tmp_path: Path) -> None:
    assert sign(tmp_path, "run", {1: ROOTS[1], 2: ROOTS[2]}) == (2, [])
    assert sign(tmp_path, "run", {1: ROOTS[1]}) == (0, [])
    assert sign(tmp_path, "backup", {1: ROOTS[3], 2: ROOTS[2], 3: ROOTS[3]}) == (1, [1])
    assert public(tmp_path, "backup")[0] == public(tmp_path, "run")[1]
    assert [each["size"] for each in public(tmp_path, "backup")] == [2, 3]  # type: ignore[index]


def test_other_runs_contracts_and_kinds_have_roots_of_their_own(tmp_path: Path) -> None:
    assert sign(tmp_path, "run", {1: ROOTS[1]}) == (1, [])
    for number, place in enumerate(({"domain": OTHER}, {"run": b"\2" * 32}, {"kind": "Commit"})):
        assert sign(tmp_path, f"other {number}", {1: ROOTS[2]}, **place) == (1, [])  # type: ignore[arg-type]


def test_roots_of_before_the_memory_count_too(tmp_path: Path) -> None:
    sign(tmp_path, "run", {1: ROOTS[1]})
    memory = tmp_path / "owner.key.signed-7.jsonl"
    memory.unlink()
    assert sign(tmp_path, "run", {1: ROOTS[2]}) == (0, [1])
    assert sign(tmp_path, "run", {1: ROOTS[1]}) == (0, [])
    assert sign(tmp_path, "newer", {1: ROOTS[2]}) == (0, [1])
    memory.write_text("[]\n")
    with pytest.raises(SettlementError, match="not a file of signed roots"):
        sign(tmp_path, "run", {1: ROOTS[1]})
