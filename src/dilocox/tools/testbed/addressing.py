"""Names and addresses of a lab's parts, all made from its maker's process number; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.tools.testbed.commands import PREFIX

DEVICE = "eth0"
"""The one interface of a host, beside loopback."""
_SUBNET = "10.213"


@dataclass(frozen=True)
class Layout:
    """Where the hosts of process `owner` are."""

    owner: int
    hosts: tuple[str, ...]

    @property
    def stem(self) -> str:
        """Begins the names of all that this process made."""
        return f"{PREFIX}{self.owner}-"

    @property
    def switch(self) -> str:
        """Network namespace of the bridge."""
        return f"{self.stem}switch"

    def namespace(self, host: str) -> str:
        """Network namespace of a host. Apart from the switch's, whatever a host is called."""
        return f"{self.stem}at-{host}"

    def port(self, host: str) -> str:
        """The switch's end of the host's cable."""
        return f"p{self.hosts.index(host)}"

    def address(self, host: str) -> str:
        """IPv4 address of a host."""
        return f"{_SUBNET}.77.{self.hosts.index(host) + 1}"

    def mac(self, host: str) -> str:
        """Hardware address of a host: locally administered, from its number."""
        return f"02:00:0a:d5:4d:{self.hosts.index(host) + 1:02x}"


def owner_of(name: str) -> int | None:
    """Process number in a name that a lab made; none for any other name."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if name.startswith(PREFIX) and number.isdigit() else None


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """`hosts` as they are kept. At most 250 of them, all different."""
    assert 0 < len(hosts) <= 250
    assert len(set(hosts)) == len(hosts)
    return tuple(hosts)
