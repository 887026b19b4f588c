"""Downloads and checks a model's weights before a site enrols.

A site must send heartbeats soon after its enrolment, and a download from the hub may take longer.
So the site downloads its weights first. Weights that cannot be used are refused before anything
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.errors import ModelError
from dilocox.models import load_model_config
from dilocox.models.architecture import one_line
from dilocox.models.base_weights import base_digest
from dilocox.models.hf_weights import PretrainedWeights, locate_weights, stored_names
from dilocox.utils import processes

Progress = Callable[[str, float], None]


def fetch_weights(config: RunConfig, progress: Progress = lambda _step, _share: None) -> None:
    """Make sure that the weights from which the run starts are on this machine.

    Does nothing if the run starts with fresh weights. The download runs in a child process, because
    the hub's client starts threads and this process must stay able to fork. Two processes that
    fetch the same model at the same time wait for each other.

    `progress` is called with the name of the step and its finished fraction, 0 to 1. Raises
    `ModelError` if the download fails, or if files are missing, pickled, truncated or of another
    model.
    """
    if config.model.path is not None and config.model.pretrained:
        processes.call_in_child(_fetch, config, on_progress=progress)


def digest_of_base(config: RunConfig) -> str | None:
    """Return the digest of the run's frozen base model, or None if the run has no adapters.

    Reads all weights, in a child process. Raises `ModelError` if they cannot be read.
    """
    if config.adapter is None:
        return None
    digest: str = processes.call_in_child(_digest, config, on_progress=lambda *_: None)
    return digest


def _digest(config: RunConfig, progress: Progress) -> str:
    folder = locate_weights(str(config.model.path), config.model.revision)
    return base_digest(folder, lambda share: progress("reading the weights", share))


def _fetch(config: RunConfig, progress: Progress) -> None:
    progress("fetching the weights", 0.0)
    folder = locate_weights(str(config.model.path), config.model.revision)
    PretrainedWeights(folder, load_model_config(config.model, None))
    files: dict[str, set[str]] = {}
    for name, file in stored_names(folder).items():
        files.setdefault(file, set()).add(name)
    for number, (file, names) in enumerate(sorted(files.items())):
        progress("reading the weights' headers", number / len(files))
        check_header(folder / file, names)


def check_header(file: Path, names: set[str]) -> None:
    """Raise `ModelError` unless `file` is complete and contains tensors with all `names`."""
    from safetensors import SafetensorError, safe_open

    try:
        # `safe_open` compares the header with the length of the file.
        with safe_open(file, framework="pt") as opened:
            missing = sorted(names - set(opened.keys()))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file}: cannot be read ({one_line(error)}); fetch the model again"
        ) from None
    if missing:
        raise ModelError(
            f"{file}: lacks {missing[0]}, which the index names; fetch the model again"
        )
