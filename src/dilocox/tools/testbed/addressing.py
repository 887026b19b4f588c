"""Names and addresses of a lab's parts, derived from the process id of its owner. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.tools.testbed.commands import PREFIX

DEVICE = "eth0"
"""Name of a host's only interface besides loopback."""
_SUBNET = "10.213"


@dataclass(frozen=True)
class Layout:
    """Names and addresses of the hosts of process `owner`."""

    owner: int
    hosts: tuple[str, ...]

    @property
    def stem(self) -> str:
        """Prefix of the names of everything that this process has made."""
        return f"{PREFIX}{self.owner}-"

    @property
    def switch(self) -> str:
        """Network namespace of the bridge."""
        return f"{self.stem}switch"

    def namespace(self, host: str) -> str:
        """Network namespace of a host. It never equals the switch's, whatever the host's name."""
        return f"{self.stem}at-{host}"

    def port(self, host: str) -> str:
        """Name of the host's port: the switch's end of the link."""
        return f"p{self.hosts.index(host)}"

    def address(self, host: str) -> str:
        """IPv4 address of a host."""
        return f"{_SUBNET}.77.{self.hosts.index(host) + 1}"

    def mac(self, host: str) -> str:
        """Hardware address of a host: locally administered, from its number."""
        return f"02:00:0a:d5:4d:{self.hosts.index(host) + 1:02x}"


def owner_of(name: str) -> int | None:
    """Return the process id in a name that a lab has made. None for any other name."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if name.startswith(PREFIX) and number.isdigit() else None


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return `hosts` as a tuple. Asserts that there are 1 to 250 of them, all different."""
    assert 0 < len(hosts) <= 250
    assert len(set(hosts)) == len(hosts)
    return tuple(hosts)
