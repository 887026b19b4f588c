"""Which requests a server on this machine answers: those whose `Host` header names it.

A web page can make a visitor's browser ask a server of the visitor's own machine, under a name that
leads there (DNS rebinding). Such a name is in the `Host` header.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def names_server(host: str, listening: str) -> bool:
    """Return whether the `Host` header `host` names a server: by its name, or by any address.

    `listening`: name or address that the server listens at.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", listening.lower()):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
