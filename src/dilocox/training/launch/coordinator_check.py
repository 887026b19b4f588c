"""Checks of the coordinator's settings: sinks, number of sites, and the address to listen on."""

from __future__ import annotations

import socket
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.transport import host_and_port
from dilocox.coordinator.metrics.sinks import check_sinks
from dilocox.errors import ConfigError, TrainingError

ENDPOINT = "endpoint.json"
"""File in the coordinator's folder with address, join tokens and the operator's identity. Only its
owner can read it."""


def check_coordinator(config: RunConfig, wait_for: int | None = None) -> None:
    """Raise `ConfigError` for bad settings of the coordinator: sinks, address, number of sites."""
    check_sinks(config)
    least, most = config.outer.min_sites, len(config.sites)
    if wait_for is not None and not least <= wait_for <= most:
        raise ConfigError(
            f"--wait-for {wait_for}: give a number of sites from outer.min_sites = {least} to the "
            f"{most} of the run file"
        )
    host, port = config.network.host, config.network.port
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: closed connections of an earlier run must not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror as error:
        raise ConfigError(
            f'network.host "{host}": no such address ({error.strerror}); name one of this machine'
        ) from None
    except OSError as error:
        raise ConfigError(
            f"network.port {port} on {host}: cannot be listened on ({error.strerror}); choose "
            "another network.port (0 takes a free one) or network.host"
        ) from None


def port_before(folder: Path) -> int:
    """Return the earlier port of the run's coordinator, which its sites know; 0 without one."""
    try:
        port = host_and_port(Endpoint.load(folder / "coordinator" / ENDPOINT).url)[1]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{folder / 'coordinator' / ENDPOINT}: cannot be read ({error}); set network.port to "
            "the port of the join lines"
        ) from None
    return port


def with_port(config: RunConfig, port: int) -> RunConfig:
    """Return `config` with `network.port` set to `port`."""
    network = config.network.model_copy(update={"port": port})
    return config.model_copy(update={"network": network})
