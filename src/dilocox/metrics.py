"""Where round metrics go: JSONL always, TensorBoard, Weights & Biases and Trackio by name.

The coordinator's process writes them, since it hears from every site. None of this imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dilocox.config import RunConfig
from dilocox.errors import ConfigError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Sink(Protocol):
    """A place that numbers are written to."""

    def write(self, site: str, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one site after inner step `step`."""

    def close(self) -> None:
        """Flush and end."""


class Metrics:
    """`metrics.jsonl` in the run folder, and the sinks of `[metrics]`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._sinks = [_open(name, config, folder) for name in config.metrics.sinks]

    def write(self, record: Mapping[str, Any]) -> None:
        """One record: `kind` and, for kind "round", site, round and numbers."""
        self._file.write(json.dumps(record, sort_keys=True) + "\n")
        self._file.flush()
        if record.get("kind") not in ("round", "evaluation"):
            return
        values = {
            key: float(value)
            for key, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
        }
        for sink in self._sinks:
            sink.write(str(record.get("site", "")), int(record.get("step", 0)), values)

    def close(self) -> None:
        """Close the file and all sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def check_sinks(config: RunConfig) -> None:
    """Raise `ConfigError` if a sink's package is not installed."""
    for name in config.metrics.sinks:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"metrics.sinks: {name} is not installed; pip install 'dilocox[{name}]'"
            )


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
    """Weights & Biases, and Trackio, whose interface is the same."""

    def __init__(self, package: str, config: RunConfig) -> None:
        module = importlib.import_module(package)
        self._run = module.init(
            project=config.metrics.project,
            name=config.run.name,
            config=config.model_dump(mode="json", exclude_none=True),
        )

    def write(self, site: str, step: int, values: Mapping[str, float]) -> None:
        prefix = f"{site}/" if site else ""
        self._run.log({f"{prefix}{key}": value for key, value in values.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()
