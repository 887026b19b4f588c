"""A model's weights are fetched and looked at before anything waits for them.

A site that has enrolled is expected to beat soon. So what comes from the hub is downloaded before,
and what cannot be used is refused while nothing has been changed yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.errors import ModelError
from dilocox.models import load_model_config
from dilocox.models.architecture import one_line
from dilocox.models.hf_weights import PretrainedWeights, locate_weights, stored_names
from dilocox.utils import processes

Progress = Callable[[str, float], None]


def fetch_weights(config: RunConfig, progress: Progress = lambda _step, _share: None) -> None:
    """Have the weights that the run begins with on this machine; nothing if it needs none.

    In a child process: the hub's client starts threads, and this process is to fork. Two that
    fetch the same model at a time wait for each other. Raises `ModelError` for a download that
    fails, and for files that are missing, pickled, cut off or of another model.
    """
    if config.model.path is not None and config.model.pretrained:
        processes.call_in_child(_fetch, config, on_progress=progress)


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
    """Raise `ModelError` unless `file` is whole and holds tensors of these `names`."""
    from safetensors import SafetensorError, safe_open

    try:
        # Opening compares the header with the file's length.
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
