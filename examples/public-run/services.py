"""The outside services of the public run, as processes of this machine: a chain and S3 storage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ETHER = 10**18
PATIENCE = 300.0
"""Seconds that a process of this machine may take for what is expected of it."""


class Background:
    """A process that runs beside this one, and writes to a file."""

    def __init__(self, name: str, command: list[str], folder: Path, **more: Any) -> None:
        """Start `command`. Its output goes to `folder`/NAME.log."""
        self.name, self.log = name, folder / f"{name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **more
            )

    def said(self) -> str:
        """Return what the process has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, words: str, count: int = 1) -> str:
        """Wait until the process has printed `words` so often. Returns all that it has printed."""
        end = time.monotonic() + PATIENCE
        while self.said().count(words) < count:
            if self.process.poll() is not None and self.said().count(words) < count:
                raise SystemExit(f"{self.name} ended before it said {words!r}:\n{self.said()}")
            if time.monotonic() > end:
                raise SystemExit(f"{self.name} has not said {words!r}:\n{self.said()}")
            time.sleep(0.1)
        return self.said()

    def wait(self, codes: tuple[int, ...] = (0,)) -> None:
        """Wait for the end of the process, which must have one of these exit codes."""
        code = self.process.wait(PATIENCE)
        if code not in codes:
            raise SystemExit(f"{self.name} ended with exit code {code}:\n{self.said()}")

    def stop(self) -> None:
        """End the process, if it goes on."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Chain(Background):
    """A chain of this machine (anvil), whose coins are worth nothing."""

    def __init__(self, program: Path, folder: Path) -> None:
        """Start the chain, and wait until it answers."""
        port = free_port()
        options = ["--silent", "--port", str(port), "--hardfork", "cancun", "--balance", "1000000"]
        super().__init__("chain", [str(program), *options], folder)
        self.url = f"http://127.0.0.1:{port}"
        answers(self, lambda: self.call("eth_chainId"))
        self.rich = self.call("eth_accounts")[0]

    def call(self, method: str, *parameters: Any) -> Any:
        """Call the chain's server."""
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        request = urllib.request.Request(
            self.url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.load(reply)["result"]

    def give(self, account: str, coins: int) -> None:
        """Give an account coins."""
        payment = {"from": self.rich, "to": account, "value": hex(coins * ETHER)}
        self.call("eth_sendTransaction", payment)

    def pass_time(self, seconds: int) -> None:
        """Let the chain's clock go on."""
        self.call("evm_increaseTime", seconds)
        self.call("evm_mine")


class Storage(Background):
    """A server of this machine that speaks S3 (moto)."""

    def __init__(self, folder: Path, bucket: str) -> None:
        """Start the server and make a bucket. Commands find it by the environment."""
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__("storage", command, folder)
        address = f"http://127.0.0.1:{port}"
        self.url = f"s3://{bucket}/run"
        os.environ.update(
            AWS_ACCESS_KEY_ID="example", AWS_SECRET_ACCESS_KEY="example",
            AWS_DEFAULT_REGION="us-east-1", AWS_ENDPOINT_URL=address,
        )  # fmt: skip
        request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
        answers(self, lambda: urllib.request.urlopen(request, timeout=20).close())


def answers(server: Background, ask: Any) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            ask()
            return
        except (OSError, urllib.error.URLError):
            if server.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{server.name} does not answer:\n{server.said()}") from None
            time.sleep(0.1)
