"""What a witness cosigns, and what it remembers after a crash."""

from __future__ import annotations

import base64
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.witnessed import (
    LOG,
    LOG_KEY,
    ORIGIN,
    entries,
    hashes,
    proof,
    signed,
    witness_folder,
)

from dilocox.errors import ConfigError, RecordError
from dilocox.record.log.merkle import root_of
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, cosigned_at, open_note, sign_note
from dilocox.tools.witness.folder import WitnessFolder, create
from dilocox.tools.witness.requests import parse_request, request_body
from dilocox.tools.witness.witness import RefusedError, Witness


def asked(witness: Witness, body: bytes) -> str:
    """What the witness answers to a request's bytes."""
    return witness.add(*parse_request(body))


def refusal(witness: Witness, body: bytes) -> tuple[int, int | None]:
    """Status and size with which the witness refuses."""
    with pytest.raises(RefusedError) as error:
        asked(witness, body)
    return error.value.status, error.value.size


# Requests of the tests of filippo.io/torchwood, signed by a log that is not ours.
PUBLIC = "sigsum.org/v1/tree/4d6d8825a6bb689d459628312889dfbb0bcd41b5211d9e1ce768b0ff0309e562"
PUBLIC_KEY = bytes.fromhex("ffdc2d4d98e4124d3feaf788c0c2f9abfd796083d1f0495437f302ec79cf100f")


def public_request(old: int, lines: list[str], size: int, root: str, signature: str) -> bytes:
    head = "".join(f"{line}\n" for line in (f"old {old}", *lines))
    return f"{head}\n{PUBLIC}\n{size}\n{root}\n\n— {PUBLIC} {signature}\n".encode()


ONE = public_request(
    0, [], 1, "KgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    "UgIom7fPZTqpxWWhyjWduBvTvGVqsokMbqTArsQilegKoFBJQjUFAmQ0+YeSPM3wfUQMFSzVnnNuWRTYrajXpNUbIQY=",
)  # fmt: skip
THREE = public_request(
    1, ["KgEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        "KgIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="], 3,
    "RcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0=",
    "UgIom2VbtIcdFbwFAy1n7s6IkAxIY6J/GQOTuZF2ORV39d75cbAj2aQYwyJre36kezNobZs4SUUdrcawfAB8WVrx6go=",
)  # fmt: skip
FIVE = public_request(
    1, ["KgEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        "+fUDV+k970B4I3uKrqJM4aP1lloPZP8mvr2Z4wRw2LI=",
        "KgQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="], 5,
    "QrtXrQZCCvpIgsSmOsah7HdICzMLLyDfxToMql9WTjY=",
    "UgIomw/EOJmWi0i1FQsOj+etB7F8IccFam/jgd6wzRns4QPVmyEZtdvl1U2KEmLOZ/ASRcWJi0tW90dJWAShei7sDww=",
)  # fmt: skip


def test_public_requests_of_another_log(tmp_path: Path) -> None:
    folder = create(tmp_path / "w", "example.com")
    key = NoteKey(PUBLIC, PUBLIC_KEY)
    witness = Witness(folder, lambda: 1234.5)
    assert refusal(witness, ONE) == (404, None)
    folder.trust(key)
    line = asked(witness, ONE)
    assert cosigned_at(ONE.decode().split("\n\n", 1)[1] + line, folder.key) == 1234
    asked(witness, FIVE)
    # The shorter one, whose request was made at the same time, would roll the witness back.
    assert refusal(witness, THREE) == (409, 5)
    assert refusal(witness, ONE) == (409, 5)
    newest = folder.newest(key)
    assert newest is not None
    assert newest[0].size == 5


def test_every_log_that_grows_is_cosigned(tmp_path: Path) -> None:
    for number, (old, new) in enumerate(itertools.combinations_with_replacement(range(1, 13), 2)):
        folder = WitnessFolder(tmp_path / "w") if number else witness_folder(tmp_path / "w")
        folder.path(ORIGIN).unlink(missing_ok=True)
        witness = Witness(folder)
        witness.add(0, [], signed(entries(old)))
        witness.add(old, proof(entries(new), old), signed(entries(new)))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=8),
)
def test_all_that_was_cosigned_is_one_history(
    tmp_path_factory: pytest.TempPathFactory, fork: int, asks: list[tuple[bool, int, int]]
) -> None:
    """Whoever asks, with either of two histories: the cosigned ones are prefixes of one."""
    path = tmp_path_factory.mktemp("w")
    witness_folder(path)
    done: list[tuple[bool, int]] = []
    for other, old, size in asks:
        # A new object each time: what it remembers is on the disk.
        witness = Witness(WitnessFolder(path))
        texts = entries(size, fork if other else None)
        newest = witness.folder.newest(LOG)
        before = 0 if newest is None else newest[0].size
        line, status = "", 200
        try:
            line = witness.add(old, proof(texts, old), signed(texts))
        except RefusedError as refused:
            status = refused.status
        after = witness.folder.newest(LOG)
        assert (status == 400) == (old > size)
        if status != 200:
            assert (after and after[0]) == (newest and newest[0])
            continue
        assert cosigned_at(signed(texts) + line, witness.folder.key) is not None
        assert old == before
        assert after is not None
        assert after[0] == LogCheckpoint.parse(signed(texts))
        done.append((other, size))
    histories = [entries(size, fork if other else None) for other, size in done]
    for one, next_ in itertools.pairwise(histories):
        assert next_[: len(one)] == one


