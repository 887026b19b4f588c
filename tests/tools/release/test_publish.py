"""What `dilocox publish` gathers and refuses; of a whole run in `tests/e2e/test_published.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.report_runs import usual, write_run

from dilocox.config.run_config import resolve_run
from dilocox.errors import CheckpointError, ConfigError, DilocoxError
from dilocox.tools.release.publish import agreed, find, publish, refuse_secrets

pytestmark = pytest.mark.waits


def test_all_that_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "toy", usual())
    sources = find(run, [tmp_path / "lyon"])
    with pytest.raises(ConfigError) as refused:
        publish(sources, tmp_path / "public")
    said = str(refused.value)
    assert "\n" not in said
    for part in (
        f"{tmp_path / 'lyon'}: no such folder", "record/statements.jsonl", "record/checkpoint",
        "the published model", "the token files' manifest.json", "payloads (no record/store",
        "--from",
    ):  # fmt: skip
        assert part in said, part
    assert not (tmp_path / "public").exists()


def test_parts_are_found_at_the_sites(tmp_path: Path) -> None:
    run, lyon = write_run(tmp_path / "toy", usual()), tmp_path / "lyon"
    for folder in ("model", "data", "record/store"):
        (lyon / folder).mkdir(parents=True)
    (lyon / "data" / "manifest.json").touch()
    found = find(run, [lyon], ["s3://bucket/store"])
    assert (found.model, found.data) == (lyon / "model", lyon / "data")
    assert found.stores == [str(lyon / "record" / "store"), "s3://bucket/store"]
    assert not [line for line in found.missing if "model" in line or "payloads" in line]


def test_a_folder_in_use_is_not_written_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "toy", usual())
    sources = find(run)
    sources.missing.clear()
    with pytest.raises(CheckpointError, match="is not empty"):
        publish(sources, run)
    assert (run / "run.toml").is_file()


def test_the_run_file_is_what_was_agreed_on_and_names_no_machine() -> None:
    config = resolve_run(
        {
            "run": {"name": "toy", "folder": "/home/me/secret-place"},
            "model": {"path": "some/model"},
            "data": {"folder": "/home/me/tokens"},
            "network": {"host": "10.1.2.3", "port": 29400},
            "record": {"store": "s3://my-bucket/store"},
            "sites": {
                "lyon": {"data": "/home/me/private", "interface": "eth7", "ports": "40000-40009"},
                "paris": {"speed": 2.0},
            },
        }
    )
    public = agreed(config)
    assert public.digest() == config.digest()
    text = public.to_toml()
    for own in ("/home/me", "10.1.2.3", "29400", "my-bucket", "eth7", "40000"):
        assert own not in text
    assert public.sites["lyon"].data is not None
    assert public.sites["paris"].speed == 2.0


def test_a_key_or_a_token_is_never_published(tmp_path: Path) -> None:
    (tmp_path / "record" / "store").mkdir(parents=True)
    (tmp_path / "record" / "store" / "numbers").write_text("0123456789abcdef0123456789abcdef")
    note = tmp_path / "record" / "note.txt"
    secret = b"0123456789abcdef0123456789abcdef"
    refuse_secrets(tmp_path, [secret])
    for text in (
        secret.decode(),
        f"token dilocox1-{'a' * 64}-{'b' * 32}",
        "-----BEGIN EC PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----",
    ):
        note.write_text(f"about\n{text}\n")
        with pytest.raises(DilocoxError, match=r"note\.txt: holds a key or a token"):
            refuse_secrets(tmp_path, [secret])
    note.write_text("-----BEGIN PUBLIC KEY-----")
    refuse_secrets(tmp_path, [secret])
