"""Generations of coordinators of one run: the first, and each standby that took over from another.

The file `generations.json` lies in the coordinator's folder. A site names the newest position that
it has seen (`Position`), and the coordinator compares the position with its own log. So a site that
has talked to a newer coordinator ends an older one, and a log that lacks what a site has seen is
noticed before anything is decided with that site.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol.standby_messages import Position
from dilocox.errors import TrainingError
from dilocox.utils.storage import sync_folder

FILE = "generations.json"
MARKER = "standby.json"
"""File in the coordinator's folder of a standby: whom it follows, and the generation."""
Standing = Literal["", "fenced", "behind"]
"""What a site's position says of a coordinator: nothing; a newer one has taken over; its log lacks
events that the site has seen."""


class Generations:
    """The generation of the coordinator in a folder, and the earlier ones."""

    def __init__(self, folder: Path) -> None:
        """Read the file; without one this is the first generation. Raises `TrainingError`."""
        self._path = folder / FILE
        self.begun: list[int] = [0]
        """Number of the log's last event when each generation began, the first with 0."""
        self.over = False
        """Whether a newer coordinator has taken over."""
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            self.begun, self.over = [int(each) for each in said["begun"]], bool(said["over"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self._path}: cannot be read ({error}); put it back from a copy"
            ) from None

    @property
    def current(self) -> int:
        """Number of the generation, from 1."""
        return len(self.begun)

    def standing(self, seen: Position, last: int) -> Standing:
        """Return what a site's newest position says of this coordinator.

        `last`: number of this log's last event.
        """
        if seen.generation > self.current:
            return "fenced"
        if seen.generation == self.current:
            return "behind" if seen.number > last else ""
        # Up to the begin of the next generation both logs are the same.
        return "behind" if seen.generation and seen.number > self.begun[seen.generation] else ""

    def begin(self, generation: int, number: int) -> None:
        """Begin a later generation after event `number`, and write it down. Raises `OSError`."""
        self.begun += [number] * (generation - self.current)
        self._write()

    def end(self) -> None:
        """Write down that a newer coordinator has taken over. Raises `OSError`."""
        self.over = True
        self._write()

    def _write(self) -> None:
        said = {"begun": self.begun, "over": self.over}
        write_private(self._path, f"{json.dumps(said)}\n".encode())
        sync_folder(self._path.parent)


def refuse_fenced(folder: Path) -> None:
    """Raise `TrainingError` if another coordinator has taken over the run in `folder`."""
    if Generations(folder).over:
        raise TrainingError(
            f"{folder}: a standby has taken over this run, so this log is out of date: use the "
            "coordinator that goes on; to make this machine a standby, begin in a new run folder "
            "(docs/standby.md)"
        )


def refuse_standby(folder: Path) -> None:
    """Raise `TrainingError` if the coordinator's folder `folder` is that of a standby."""
    if (folder / MARKER).exists():
        raise TrainingError(
            f"{folder}: is the folder of a standby, and the run's coordinator alone writes the "
            "log; dilocox coordinator with --take-over makes this one the coordinator, and "
            "--standby-of HOST:PORT follows on"
        )
