"""Key files: encrypted, and of nobody else."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("web3")

from dilocox.errors import SettlementError
from dilocox.tools.settlement.keystore import create_key, load_key, read_password


def test_a_key_is_written_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "owner.key"
    address = create_key(path, "secret", rounds=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    account = load_key(path, "secret")
    assert account.address == address
    assert account.key.hex()[2:] not in path.read_text()
    with pytest.raises(SettlementError, match="exists"):
        create_key(path, "secret", rounds=2)
    with pytest.raises(SettlementError, match="the password is not this key's"):
        load_key(path, "other")


def test_a_key_or_a_password_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key, password = tmp_path / "key", tmp_path / "password"
    create_key(key, "secret", rounds=2)
    password.write_text("secret\n")
    password.chmod(0o600)
    assert read_password(password, key) == "secret"
    for path in (key, password):
        path.chmod(0o640)
    with pytest.raises(SettlementError, match="other users can read this key: chmod 600"):
        load_key(key, "secret")
    with pytest.raises(SettlementError, match="other users can read this password"):
        read_password(password, key)


def test_what_is_no_key_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for text in ("", "{}", "[]", '{"crypto": 3}'):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(SettlementError, match="not a key's file"):
            load_key(path, "secret")
    with pytest.raises(SettlementError, match="cannot be read"):
        load_key(tmp_path / "none", "secret")


def test_a_new_password_is_typed_twice_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def typing(*words: str) -> None:
        given = iter(words)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("getpass.getpass", lambda prompt: next(given))

    key = tmp_path / "key"
    typing("secret", "secret")
    assert read_password(None, key, new=True) == "secret"
    typing("secret")
    assert read_password(None, key) == "secret"
    typing("secret", "secrte")
    with pytest.raises(SettlementError, match="two different passwords"):
        read_password(None, key, new=True)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    empty.chmod(0o600)
    with pytest.raises(SettlementError, match="an empty password"):
        read_password(empty, key, new=True)
