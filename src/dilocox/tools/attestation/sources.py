"""Where a machine gets its quote: the kernel's configfs-tsm, or dstack's agent.

Sources: Linux, "Documentation/ABI/testing/configfs-tsm-report"; dstack, `POST /GetQuote` of the
guest agent's HTTP interface on a Unix socket.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dilocox.errors import AttestationError
from dilocox.utils.fetch import read_in_time

TSM = Path("/sys/kernel/config/tsm/report")
DSTACK = Path("/var/run/dstack.sock")
AGENT_SECONDS = 30.0
"""Time limit for one answer of the agent."""
MOST_ANSWER = 4 << 20
"""Largest answer of the agent, in bytes."""
_PROVIDERS: dict[str, Literal["tdx", "snp"]] = {"tdx_guest": "tdx", "sev_guest": "snp"}
_TRIES = 5


@dataclass(frozen=True)
class RawQuote:
    """What a source has returned, unchecked."""

    tee: Literal["tdx", "snp"]
    quote: bytes
    auxblob: bytes = b""
    """Of SNP: the table of certificates that the host hands its guest; may be empty."""
    event_log: Sequence[Mapping[str, Any]] | None = None


def tsm_quote(report_data: bytes, folder: Path = TSM) -> RawQuote:
    """Return a quote of this machine from the kernel.

    Args:
        report_data: 64 bytes that the quote carries.
        folder: The folder of configfs in which reports are made.

    Raises:
        AttestationError: The kernel gives no quote, or another process changes the same report.
    """
    entry = folder / f"dilocox-{os.getpid()}"
    try:
        entry.mkdir(exist_ok=True)
    except OSError as error:
        raise AttestationError(
            f"{folder}: gives no quotes ({error.strerror}): this is no confidential guest, its "
            "kernel is older than 6.7, or root is needed"
        ) from None
    try:
        for _ in range(_TRIES):
            before = int((entry / "generation").read_text())
            (entry / "inblob").write_bytes(report_data)
            provider = (entry / "provider").read_text().strip()
            quote = (entry / "outblob").read_bytes()
            auxblob = _optional(entry / "auxblob")
            if int((entry / "generation").read_text()) == before + 1:
                break
        else:
            raise AttestationError(f"{entry}: another process asks for reports there: try again")
    except (OSError, ValueError) as error:
        raise AttestationError(f"{entry}: no quote ({error})") from None
    finally:
        with contextlib.suppress(OSError):  # a report that is left costs nothing
            entry.rmdir()
    if provider not in _PROVIDERS:
        raise AttestationError(f"{entry}: quotes of {provider!r}, which dilocox does not know")
    return RawQuote(_PROVIDERS[provider], quote, auxblob)


def _optional(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # only some providers have it
        return b""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def dstack_quote(
    report_data: bytes, path: Path = DSTACK, seconds: float = AGENT_SECONDS
) -> RawQuote:
    """Return a TDX quote with its event log from dstack's agent.

    Args:
        report_data: 64 bytes that the quote carries.
        path: The agent's socket.
        seconds: Time limit of each step of the call, and of the whole answer's body.

    Raises:
        AttestationError: The agent does not answer, or with something else.
    """
    connection = _UnixConnection(path, seconds)
    try:
        body = json.dumps({"report_data": report_data.hex()})
        connection.request("POST", "/GetQuote", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = read_in_time(answer, MOST_ANSWER, seconds)
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise AttestationError(f"{path}: dstack's agent does not answer ({reason})") from None
    finally:
        connection.close()
    if answer.status != 200 or len(data) > MOST_ANSWER:
        raise AttestationError(f"{path}: dstack's agent gives no quote (status {answer.status})")
    try:
        said = json.loads(data)
        events = said["event_log"]
        log = json.loads(events) if isinstance(events, str) and events else []
        if not isinstance(log, list):
            raise TypeError
        return RawQuote("tdx", bytes.fromhex(said["quote"]), event_log=log or None)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AttestationError(f"{path}: dstack's agent answers with something else") from None
