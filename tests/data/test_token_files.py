from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data import TokenArray, TokenFiles, show
from dilocox.data.manifest import canonical, digest_of, render
from dilocox.data.packing import Packer, token_dtype
from dilocox.errors import DataError

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)


def members(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_open_gives_what_the_manifest_says(files: TokenFiles) -> None:
    again = TokenFiles.open(files.folder)
    assert again.digest == files.digest == digest_of(again.content)
    assert again.vocabulary_size == 300
    assert again.end_of_text == 0
    for split in ("train", "validation"):
        tokens = np.fromfile(files.folder / f"{split}-00000.bin", dtype="<u2")
        assert len(again.tokens(split)) == again.token_count(split) == len(tokens)
        assert np.count_nonzero(tokens == again.end_of_text) == again.document_count(split)
        assert tokens[-1] == again.end_of_text
        assert tokens.max() < again.vocabulary_size
    assert again.document_count("train") + again.document_count("validation") == 40
    again.verify()


def test_any_flipped_byte_is_found_and_named(copy: TokenFiles) -> None:
    names = members(copy.folder)
    assert len(names) == 6

    @SETTINGS
    @given(name=st.sampled_from(names), place=st.floats(0, 1), change=st.integers(1, 255))
    def check(name: str, place: float, change: int) -> None:
        path = copy.folder / name
        good = path.read_bytes()
        bad = bytearray(good)
        bad[min(int(place * len(good)), len(good) - 1)] ^= change
        path.write_bytes(bad)
        try:
            with pytest.raises(DataError) as caught:
                TokenFiles.open(copy.folder).verify()
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
        finally:
            path.write_bytes(good)

    check()
    TokenFiles.open(copy.folder).verify()


def test_open_does_not_read_the_tokens_and_verify_does(copy: TokenFiles) -> None:
    path = copy.folder / "train-00000.bin"
    bad = bytearray(path.read_bytes())
    bad[5] ^= 1
    path.write_bytes(bad)
    opened = TokenFiles.open(copy.folder)
    with pytest.raises(DataError, match=r"train-00000\.bin: its digest differs from the manifest"):
        opened.verify()


def test_a_range_without_tokens_holds_nothing(files: TokenFiles) -> None:
    none = files.tokens("train").window(3, 0)
    for found in (none.places_of(0), none.places_with(1)):
        assert (found.dtype, found.tolist()) == (np.dtype(np.int64), [])
    assert none.count_before(1, np.zeros(2, dtype=np.int64)).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["train-00000.bin", "tokenizer/tokenizer.json"])
def test_missing_and_cut_files_are_named(copy: TokenFiles, name: str) -> None:
    path = copy.folder / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{name}: [\d,]+ bytes instead of [\d,]+; prepare"):
        TokenFiles.open(copy.folder)
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}: missing"):
        TokenFiles.open(copy.folder)


def test_folders_without_token_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token files here .* run: dilocox data prepare"):
        TokenFiles.open(tmp_path)
    with pytest.raises(DataError, match="no token files here"):
        TokenFiles.open(tmp_path / "none")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not a manifest of token files"):
        TokenFiles.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        TokenFiles.open(tmp_path)


def test_other_format_is_refused(copy: TokenFiles) -> None:
    path = copy.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["format"] = 5
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="format 5, this version of dilocox reads 1 to 4"):
        TokenFiles.open(copy.folder)


def test_edited_manifest_is_refused(copy: TokenFiles) -> None:
    path = copy.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["splits"]["train"]["documents"] += 1
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    with pytest.raises(DataError, match="changed since it was written"):
        TokenFiles.open(copy.folder)


def test_digest_leaves_out_the_machine(files: TokenFiles) -> None:
    one = render(files.content, {"options": {"source": "/a"}})
    two = render(files.content, {"options": {"source": "/b"}})
    assert one != two
    assert json.loads(one)["digest"] == json.loads(two)["digest"] == files.digest
    assert str(files.folder.parent) not in canonical(files.content).decode()


def test_canonical_json_sorts_keys() -> None:
    assert canonical({"b": [1, "é"], "a": None}) == b'{"a":null,"b":[1,"\\u00e9"]}'


def test_show_is_short_and_says_it_all(files: TokenFiles) -> None:
    text = show(files)
    assert files.digest in text
    assert f"{files.token_count('train'):,} tokens in {files.document_count('train')}" in text
    assert "40 files" in text
    assert "licence not given" in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (300_000, "<u4")]
)
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    assert token_dtype(vocabulary) == np.dtype(dtype)
    packer = Packer(tmp_path, "train", vocabulary, end_of_text=0, shard_bytes=1 << 20)
    packer.add([[1, vocabulary - 1], [2]], text_bytes=9, places=[(0, 0), (0, 3)])
    packer.close()
    raw = (tmp_path / "train-00000.bin").read_bytes()
    assert np.frombuffer(raw, dtype=dtype).tolist() == [1, vocabulary - 1, 0, 2, 0]
    assert packer.describe()["tokens"] == 5
    assert packer.describe()["origins"] == [[0, 0, 1], [0, 3, 1]]


@SETTINGS
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    per_shard=st.integers(1, 40),
    data=st.data(),
)
def test_tokens_read_alike_however_they_are_cut_into_files(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    per_shard: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    packer = Packer(folder, "train", 1000, end_of_text=999, shard_bytes=2 * per_shard)
    written: list[int] = []
    for number, length in enumerate(lengths):
        ids = [number * 31 % 900 + i for i in range(length)]
        packer.add([ids], length, [(0, 0)])
        written += [*ids, 999]
    packer.close()
    shards = packer.shards
    assert [shard["tokens"] for shard in shards[:-1]] == [per_shard] * (len(shards) - 1)
    tokens = TokenArray(
        [folder / shard["file"] for shard in shards],
        [shard["tokens"] for shard in shards],
        packer.dtype,
    )
    assert len(tokens) == len(written)
    length = data.draw(st.integers(1, len(written)))
    offsets = data.draw(st.lists(st.integers(0, len(written) - length), max_size=5))
    got = tokens.gather(np.array(offsets, dtype=np.int64), length)
    assert got.tolist() == [written[offset : offset + length] for offset in offsets]
    with pytest.raises(IndexError):
        tokens.gather(np.array([len(written) - length + 1], dtype=np.int64), length)
