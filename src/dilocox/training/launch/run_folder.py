"""The run's folder: checks that the run may use the folder, and clears the folder for a new run."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dilocox.config.run_config import RunConfig, load_written
from dilocox.errors import ConfigError, TrainingError
from dilocox.training.launch.coordinator_check import check_coordinator
from dilocox.utils.storage import keep_file, nearest_existing

WRITTEN = (
    "run.toml",
    "metrics.jsonl",
    "summary.json",
    ".summary.json.part",
    "ledger.json",
    "report.html",
    "checkpoints",
    "coordinator",
    "evaluations",
    "logs",
    "model",
    "model-best*",
    "model-tick-*",
    "private",
    "record",
    "tensorboard",
    "trace",
    "trace*.json",
)
"""Names that a run writes into its folder. `--overwrite` removes these and nothing else."""
_ELSEWHERE = "choose another run.name (`dilocox handover` lets the new run go on from here)"
STARTED = ("metrics.jsonl", "coordinator", "logs", "private", "record")
"""Names that a start leaves behind if it failed before any training."""


def check_folder(config: RunConfig, resume: bool, overwrite: bool = False) -> None:
    """Check that the run may use its folder, and change nothing.

    Raises `TrainingError` in these cases:

    - this user may not use the folder;
    - the folder holds a run, and neither `resume` nor `overwrite` is set;
    - the run in the folder is going on;
    - no run wrote the files in the folder;
    - with `resume`, the folder holds no run, or another run than that of `config`.
    """
    with _usable(config.folder):
        _check_folder(config, resume, overwrite)


def _check_folder(config: RunConfig, resume: bool, overwrite: bool) -> None:
    folder = config.folder
    written = folder / "run.toml"
    if not written.exists():
        if resume:
            raise TrainingError(f"{folder}: no run to resume; leave out --resume to start a run")
        foreign = _foreign(config)
        if foreign:
            raise TrainingError(
                f"{folder}: holds files that no run has written ({foreign[0]}); choose another "
                "run.folder or move the files away"
            )
        check_writable(folder)
        return
    if not (resume or overwrite):
        raise TrainingError(
            f"{folder}: holds a run already; add --resume to go on, --overwrite to replace it, or "
            "choose another run.name"
        )
    if resume:
        _check_same_run(config, written)
    else:
        _check_kept(config)
    if _held(folder / "coordinator" / "coordinator.lock"):
        raise TrainingError(f"{folder}: its run is going on right now; stop it first")


def _check_kept(config: RunConfig) -> None:
    """Raise `TrainingError` if this run reads what `--overwrite` would remove first."""
    read = {"model.path": config.model.path, "data.tokenizer": config.data.tokenizer}
    if config.adapter is not None:
        read["adapter.path"] = config.adapter.path
        read["adapter.handover"] = config.adapter.handover
    folder = config.folder.resolve()
    for key, named in read.items():
        place = Path(named or "").expanduser().resolve()
        if named is None or not place.exists() or not place.is_relative_to(folder):
            continue
        inside = place.relative_to(folder).parts
        if inside and any(fnmatch.fnmatch(inside[0], pattern) for pattern in WRITTEN):
            raise TrainingError(
                f"{key} {named}: --overwrite would remove it, since it is in the run's folder; "
                "choose another run.name, or move it away"
            )


def claim_folder(config: RunConfig, resume: bool, overwrite: bool = False) -> Path:
    """Create the run's folder, or keep it with `resume`; `overwrite` removes an earlier run in it.

    Returns the folder. Raises the errors of `check_folder` and `check_coordinator`, and
    `TrainingError` if the folder cannot be written to.
    """
    check_folder(config, resume, overwrite)
    check_coordinator(config)
    folder = config.folder
    with _usable(folder):
        _claim(folder, resume)
    return folder


def _claim(folder: Path, resume: bool) -> None:
    if not resume:
        begun = (folder / "run.toml").exists()
        for pattern in WRITTEN if begun else STARTED:
            for entry in folder.glob(pattern):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_run_file(config: RunConfig) -> None:
    """Write `run.toml` into the run's folder, unless it is there with the same content.

    A power cut leaves the earlier file or the new one: without a whole file nobody can resume or
    verify the run. Raises `OSError` if the file cannot be written.
    """
    keep_file(config.folder / "run.toml", config.to_toml().encode())


def check_writable(folder: Path) -> None:
    """Raise `TrainingError` if files cannot be written to `folder`, or if it cannot be created.

    The check creates and removes a folder, because permissions alone may be misleading.
    """
    with _usable(folder):
        os.rmdir(tempfile.mkdtemp(prefix=".dilocox-", dir=nearest_existing(folder)))


def check_reachable(folder: Path) -> None:
    """Raise `TrainingError` if this user may not enter a run's folder, or the coordinator's in it.

    Neither needs to exist, but no file may stand in the place of a folder.
    """
    with _usable(folder):
        for name in ("run.toml", "coordinator/coordinator.lock"):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).stat()


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the folder, or of a file in it, into a `TrainingError`."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder}: cannot be written to ({error.strerror}); choose another run.folder"
        ) from None


def _foreign(config: RunConfig) -> list[str]:
    """Return names in the folder that no start has left and that are not token files."""
    folder = config.folder
    if not folder.is_dir():
        return []
    own = [
        config.data_folder,
        *(Path(s.data).expanduser() for s in config.sites.values() if s.data),
    ]
    tokens = [Path(os.path.abspath(place)) for place in own]
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not entry.name.startswith(".")
        and entry.name not in STARTED
        and not any(place.is_relative_to(Path(os.path.abspath(entry))) for place in tokens)
    )


def _held(lock: Path) -> bool:
    """Return whether a running coordinator holds the file `lock`."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _check_same_run(config: RunConfig, written: Path) -> None:
    try:
        earlier = load_written(written)
    except ConfigError as error:
        raise TrainingError(f"{error}; put back the file that the run wrote there") from None
    if earlier.digest() == config.digest():
        return
    before, now = earlier.shared(), config.shared()
    for section, values in now.items():
        for key, value in values.items():
            earlier_value = before.get(section, {}).get(key)
            if earlier_value != value and section != "sites":
                began, said = (json.dumps(each) for each in (earlier_value, value))
                mend = "without it" if began == "null" else f"with --set {section}.{key}={began}"
                raise TrainingError(
                    f"{written.parent}: was started with {section}.{key} = {began}, but the run "
                    f"file has {said}; resume {mend}, or {_ELSEWHERE}"
                )
    raise TrainingError(f"{written.parent}: was started with other sites; {_ELSEWHERE}")


def as_begun(config: RunConfig) -> RunConfig:
    """Return `config` as it continues the run in its folder (see `RunConfig.as_begun`).

    Called after `check_folder` has found that run. Raises `ConfigError`.
    """
    return config.as_begun(load_written(config.folder / "run.toml"))


def refuse_finished(folder: Path) -> None:
    """Raise `TrainingError` if the run in `folder` is complete."""
    summary = folder / "summary.json"
    if summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["phase"] == "finished":
        raise TrainingError(
            f"{folder}: this run is finished and its model is in {folder / 'model'}; to train the "
            "model further, start a new run with model.path set to that folder"
        )
