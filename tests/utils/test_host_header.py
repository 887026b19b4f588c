"""Which `Host` headers name a server."""

from __future__ import annotations

import pytest

from dilocox.utils.host_header import names_server


@pytest.mark.parametrize("host", ["localhost:9", "[::1]:80", "10.0.0.7", "gpu1:8000", "GPU1"])
def test_a_server_is_named_by_its_name_or_by_an_address(host: str) -> None:
    assert names_server(host, "GPU1")


@pytest.mark.parametrize("host", ["", "[", "attacker.example", "gpu1.attacker.example:80"])
def test_any_other_name_is_not_the_server_s(host: str) -> None:
    assert not names_server(host, "GPU1")
