"""The link between two machines, measured: on loopback, on a shaped line, and what goes wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.lab_needs import needs_network

from dilocox.errors import ConfigError, DilocoxError, TrainingError
from dilocox.tools.planner import link_probe
from dilocox.tools.planner.calibrate import link_entry, write
from dilocox.tools.planner.hardware_table import HardwareTable
from dilocox.tools.planner.link_probe import (
    MeasuredLink,
    answer,
    listen,
    measure_link,
    parse_address,
)
from dilocox.tools.testbed import Network
from dilocox.tools.testbed.link_spec import Line, Links


class Answering:
    """`answer` in a thread, with what came of it."""

    def __init__(self) -> None:
        self.listener = listen(0)
        self.port = int(self.listener.getsockname()[1])
        self.error: DilocoxError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            answer(self.listener)
        except DilocoxError as error:
            self.error = error

    def ended(self) -> DilocoxError | None:
        """The error it ended with, if any."""
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "WARM_UP", 0.05)
    monkeypatch.setattr(link_probe, "SECONDS", 0.2)


@pytest.fixture
def answering(quick: None) -> Iterator[Answering]:
    made = Answering()
    yield made
    made.ended()


def test_both_directions_and_the_round_trip(answering: Answering) -> None:
    said: list[str] = []
    found = measure_link("127.0.0.1", answering.port, said.append)
    assert answering.ended() is None
    assert 10e6 < found.up < 1e12
    assert 10e6 < found.down < 1e12
    assert 1e-6 < found.rtt < 0.1
    where = f"127.0.0.1:{answering.port}"
    assert said == [f"the link to {where}, sending", f"the link to {where}, receiving"]
    # One measurement alone: nobody listens any more.
    with pytest.raises(TrainingError, match=f"{where}: .*Connection refused.*plan --answer PORT"):
        measure_link("127.0.0.1", answering.port)


def test_strangers_are_turned_away(answering: Answering) -> None:
    with socket.create_connection(("127.0.0.1", answering.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stranger.settimeout(10.0)
        assert _rest(stranger) == b""
    measure_link("127.0.0.1", answering.port)
    assert answering.ended() is None


def _rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


def test_one_that_goes_away_is_named(answering: Answering) -> None:
    with socket.create_connection(("127.0.0.1", answering.port)) as asker:
        asker.sendall(link_probe.CONTROL)
        assert asker.recv(100) == link_probe.READY
    assert "127.0.0.1: disconnected" in str(answering.ended())


def test_something_else_that_answers_is_not_measured(quick: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
                connection.recv(100)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(
            TrainingError, match="the program that answers there does not measure links"
        ):
            measure_link("127.0.0.1", port)
        thread.join(10.0)


def test_a_line_on_which_nothing_comes_is_given_up(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Answering()
    with socket.create_connection(("127.0.0.1", made.port)) as asker:
        asker.sendall(link_probe.CONTROL)
        assert asker.recv(100) == link_probe.READY
        monkeypatch.setattr(link_probe, "PATIENCE", 0.2)
        asker.sendall(link_probe.UP)
        assert "disconnected" in str(made.ended())


def test_a_port_that_is_taken() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--answer {port}: cannot listen there \(.*in use"):
            listen(port)
    with pytest.raises(ConfigError, match="--answer 70000: cannot listen there"):
        listen(70000)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("lyon:29600", "lyon", 29600), ("10.0.0.2:1", "10.0.0.2", 1), ("[fd00::2]:80", "fd00::2", 80)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "lyon", "lyon:", ":80", "lyon:0", "lyon:65536", "lyon:x"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_address(text)


def test_as_an_entry_of_a_table() -> None:
    entry = link_entry(MeasuredLink(up=0.95e6, down=1.9e6, rtt=0.0123))
    assert entry == {"up": "8000kbit", "down": "16000kbit", "rtt_ms": 12.3}
    assert link_entry(MeasuredLink(up=1.0, down=1.0, rtt=0.1))["up"] == "1kbit"
    # What was counted comes out again.
    assert HardwareTable.load().link("8000kbit/16000kbit").rate == pytest.approx(0.95e6)


@pytest.mark.parametrize("rate", [1.0, 0.95e6, 118.7e6, 118.8e6, 2.4e9, 100e9])
def test_an_entry_of_any_rate_is_one_that_a_table_may_have(rate: float, tmp_path: Path) -> None:
    """Loopback is faster than a Gbit/s everywhere: seven digits of kbit are no rate."""
    entry = link_entry(MeasuredLink(rate, rate, 5e-5))
    file = tmp_path / "local-device.toml"
    write({"link": {"loopback": {**entry, "usd_per_gb": 0.0, "source": "measured"}}}, file)
    found = HardwareTable.load(file).link("loopback")
    assert found.rate == pytest.approx(rate, rel=1e-4, abs=120)


_MEASURE = """\
import sys
from dilocox.tools.planner import link_probe
if sys.argv[1] == "answer":
    listener = link_probe.listen(29600)
    print("listening", flush=True)
    link_probe.answer(listener)
else:
    found = link_probe.measure_link(sys.argv[2], 29600)
    print(found.up, found.down, found.rtt)
"""


@pytest.mark.slow
@needs_network
def test_a_shaped_line_is_measured_as_it_is() -> None:
    python = [sys.executable, "-c", _MEASURE]
    with Network(["a", "b"]) as network:
        network.shape(Links({"a": Line(4e6, 12e6)}))
        other = network.start("b", [*python, "answer"], stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        said = network.run("a", [*python, "measure", network.address("b")])
        assert other.wait(60.0) == 0
        other.stdout.close()
    up, down, rtt = map(float, said.split())
    # 1,448 of the 1,514 bytes of a frame are payload, which is .956.
    assert up * 8 / 0.956 == pytest.approx(4e6, rel=0.05)
    assert down * 8 / 0.956 == pytest.approx(12e6, rel=0.05)
    assert 0 < rtt < 0.05
