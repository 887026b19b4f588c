"""TCP congestion control of the connections between sites."""

from __future__ import annotations

import socket
from pathlib import Path

from dilocox.errors import ConfigError

_OPTION = getattr(socket, "TCP_CONGESTION", None)
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
UNEVEN = "bbr"
"""Congestion control that leaves 13 to 27 % of a line unused when a site sends to several sites at
once (docs/notes/exchange.md)."""


def check_congestion(name: str | None) -> None:
    """Check that this machine can use the congestion control `name`; None: its default.

    Raises `ConfigError` if it cannot.
    """
    if name is None:
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            set_congestion(trial, name)
    except OSError as error:
        there = _AVAILABLE.read_text(encoding="utf-8").split() if _AVAILABLE.exists() else []
        known = f"this system has {', '.join(there)}" if there else "it needs Linux"
        raise ConfigError(
            f'network.congestion: "{name}" cannot be used ({error.strerror or error}); {known}; '
            "take one of those that the system allows, or leave it out"
        ) from None


def congestion_hint(sites: int, chosen: str | None) -> str | None:
    """Return one line of advice if this machine's default congestion control suits the run badly.

    Returns None for fewer than three `sites`, if the run file has `chosen` a congestion control, or
    if the default is good.
    """
    if sites < 3 or chosen is not None or not _DEFAULT.exists():
        return None
    default = _DEFAULT.read_text(encoding="utf-8").strip()
    if not default.startswith(UNEVEN):
        return None
    return (
        f"this machine's TCP congestion control is {default}, which leaves much of a line unused "
        "when three or more sites exchange (in our test of four sites it used 80 to 87 % of a "
        "line, and cubic 91 to 94 %); if your lines lose few packets, set "
        'network.congestion = "cubic"'
    )


def set_congestion(connection: socket.socket, name: str) -> None:
    """Give a TCP socket the congestion control `name`. Raises `OSError`."""
    if _OPTION is None:
        raise OSError("not on this system")
    connection.setsockopt(socket.IPPROTO_TCP, _OPTION, name.encode())
