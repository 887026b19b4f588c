"""Keys of accounts: encrypted files (Web3 Secret Storage, version 3) that only their user can read.

A key is never an argument, an environment variable or part of a message.
"""

from __future__ import annotations

import getpass
import json
import secrets
import sys
from pathlib import Path

from eth_account import Account
from eth_account.signers.local import LocalAccount

from dilocox.coordinator.identity import write_private
from dilocox.errors import SettlementError


def create_key(path: Path, password: str, rounds: int | None = None) -> str:
    """Make a key, and write it to a new file; return its address.

    Args:
        path: The file, of mode 600.
        password: Encrypts the key.
        rounds: Work factor of scrypt, a power of two; None: that of other wallets.

    Raises:
        SettlementError: The file exists, or cannot be written.
    """
    if path.exists():
        raise SettlementError(f"{path}: exists; a key is not replaced, so name another file")
    account = Account.from_key(secrets.token_bytes(32))
    content = Account.encrypt(account.key, password, kdf="scrypt", iterations=rounds)
    try:
        write_private(path, (json.dumps(content) + "\n").encode())
    except OSError as error:
        raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
    return str(account.address)


def load_key(path: Path, password: str) -> LocalAccount:
    """Read a key's file.

    Raises `SettlementError` if others can read the file, if it is no key, or if the password is
    not the key's.
    """
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettlementError(f"{path}: cannot be read ({error})") from None
    if mode & 0o077:
        raise SettlementError(f"{path}: other users can read this key: chmod 600 {path}")
    try:
        content = json.loads(text)
        key = Account.decrypt(content, password)
    except (KeyError, TypeError, NotImplementedError, ValueError) as error:
        reason = "the password is not this key's" if "MAC" in str(error) else "not a key's file"
        raise SettlementError(f"{path}: {reason}") from None
    account: LocalAccount = Account.from_key(key)
    return account


def read_password(path: Path | None, key: Path, new: bool = False) -> str:
    """Return the password of a key: the first line of a file, or what the user types.

    Args:
        path: The password's file, of mode 600; None: ask the user.
        key: The key's file, which the question names.
        new: The password is of a key to be made: the user types it twice.

    Raises:
        SettlementError: The file cannot be used, or there is nobody to ask. A new password is
            empty, or was typed in two ways.
    """
    password = _read_password(path, key)
    if not new:
        return password
    if not password:
        raise SettlementError(f"{path or key}: an empty password: choose one")
    if path is None and getpass.getpass("the same password again: ") != password:
        raise SettlementError(f"{key}: two different passwords were typed: run this again")
    return password


def _read_password(path: Path | None, key: Path) -> str:
    if path is None:
        if not sys.stdin.isatty():
            raise SettlementError(f"{key}: no password: give --password-file, as there is nobody "
                                  "to ask")  # fmt: skip
        return getpass.getpass(f"password of {key}: ")
    try:
        if path.stat().st_mode & 0o077:
            raise SettlementError(f"{path}: other users can read this password: chmod 600 {path}")
        return path.read_text(encoding="utf-8").split("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise SettlementError(f"{path}: cannot be read ({error})") from None
