"""Section `[network]` of the run file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dilocox.config.base import Section


class NetworkSection(Section):
    """`[network]`: the coordinator's address, the exchange's connections, and time-outs."""

    host: str = "127.0.0.1"
    """Address that the coordinator listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port that the coordinator listens on. 0: a free port."""
    advertise: str | None = None
    """Coordinator address in the `dilocox join` line that is printed. If not set, it is `host`, or
    this machine's own address if `host` is 0.0.0.0."""
    interface: str | None = None
    """Network interface of the exchange for sites that set none. If not set, it is the interface
    that reaches the coordinator."""
    congestion: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,15}$")] | None = None
    """TCP congestion control of the exchange at this site, such as `cubic`; by default the
    machine's. With three or more sites, `cubic` shares links more evenly than `bbr`; `bbr` is
    better on links that lose packets (docs/notes/exchange.md)."""
    link_timeout: Annotated[float, Field(ge=5.0)] = 120.0
    """Seconds that a link may be silent. All other time-outs follow from it and `heartbeat`."""
    heartbeat: Annotated[float, Field(gt=0.0)] = 5.0
    """Seconds within which the death of a rank is noticed."""

    @model_validator(mode="after")
    def _consistent(self) -> NetworkSection:
        if self.heartbeat > self.link_timeout:
            raise ValueError(
                f"heartbeat {self.heartbeat:g} s is above link_timeout {self.link_timeout:g} s"
            )
        return self
