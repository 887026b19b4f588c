"""The file with which a site's account vouches for the site's record key, where stakes admit.

`dilocox chain enrol` writes it beside the key's file. It holds no secret.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from dilocox.coordinator.protocol.messages import StakeProof
from dilocox.errors import JoinError


def stake_file(key_file: Path) -> Path:
    """Return the path of the file that belongs to a site's key file."""
    return key_file.with_suffix(".enrol")


def read_stake_proof(key_file: Path, key: str) -> StakeProof:
    """Read the file that belongs to a site's key file.

    `key`: the public half, hex, for which the file must be. Raises `JoinError`.
    """
    path = stake_file(key_file)
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        proof = StakeProof(expiry=said["expiry"], signature=said["signature"])
        of = str(said["key"])
    except FileNotFoundError:
        raise JoinError(
            f"{path}: missing, and this run admits by stake: stake, then run dilocox chain enrol"
        ) from None
    except OSError as error:
        raise JoinError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, ValidationError, KeyError, TypeError):
        raise JoinError(f"{path}: not a file of dilocox chain enrol") from None
    if of != key:
        raise JoinError(f"{path}: signed for another key: run dilocox chain enrol again")
    return proof
