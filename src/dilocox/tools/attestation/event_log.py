"""Event logs of TDX guests, replayed into the run-time measurement registers (RTMR 0 to 3).

Source: Intel, "TDX Module ABI": RTMR := SHA-384(RTMR ‖ digest). dstack's own events, all in RTMR 3,
have digest SHA-384(type ‖ ":" ‖ name ‖ ":" ‖ payload), type as four little-endian bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox.errors import AttestationError

DSTACK_EVENT = 0x08000001
COMPOSE = "compose-hash"
"""Name of the event whose payload is the SHA-256 of an application's compose file."""
MOST_EVENTS = 4096


def replay(events: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Return RTMR 0 to 3, hex, after all events.

    An event's payload counts only if its digest is made of it: digests of dstack's events are
    computed from name and payload. Raises `AttestationError` for events of another form.
    """
    if len(events) > MOST_EVENTS:
        raise AttestationError(f"event log: more than {MOST_EVENTS} events")
    registers = [bytes(48)] * 4
    try:
        for each in events:
            index = int(each["imr"])
            if not 0 <= index < 4:
                raise ValueError
            registers[index] = hashlib.sha384(registers[index] + _digest(each)).digest()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise AttestationError("event log: an event has another form") from None
    first, second, third, fourth = (each.hex() for each in registers)
    return first, second, third, fourth


def compose_hash(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the payload of the one event that names the compose file; None if there is none.

    The events must have been replayed. Raises `AttestationError` if there are two.
    """
    found = [
        str(each["event_payload"]).lower()
        for each in events
        if (each["imr"], each["event_type"], each.get("event")) == (3, DSTACK_EVENT, COMPOSE)
    ]
    if len(found) > 1:
        raise AttestationError(f"event log: two events {COMPOSE}")
    return found[0] if found else None


def _digest(event: Mapping[str, Any]) -> bytes:
    """Return the digest (48 bytes) that an event extends its register by."""
    said = bytes.fromhex(event["digest"])
    if event["event_type"] == DSTACK_EVENT:
        kind = DSTACK_EVENT.to_bytes(4, "little")
        payload = bytes.fromhex(event["event_payload"])
        made = hashlib.sha384(b":".join((kind, event["event"].encode(), payload))).digest()
        if said not in (b"", made):
            raise AttestationError(
                f"event log: the digest of event {event['event']!r} is not its payload's"
            )
        return made
    if len(said) != 48:
        raise ValueError
    return said
