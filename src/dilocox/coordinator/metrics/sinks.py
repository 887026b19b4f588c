"""Writers of round metrics: always JSONL; if configured, TensorBoard, Weights & Biases, Trackio.

The coordinator's process writes the metrics, because all sites report to it. Without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.held_out_figures import losses_by_source
from dilocox.errors import ConfigError
from dilocox.utils.append_file import AppendFile
from dilocox.utils.secret_text import hide_secrets
from dilocox.utils.storage import when_there_is_room

log = logging.getLogger(__name__)

KEPT = 100_000
"""Largest number of lines kept in memory while the disk is full; the latest lines are kept."""
_NOT_NUMBERS = ("step", "time", "after_round")
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Sink(Protocol):
    """Writer of numbers to one experiment tracker."""

    def write(self, site: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of one site, or of the run if `site` is empty, after inner step `step`."""

    def close(self) -> None:
        """Write all buffered numbers and close."""


class Metrics:
    """Writes `metrics.jsonl` in the run folder, and to the sinks that `[metrics]` names."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        torn = _is_torn(path)
        # Only the process that writes a record calls `sync`.
        self._file = AppendFile(path, durable=config.record.enabled)
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        """Lines that are not written yet, for example because the disk is full."""
        self._full = False
        if torn:
            # An earlier process was killed while it wrote: end its line, to keep later lines whole.
            self._take(b"\n")
        self._sinks: dict[str, Sink] = {}
        for name in config.metrics.sinks:
            try:
                self._sinks[name] = _open(name, config, folder)
            except Exception as error:  # Third-party code over a network may raise any error.
                self._failed(name, error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record to the file, and records of rounds and evaluations to the sinks.

        `record` has `kind` and, for "round", "evaluation" and "tasks", site, step and numbers. A
        sink that fails is not used any more, and a message in the file says so.
        """
        self._line(record)
        if record.get("kind") not in ("round", "evaluation", "tasks"):
            return
        named = record
        if record["kind"] == "tasks":
            named = {f"tasks/{name}": value for name, value in record["results"].items()}
        if record["kind"] == "evaluation":
            own = losses_by_source(record)
            named = {**record, **{f"val_loss/{name}": loss for name, loss in own.items()}}
        values = {
            key: float(value)
            for key, value in named.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and key not in _NOT_NUMBERS
        }
        site, step = str(record.get("site", "")), int(record.get("step", 0))
        # Evaluations of the anchor belong to the run, because another site may make them later.
        places = [site, ""] if site and record["kind"] != "round" else [site]
        for name, sink in list(self._sinks.items()):
            try:
                for place in places:
                    sink.write(place, step, values)
            except Exception as error:  # Third-party code over a network may raise any error.
                del self._sinks[name]
                self._failed(name, error)

    @property
    def is_written(self) -> bool:
        """Whether all lines are in the file, and none waits for room on the disk."""
        return not self._kept

    def sync(self) -> None:
        """Return when all lines in the file survive a power cut. An error is only logged.

        Raises `ValueError` in a run without a record. Any thread may call it.
        """
        try:
            self._file.sync()
        except OSError as error:
            log.error("metrics.jsonl: may lose lines by a power cut (%s)", error.strerror)

    def close(self) -> None:
        """Close all sinks and the file. If the disk is full, wait for room."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._failed(name, error)
        try:
            when_there_is_room(self._flush, "metrics.jsonl")
        except OSError as error:
            log.error("metrics.jsonl: its last %d lines were not written (%s)",
                      len(self._kept), error.strerror)  # fmt: skip
        self._file.close()

    def _failed(self, name: str, error: Exception) -> None:
        text = f"metrics: {name} failed and is left out from now on ({hide_secrets(str(error))})"
        log.warning("%s", text)
        self._line({"kind": "message", "text": text})

    def _line(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(finite(record), sort_keys=True, allow_nan=False) + "\n"
        self._take(line.encode())

    def _take(self, line: bytes) -> None:
        self._kept.append(line)
        try:
            self._flush()
        except OSError as error:
            if not self._full:
                self._full = True
                log.error(
                    "metrics.jsonl: cannot be written (%s); its lines are kept until it can be: "
                    "free the disk",
                    error.strerror,
                )

    def _flush(self) -> None:
        while self._kept:
            self._file.append(self._kept[0])
            self._kept.popleft()
        if self._full:
            self._full = False
            log.warning("metrics.jsonl: is written again")


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None in place of NaN and infinity, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _is_torn(path: Path) -> bool:
    """Return whether the last line of a file lacks its newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def check_sinks(config: RunConfig) -> None:
    """Raise `ConfigError` if a sink's package is not installed."""
    for name in config.metrics.sinks:
        found = importlib.util.find_spec(_PACKAGES[name])
        # A folder of this name, such as the one that wandb writes, is not the package.
        if found is None or found.origin is None:
            raise ConfigError(f"metrics.sinks: {name} is not installed; run: pip install {name}")


def _open(name: str, config: RunConfig, folder: Path) -> Sink:
    if name == "tensorboard":
        return _TensorBoard(folder / "tensorboard")
    if name == "wandb":
        return _WandbLike("wandb", config)
    return _WandbLike("trackio", config)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def write(self, site: str, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.summary import Writer

        if site not in self._writers:
            self._writers[site] = Writer(str(self._folder / (site or "run")))
        for key, value in values.items():
            self._writers[site].add_scalar(key, value, step)
        self._writers[site].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _WandbLike:
    """Sink for Weights & Biases and for Trackio, which has the same interface."""

    def __init__(self, package: str, config: RunConfig) -> None:
        module = importlib.import_module(package)
        self._run = module.init(
            project=config.metrics.project,
            name=config.run.name,
            config=config.model_dump(mode="json", exclude_none=True),
        )

    def write(self, site: str, step: int, values: Mapping[str, float]) -> None:
        prefix = f"{site}/" if site else ""
        # The trackers reserve `step` and require it to rise, but it falls between reports of sites.
        numbers = {f"{prefix}{key}": value for key, value in values.items()}
        self._run.log({**numbers, "inner_step": step})

    def close(self) -> None:
        self._run.finish()
