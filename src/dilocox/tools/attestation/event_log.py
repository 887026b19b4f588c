"""Event logs of TDX guests, replayed into the run-time measurement registers (RTMR 0 to 3).

Source: Intel, "TDX Module ABI": RTMR := SHA-384(RTMR ‖ digest). dstack's own events, all in RTMR 3,
have digest SHA-384(type ‖ ":" ‖ name ‖ ":" ‖ payload), type as four little-endian bytes. After the
event `system-ready` the application runs, and can add events of any name and payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from dilocox.errors import AttestationError

DSTACK_EVENT = 0x08000001
DSTACK_REGISTER = 3
"""Register that dstack extends; firmware and kernel do not."""
COMPOSE = "compose-hash"
"""Name of the event whose payload is the SHA-256 of an application's compose file."""
READY = "system-ready"
"""Name of dstack's last event before the application runs."""
MOST_EVENTS = 4096


def replay(events: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Return RTMR 0 to 3, hex, after all events.

    Register 3 takes dstack's events alone. Their digests are computed from name and payload, so
    nobody can show an event of that register as another one. Raises `AttestationError` for other
    events.
    """
    if len(events) > MOST_EVENTS:
        raise AttestationError(f"event log: more than {MOST_EVENTS} events")
    registers = [bytes(48)] * 4
    try:
        for each in events:
            index = each["imr"]
            # Of one form alone: `compose_hash` must find the same events in register 3.
            if type(index) is not int or not 0 <= index < 4:
                raise ValueError
            registers[index] = hashlib.sha384(registers[index] + _digest(each)).digest()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise AttestationError("event log: an event has another form") from None
    first, second, third, fourth = (each.hex() for each in registers)
    return first, second, third, fourth


def compose_hash(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the payload of dstack's event that names the compose file; None if there is none.

    The events must have been replayed. An event after `system-ready` may come from the
    application, and does not count. Raises `AttestationError` if there are two events of this name.
    """
    named = [each for each in events if each["imr"] == DSTACK_REGISTER]
    if sum(each["event"] == COMPOSE for each in named) > 1:
        raise AttestationError(f"event log: two events {COMPOSE}")
    of_dstack = takewhile(lambda each: each["event"] != READY, named)
    found = [str(each["event_payload"]).lower() for each in of_dstack if each["event"] == COMPOSE]
    return found[0] if found else None


def _digest(event: Mapping[str, Any]) -> bytes:
    """Return the digest (48 bytes) that an event extends its register by."""
    said = bytes.fromhex(event["digest"])
    if event["event_type"] == DSTACK_EVENT:
        return _dstack_digest(event, said)
    if event["imr"] == DSTACK_REGISTER:
        raise AttestationError(
            f"event log: an event of RTMR{DSTACK_REGISTER} is not of dstack's type, so nobody can "
            "tell its name"
        )
    if len(said) != 48:
        raise ValueError
    return said


def _dstack_digest(event: Mapping[str, Any], said: bytes) -> bytes:
    """Return the digest of name and payload; `said` is that of the log, and may be empty."""
    name, payload = event["event"], bytes.fromhex(event["event_payload"])
    # The digest's input does not escape the colon: name "a:b" is also name "a", payload "b:…".
    if ":" in name:
        raise AttestationError(f"event log: the name of event {name!r} has a colon")
    kind = DSTACK_EVENT.to_bytes(4, "little")
    made = hashlib.sha384(b":".join((kind, name.encode(), payload))).digest()
    if said not in (b"", made):
        raise AttestationError(f"event log: the digest of event {name!r} is not its payload's")
    return made
