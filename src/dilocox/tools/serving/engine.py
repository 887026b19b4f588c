"""The process that computes answers: `transformers serve`, at a socket that only its user may open.

This module is also the program of the process. The library's server does the work. `front` alone
talks to the process, because the library's server answers any host, loads any model that a request
names, and fails to list models where no hub was used.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError, ConfigError
from dilocox.utils.processes import die_with

_NEEDED = ("accelerate", "fastapi", "openai", "uvicorn")
_ENDING = 5.0
"""Seconds that the process has for its end."""
_SOCKET = "engine.socket"
_TAIL = 4096
"""Bytes of the log in which the last line is looked for."""


def check_packages() -> None:
    """Raise `ConfigError` if a package that `transformers serve` needs is not installed."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"dilocox serve needs {', '.join(missing)}; install with: pip install 'dilocox[serve]'"
        )


class Engine:
    """A running `transformers serve`."""

    def __init__(self, folder: Path, name: str, device: str, dtype: str, log: Path) -> None:
        """Start the process. Only its user can open `folder`, which has the sub-folder `name`.

        The process runs in `folder`, so it knows the model by its name, and no answer has the path.
        """
        self.socket = folder / _SOCKET
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(  # noqa: S603
                [
                    sys.executable, "-m", "dilocox.tools.serving.engine", "serve", name,
                    "--device", device, "--dtype", dtype, "--log-level", "error",
                ],
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C reaches this process alone, which ends the other one.
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the model is loaded. Raises `CheckpointError` if the process ends."""
        while not self.answers():
            if not self.runs():
                raise CheckpointError(f"the model cannot be served: {self.last_words()}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether the process answers requests."""
        connection = http.client.HTTPConnection("engine", timeout=5.0)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5.0)
        try:
            connection.sock.connect(str(self.socket))
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def runs(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the last line that the process has printed."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL))
            lines = log.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _run() -> None:
    die_with(os.getppid())
    import uvicorn
    from transformers.cli.transformers import main

    class AtSocket(uvicorn.Config):
        """Listens at the socket in this folder, whatever address the library asks for."""

        def __init__(self, app: Any, **settings: Any) -> None:
            kept = {key: settings[key] for key in settings if key not in ("host", "port")}
            super().__init__(app, uds=_SOCKET, **kept)

    uvicorn.Config = AtSocket  # type: ignore[assignment,misc]
    main()


if __name__ == "__main__":
    _run()
