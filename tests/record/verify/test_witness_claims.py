"""The claim `witnesses`: who has cosigned how much of a log."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import ConfigError, RecordError
from dilocox.record.log import cosigned
from dilocox.record.log.signed_note import NoteKey, WitnessKey, cosign, split_note
from dilocox.record.log.transparency_log import PUBLIC, read_text
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.record.verify.witness_claims import Witnesses, judge_witnesses
from tests.support.older_record import resign, unpacked
from tests.support.witnessed import LOG, LOG_KEY, entries, signed

PRIVATE = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3)]
NAMES = ("a.example/1", "b.example/1", "c.example/1")
KEYS = [WitnessKey(name, key.public_key().public_bytes_raw())
        for name, key in zip(NAMES, PRIVATE, strict=True)]  # fmt: skip
TEXTS = [str(key) for key in KEYS]
DAY = 1_800_000_000


def with_cosignature(note: str, number: int, time: int = DAY) -> str:
    return note + cosign(split_note(note)[0], NAMES[number], PRIVATE[number], time)


def judged(record: Path, quorum: int | None = None, *files: Path, size: int = 9) -> str:
    asked = Witnesses.parse(TEXTS, quorum, files)
    assert asked is not None
    return judge_witnesses(asked, record, LOG, entries(size))


def write(record: Path, number: int, note: str) -> None:
    assert cosigned.keep(record, LOG, KEYS[number], note)


def test_a_quorum_that_has_cosigned_all(tmp_path: Path) -> None:
    with pytest.raises(NotRunError, match="0 of 3 witnesses have cosigned, 3 are needed"):
        judged(tmp_path)
    for number, size in ((0, 9), (1, 9), (2, 4)):
        write(tmp_path, number, with_cosignature(signed(entries(size)), number, DAY + number))
    assert judged(tmp_path, 2) == (
        "2 of 3 witnesses (2 needed) have cosigned all 9 statements, the last at "
        "2027-01-15 08:00 UTC"
    )
    assert judged(tmp_path, 1).endswith("others may have been shown another log")
    with pytest.raises(NotRunError, match="3 witnesses have cosigned the first 4 of 9 statements"):
        judged(tmp_path)
    with pytest.raises(NotRunError, match="1 witnesses have cosigned the first 9 of 10"):
        judged(tmp_path, 1, size=10)
    # A file that the witness itself keeps counts as well.
    (tmp_path / "own").write_text(with_cosignature(signed(entries(9)), 2))
    assert judged(tmp_path, 3, tmp_path / "own").startswith("3 of 3 witnesses (3 needed)")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 9), min_size=3, max_size=3), st.integers(1, 3))
def test_the_quorum_counts_witnesses_not_cosignatures(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], quorum: int
) -> None:
    record = tmp_path_factory.mktemp("record")
    for number, size in enumerate(sizes):
        for each in range(max(size, 0), size + 1):
            write(record, number, with_cosignature(signed(entries(each)), number))
    try:
        judged(record, quorum)
        found = True
    except NotRunError:
        found = False
    assert found == (sum(size == 9 for size in sizes) >= quorum)


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (with_cosignature(signed(entries(9, fork=8)), 0), "has signed two different logs"),
        (with_cosignature(signed(entries(5, fork=0)), 0), "has signed two different logs"),
        # Nobody has cosigned it: the log's own signature shows the fork.
        (signed(entries(5, fork=4)), "has signed two different logs"),
        (with_cosignature(signed(entries(10)), 0), "it was cut back"),
        (with_cosignature(signed(entries(9), "other/log"), 0), "no cosigned checkpoint"),
        (signed(entries(9)) + cosign("a\n", NAMES[0], PRIVATE[0], 1), "not one of witness"),
        ("nonsense\n", "no cosigned checkpoint of this log"),
    ],
)
def test_what_contradicts_the_log(tmp_path: Path, note: str, reason: str) -> None:
    write(tmp_path, 1, with_cosignature(signed(entries(9)), 1))
    (tmp_path / "cosigned" / "ab.note").write_text(note)
    with pytest.raises(RecordError, match=reason) as error:
        judged(tmp_path, 1)
    assert not isinstance(error.value, NotRunError)


@pytest.mark.parametrize(
    "note", [with_cosignature(signed(entries(9), "other/log"), 0), "nonsense\n"]
)
def test_a_wrong_file_of_the_reader_is_no_fault_of_the_log(tmp_path: Path, note: str) -> None:
    (tmp_path / "own").write_text(note)
    with pytest.raises(NotRunError, match="--cosigned own: says nothing about this log"):
        judged(tmp_path, 1, tmp_path / "own")
    (tmp_path / "own").write_text(with_cosignature(signed(entries(9, fork=2)), 0))
    with pytest.raises(RecordError, match="has signed two different logs"):
        judged(tmp_path, 1, tmp_path / "own")


def test_a_stranger_is_no_witness(tmp_path: Path) -> None:
    note = signed(entries(9))
    stranger = Ed25519PrivateKey.from_private_bytes(b"\x09" * 32)
    (tmp_path / "cosigned").mkdir()
    line = cosign(split_note(note)[0], NAMES[0], stranger, DAY)
    (tmp_path / "cosigned" / "x.note").write_text(note + line)
    with pytest.raises(NotRunError, match=r"no cosignature here of a\.example/1"):
        judged(tmp_path, 1)


def test_files_beside_the_log_get_only_newer(tmp_path: Path) -> None:
    def keep(size: int, time: int) -> bool:
        note = with_cosignature(signed(entries(size)), 0, time)
        return cosigned.keep(tmp_path, LOG, KEYS[0], note)

    given_ = ((4, DAY), (3, DAY + 9), (4, DAY), (4, DAY + 1), (5, DAY))
    assert [keep(*each) for each in given_] == [True, False, False, True, True]
    path = cosigned.path_of(tmp_path, KEYS[0])
    path.write_text("damaged")
    assert keep(1, DAY)
    with pytest.raises(RecordError, match="is not cosigned by"):
        cosigned.keep(tmp_path, LOG, KEYS[0], signed(entries(9)))
    assert LOG_KEY.public_key().public_bytes_raw() == LOG.public


def test_who_writes_at_once_leaves_the_newest(tmp_path: Path) -> None:
    """The hook of a run and `dilocox witness ask` may both ask."""
    notes = [with_cosignature(signed(entries(size)), 0) for size in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda note: cosigned.keep(tmp_path, LOG, KEYS[0], note), notes[::-1]):
            pass
    assert cosigned.path_of(tmp_path, KEYS[0]).read_text() == notes[-1]


def test_options_that_do_not_fit() -> None:
    assert Witnesses.parse([], None, []) is None
    same = str(WitnessKey("other.name", KEYS[0].public))
    for keys, quorum, reason in (
        ([], 1, "name the witnesses, too"), ([TEXTS[0], same], None, "the same key twice"),
        (TEXTS, 4, "give 1 to 3"), (TEXTS, 0, "give 1 to 3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            Witnesses.parse(keys, quorum, [])
    with pytest.raises(ConfigError, match="no: not a file; name a cosigned checkpoint"):
        Witnesses.parse(TEXTS, None, [Path("no")])
    with pytest.raises(RecordError, match="not a key of a witness"):
        Witnesses.parse([str(LOG)], None, [])


def test_verify_judges_the_claim_of_a_run(tmp_path: Path) -> None:
    run = unpacked(tmp_path)
    record = run / "record"
    key = NoteKey.parse(read_text(record / PUBLIC))
    note = with_cosignature(read_text(record / "checkpoint"), 0)
    cosigned.keep(record, key, KEYS[0], note)
    asked = Witnesses.parse(TEXTS[:1], None, [])

    def verdict(witnesses: Witnesses | None = asked) -> str | None:
        report = verify(Places(run, witnesses=witnesses), lambda what, share: None)
        found = {each.claim.name: each for each in report.findings}.get("witnesses")
        # Who names witnesses wants to know by the exit code that they have not cosigned.
        assert found is None or found.claim.required
        return found and found.verdict

    assert (verdict(), verdict(None)) == ("PASS", None)
    # The log's owner writes another log with the same key.
    resign(run, lambda lines: lines.pop())
    assert verdict() == "FAIL"
    cosigned.path_of(record, KEYS[0]).unlink()
    assert verdict() == "NOT_RUN"