def test_a_fork_is_refused_and_kept_as_evidence(tmp_path: Path) -> None:
    witness = Witness(witness_folder(tmp_path / "w"))
    witness.add(0, [], signed(entries(5)))
    with pytest.raises(RefusedError, match="has signed two histories of 5 statements") as error:
        witness.add(5, [], signed(entries(5, fork=3)))
    assert (error.value.status, error.value.size, error.value.forked) == (409, 5, True)
    (kept,) = (tmp_path / "w" / "evidence").iterdir()
    heads = [LogCheckpoint.parse(open_note((kept / name).read_text(), LOG))
             for name in ("seen", "other")]  # fmt: skip
    assert heads[0].size == heads[1].size
    assert heads[0].root != heads[1].root
    # A longer fork is refused, too. It is no evidence: anybody can send a wrong proof.
    texts = entries(7, fork=3)
    with pytest.raises(RefusedError, match="does not show that these 7 statements") as error:
        witness.add(5, proof(texts, 5), signed(texts))
    assert error.value.status == 422
    assert len(list((tmp_path / "w" / "evidence").iterdir())) == 1
    witness.add(5, proof(entries(7), 5), signed(entries(7)))


def test_evidence_of_which_a_half_was_written_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full, or the process was killed, between the two files."""
    witness = Witness(witness_folder(tmp_path / "w"))
    witness.add(0, [], signed(entries(5)))
    whole = WitnessFolder._write

    def full(self: WitnessFolder, path: Path, text: str) -> None:
        if path.name == "other":
            raise OSError(28, "No space left on device")
        whole(self, path, text)

    with monkeypatch.context() as patch:
        patch.setattr(WitnessFolder, "_write", full)
        with pytest.raises(OSError, match="No space"):
            witness.add(5, [], signed(entries(5, fork=3)))
    with pytest.raises(RefusedError, match="both checkpoints are in"):
        witness.add(5, [], signed(entries(5, fork=3)))
    (kept,) = (tmp_path / "w" / "evidence").iterdir()
    assert sorted(each.name for each in kept.iterdir()) == ["other", "seen"]


def test_signatures_of_strangers_are_not_kept(tmp_path: Path) -> None:
    """Anybody can add lines to a log's checkpoint."""
    witness = Witness(witness_folder(tmp_path / "w"))
    note = signed(entries(2))
    more = f"— {ORIGIN} {base64.b64encode(b'abcd' * 17).decode()}\n— x AAAAAAAA\n"
    line = witness.add(0, [], note + more)
    assert witness.folder.path(ORIGIN).read_text() == note + line


@pytest.mark.parametrize("character", "\r\t\0\x1b\x0b")
def test_a_checkpoint_with_control_characters_is_refused(tmp_path: Path, character: str) -> None:
    """C2SP's signed notes have none. A file with a carriage return would be read differently."""
    witness = Witness(witness_folder(tmp_path / "w"))
    text = LogCheckpoint(ORIGIN, 1, root_of(hashes(entries(1)))).text + f"more{character}\n"
    body = request_body(0, [], sign_note(text, ORIGIN, LOG_KEY))
    assert refusal(witness, body)[0] == 400
    assert witness.folder.newest(LOG) is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"\xff\n\n", 400), (b"old 0\n", 400), (b"old 01\n\nx", 400),
        (b"old -1\n\nx", 400), (b"old 0\n\nno note\n", 400),
        (request_body(0, [], sign_note("a\n", "a", LOG_KEY)), 400),
        (request_body(0, [], signed(entries(1), "another/log")), 404),
        (request_body(0, [], signed(entries(1)).replace("\n1\n", "\n2\n")), 403),
        (request_body(2, [], signed(entries(1))), 400),
        (request_body(1, [], signed(entries(1))), 409),
        (request_body(0, [b"\1" * 32], signed(entries(1))), 422),
        (request_body(0, [b"\1" * 31], signed(entries(1))), 400),
        (request_body(0, [b"\1" * 32] * 64, signed(entries(1))), 400),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    witness = Witness(witness_folder(tmp_path / "w"))
    assert refusal(witness, body)[0] == status
    assert witness.folder.newest(LOG) is None


def test_an_empty_log_has_the_empty_root(tmp_path: Path) -> None:
    witness = Witness(witness_folder(tmp_path / "w"))
    bad = sign_note(LogCheckpoint(ORIGIN, 0, b"\1" * 32).text, ORIGIN, LOG_KEY)
    assert refusal(witness, request_body(0, [], bad)) == (422, None)
    for texts in ([], [], entries(3)):
        witness.add(0, [], signed(texts))
    assert root_of(hashes([])) == root_of([])


def test_a_crash_before_the_answer_leaves_one_history(tmp_path: Path) -> None:
    """The checkpoint was kept, and the answer was lost: the log asks again."""
    path = tmp_path / "w"
    folder = witness_folder(path)
    folder.keep(ORIGIN, signed(entries(4)))
    witness = Witness(WitnessFolder(path))
    assert refusal(witness, request_body(0, [], signed(entries(4, fork=0)))) == (409, 4)
    assert refusal(witness, request_body(4, [], signed(entries(4, fork=0)))) == (409, 4)
    assert witness.add(4, [], signed(entries(4))).startswith("— witness.example/w1 ")


def test_nothing_is_signed_that_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "w"
    witness = Witness(witness_folder(path))
    (path / "cosigned").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="cosigned"):
        witness.add(0, [], signed(entries(1)))
    (path / "cosigned").unlink()
    witness.add(0, [], signed(entries(1)))
    kept = witness.folder.path(ORIGIN)
    kept.write_text(kept.read_text()[:-9])
    # A witness that does not know what it has signed signs nothing.
    with pytest.raises(RecordError):
        witness.add(1, proof(entries(2), 1), signed(entries(2)))
    kept.write_text(signed(entries(1), "another/log"))
    with pytest.raises(RecordError, match="is not signed by"):
        witness.add(0, [], signed(entries(2)))


def test_one_process_at_a_time_and_a_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "w"
    folder = witness_folder(path)
    assert (path / "key").stat().st_mode & 0o777 == 0o600
    # The key itself may hold a +, being in base64.
    secret = (path / "key").read_text().strip().split("+", 4)[4]
    assert secret not in repr(folder.__dict__) + str(folder.key)
    with (
        WitnessFolder.opened(path),
        pytest.raises(RecordError, match="another process is this witness"),
        WitnessFolder.opened(path),
    ):
        pass
    with WitnessFolder.opened(path):
        pass
    with pytest.raises(RecordError, match="keeps its key"):
        create(path, "w")
    with pytest.raises(ConfigError, match="give 1 to 100 letters"):
        create(tmp_path / "x", "a b")
    with pytest.raises(RecordError, match="dilocox witness create"):
        WitnessFolder(tmp_path / "x")
    (path / "key").write_text("PRIVATE+KEY+a+00000000+AAAA\n")
    with pytest.raises(RecordError, match="not the key of a witness"):
        WitnessFolder(path)


def test_logs_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    folder = witness_folder(tmp_path / "w")
    keys = [NoteKey(f"log/{number}", bytes([number]) * 32) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: WitnessFolder(folder.folder).trust(key), keys))
    assert {key.name for key in folder.logs()} == {ORIGIN, *(key.name for key in keys)}


def test_an_error_of_the_server_is_not_one_of_the_folder(tmp_path: Path) -> None:
    witness_folder(tmp_path / "w")
    with pytest.raises(OSError, match="of the body"), WitnessFolder.opened(tmp_path / "w"):
        raise OSError(5, "of the body")
    (tmp_path / "w" / "witness.lock").unlink()
    (tmp_path / "w" / "witness.lock").mkdir()
    with (
        pytest.raises(RecordError, match="cannot be used"),
        WitnessFolder.opened(tmp_path / "w"),
    ):
        pass


def test_a_log_has_one_key(tmp_path: Path) -> None:
    folder = witness_folder(tmp_path / "w")
    assert not folder.trust(LOG)
    with pytest.raises(RecordError, match="knows it with another key"):
        folder.trust(NoteKey(ORIGIN, b"\1" * 32))
    assert folder.trust(NoteKey("b", b"\1" * 32))
    assert [key.name for key in folder.logs()] == [ORIGIN, "b"]
