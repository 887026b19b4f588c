"""Checks before any process starts: folder, port, model, data, memory and disk.

The checks are called in this order: `check_folder` and `check_coordinator` on the coordinator's
machine, `check_tokenizer` for a new run (`tokenizer_check`), `check_place` (`data.folder`),
`check_handover` (`training.portable_checkpoint`), `check_model`, and `fetch_weights`
(`models.prefetch`). Then the data is prepared, and `check_run` follows. `claim_folder` is last:
before it no file of an earlier run in the folder is changed, so a refused start loses nothing.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, load_written
from dilocox.coordinator.metrics.sinks import check_sinks
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.data.manifest import MANIFEST
from dilocox.errors import ConfigError, DataError, TrainingError
from dilocox.inner import memory
from dilocox.inner.cgroup import available_memory
from dilocox.models import (
    count_parameters,
    load_model_config,
    probe_attention,
    probe_cut,
    probe_weights,
)
from dilocox.models.transformers_internals import check as check_transformers
from dilocox.outer.layout import split_pieces
from dilocox.record.log.blob_store import Store
from dilocox.record.writer.windows import has_windows, small_budget
from dilocox.training.builder import ModelPlan
from dilocox.training.launch.cuda_driver import ranks_use_gpu
from dilocox.training.launch.tokenizer_check import read_vocabulary, tokenizer_size
from dilocox.training.payload_sizes import stage_shapes
from dilocox.training.portable_checkpoint import Handover
from dilocox.training.record_volume import budget_below_rounds, record_bytes, record_line
from dilocox.utils import storage
from dilocox.utils.formatting import number, size

WRITTEN = (
    "run.toml",
    "metrics.jsonl",
    "summary.json",
    ".summary.json.part",
    "ledger.json",
    "report.html",
    "checkpoints",
    "coordinator",
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

    Raises `TrainingError` if the folder holds a run and neither `resume` nor `overwrite` is set,
    if the run in it is going on, or if no run wrote the files in it. With `resume`, a folder
    without a run, or with another run than that of `config`, is an error as well.
    """
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
        _check_writable(folder)
        return
    if not (resume or overwrite):
        raise TrainingError(
            f"{folder}: holds a run already; add --resume to go on, --overwrite to replace it, or "
            "choose another run.name"
        )
    if resume:
        _check_same_run(config, written)
    if _held(folder / "coordinator" / "coordinator.lock"):
        raise TrainingError(f"{folder}: its run is going on right now; stop it first")


def claim_folder(config: RunConfig, resume: bool, overwrite: bool = False) -> Path:
    """Create the run's folder, or keep it with `resume`; `overwrite` removes an earlier run in it.

    Returns the folder. Raises the errors of `check_folder` and `check_coordinator`, and
    `TrainingError` if the folder cannot be written to.
    """
    check_folder(config, resume, overwrite)
    check_coordinator(config)
    folder = config.folder
    if not resume:
        begun = (folder / "run.toml").exists()
        for pattern in WRITTEN if begun else STARTED:
            for entry in folder.glob(pattern):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(
            f"{folder}: cannot be written to ({error.strerror}); choose another run.folder"
        ) from None
    return folder


def _check_writable(folder: Path) -> None:
    """Create and remove a folder in the place of `folder`: permissions alone may be misleading."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".dilocox-", dir=place))
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
            if before[section].get(key) != value and section != "sites":
                began, said = (json.dumps(each) for each in (before[section].get(key), value))
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


def check_coordinator(config: RunConfig, wait_for: int | None = None) -> None:
    """Raise `ConfigError` for bad settings of the coordinator: sinks, address, number of sites."""
    check_sinks(config)
    least, most = config.outer.min_sites, len(config.sites)
    if wait_for is not None and not least <= wait_for <= most:
        raise ConfigError(
            f"--wait-for {wait_for}: give a number of sites from outer.min_sites = {least} to the "
            f"{most} of the run file"
        )
    host, port = config.network.host, config.network.port
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: closed connections of an earlier run must not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror as error:
        raise ConfigError(
            f'network.host "{host}": no such address ({error.strerror}); name one of this machine'
        ) from None
    except OSError as error:
        raise ConfigError(
            f"network.port {port} on {host}: cannot be listened on ({error.strerror}); choose "
            "another network.port (0 takes a free one) or network.host"
        ) from None


def check_model(config: RunConfig) -> None:
    """Raise `ModelError` or `ConfigError` for a model that cannot be trained in this layout.

    Needs no text, whose preparation may take hours. A tokenizer that will be trained counts with
    `data.vocabulary_size` tokens. A tokenizer that will be loaded is loaded now.
    """
    check_transformers()
    _check_attention(config)
    known = config.data.vocabulary_size if config.data.tokenizer == "train" else None
    blueprint = ModelPlan.of(config, known)
    _check_blueprint(config, blueprint)
    if config.model.path is None or not config.model.pretrained:
        probe_weights(blueprint.hf_config)
    if known is None and not (config.data_folder / MANIFEST).exists():
        load_model_config(config.model, tokenizer_size(config.data.tokenizer))


def check_data(
    config: RunConfig, files: TokenFiles, sites: Sequence[str], own_dataset: bool = False
) -> None:
    """Raise `DataError` or `ConfigError` for token files that `sites` cannot train on.

    `files`: the token files that all sites share. With `own_dataset` sequences come from the
    user's function, so only the tokenizers of the sites' own token files are checked.
    """
    spaces: dict[str, TokenFiles] = {}
    for site in sites:
        folder = config.sites[site].data
        spaces[site] = TokenFiles.open(Path(folder).expanduser()) if folder else files
        if folder:
            _check_same_tokenizer(site, files, spaces[site])
    if own_dataset:
        return
    for site in sites:
        space = SequenceSpace(
            spaces[site], seed=config.run.seed, sequence_length=config.data.sequence_length
        )
        batch = config.site_batch(site)
        if config.outer.global_batch == "fixed":
            batch = config.global_batch  # the batch of a site that is the only one left
        if batch > space.sequences_per_epoch:
            private = config.sites[site].data or config.sites[site].batch_size
            key = f"sites.{site}.batch_size" if private else "site.batch_size"
            raise ConfigError(
                f"{key} {batch} is above the {space.sequences_per_epoch} sequences of "
                f"{spaces[site].folder}: lower it or data.sequence_length, or give more text"
            )


def _check_same_tokenizer(site: str, files: TokenFiles, own: TokenFiles) -> None:
    for what in ("vocabulary_size", "end_of_text"):
        if own.content[what] != files.content[what]:
            raise DataError(
                f"sites.{site}.data {own.folder}: its {what} is {own.content[what]}, the run's "
                f"{files.content[what]}; prepare it with data.tokenizer = "
                f'"{files.tokenizer_folder}"'
            )
    # Digests of the files may differ, because a tokenizer changes when it is loaded and saved.
    ours, theirs = (each.tokenizer_folder / "tokenizer.json" for each in (own, files))
    if read_vocabulary(ours) != read_vocabulary(theirs):
        raise DataError(
            f"sites.{site}.data {own.folder}: made with another tokenizer than the run's; prepare "
            f'it with data.tokenizer = "{files.tokenizer_folder}"'
        )


def check_run(
    config: RunConfig,
    vocabulary_size: int,
    sites_here: int,
    own_dataset: bool = False,
    ranks_here: int | None = None,
) -> None:
    """Check the run with its token files. Raises the error that a rank would raise later.

    `sites_here`: number of sites on this machine; if these are not all, the caller checks the
    site's own token files by `check_data`. `ranks_here`: number of the site's ranks on this
    machine, which are the first ones; None means all.
    """
    files = TokenFiles.open(config.data_folder)
    everyone = list(config.sites) if sites_here == len(config.sites) else []
    check_data(config, files, everyone, own_dataset)
    if config.model.handover:
        check_handed_data(config, files)
    blueprint = ModelPlan.of(config, vocabulary_size)
    parameters = _check_blueprint(config, blueprint)
    if ranks_here is not None:
        parameters = _held_by_first(config, parameters, ranks_here)
    on_gpu = ranks_use_gpu(config)
    available = available_memory()
    if available is not None:
        windows = has_windows(config, count_parameters(blueprint.hf_config))
        problem = memory.host_problem(config, parameters, sites_here, available, on_gpu, windows)
        if problem is not None:
            raise ConfigError(problem)
    _check_disk(config, sum(parameters), sites_here)
    if config.record.enabled:
        _check_store(config, blueprint, sum(parameters))


def check_handed_data(config: RunConfig, files: TokenFiles) -> None:
    """Raise `ConfigError` for token files that differ from those of the handover's run."""
    found = Handover.read(config.model.path)
    if files.digest == found.data_digest:
        return
    tokenizer = json.dumps(config.data.tokenizer)
    if _has_tokenizer_of(files, Path(str(config.model.path)).expanduser()):
        cause = (
            "the tokenizer knows the same tokens, so most likely data.source or "
            f"data.validation_fraction differed in that run, or {tokenizer} was not the name in "
            "data.tokenizer"
        )
    else:
        cause = f"most likely data.tokenizer, here {tokenizer}, differed in that run"
    raise ConfigError(
        f"model.handover: the token files' digest is {files.digest}, but run {found.run} had "
        f"{found.data_digest}, and token ranges would name other text; {cause}: set [data] as in "
        "its run.toml, copy that run's data folder, or set handover = false"
    )


def _has_tokenizer_of(files: TokenFiles, model: Path) -> bool:
    """Return whether the token files' tokenizer has the tokens of the one in folder `model`."""
    ours, theirs = (place / "tokenizer.json" for place in (files.tokenizer_folder, model))
    return theirs.is_file() and read_vocabulary(theirs) == read_vocabulary(ours)


def _check_store(config: RunConfig, blueprint: ModelPlan, parameters: int) -> None:
    """Check the place of the record.

    Raises `RecordError` if the store cannot be used, and `ConfigError` if `record.keep` or the
    free disk space is too small."""
    whole = count_parameters(blueprint.hf_config)
    least = small_budget(config, whole)
    if least is not None:
        raise ConfigError(
            f'record.keep = "{config.record.keep}": holds too few states of a model of '
            f'{number(whole)} parameters; give at least "{-(-least // 10**6)}MB", a number of '
            'rounds, or "all"'
        )
    small = budget_below_rounds(config, blueprint, whole)
    if small is not None:
        raise ConfigError(
            f'record.keep = "{config.record.keep}": a round\'s payloads take '
            f"{size(small.of_round)} at each site, and a quarter of the budget must hold them and "
            f'a state; give at least "{-(-small.least // 10**6)}MB", a number of rounds, or "all"'
        )
    place = Store(config.record_store).folder
    if place is None:
        return
    while not place.exists():
        place = place.parent
    needed, free = record_bytes(config, blueprint, parameters), shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{config.record_store}: the run's record will need {needed / memory.GIB:.1f} GiB, "
            f"{free / memory.GIB:.1f} GiB are free; set record.store to a larger place, "
            'record.keep to a size such as "100GB", or record.enabled = false'
        )


def _check_blueprint(config: RunConfig, blueprint: ModelPlan) -> list[int]:
    """Return the parameters of each stage, after checking that the model fits the layout."""
    chunks = config.site.stages * config.site.chunks
    if chunks > 1:
        probe_cut(blueprint.hf_config, chunks, config.model.attention)
    else:
        probe_attention(blueprint.hf_config, config.model.attention)
    return [_stage_parameters(config, blueprint, stage) for stage in range(config.site.stages)]


def _stage_parameters(config: RunConfig, blueprint: ModelPlan, stage: int) -> int:
    """Return the parameters of a stage, after checking that it can be divided into pieces."""
    shapes = stage_shapes(config, blueprint, stage)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    split_pieces(sizes, config.outer.pieces)
    return sum(sizes.values())


def _held_by_first(config: RunConfig, parameters: Sequence[int], ranks: int) -> list[int]:
    """Return how many of each stage's parameters the first `ranks` ranks of a site hold."""
    shards = config.site.shards
    return [
        size * min(shards, max(0, ranks - stage * shards)) // shards
        for stage, size in enumerate(parameters)
    ]


def _check_attention(config: RunConfig) -> None:
    """Raise `ConfigError` if attention lacks a GPU or package, which only ranks would find."""
    wanted = config.model.attention
    if wanted != "flash_attention_2":
        return
    if not ranks_use_gpu(config):
        raise ConfigError(
            f'model.attention: "{wanted}" needs a GPU, ranks here have none; use "sdpa"'
        )
    # Transformers takes flash attention from either of the two packages.
    if not any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels")):
        raise ConfigError(
            f'model.attention: "{wanted}" needs the package flash-attn, which is not installed '
            'here; install it, or use "sdpa"'
        )


def _check_disk(config: RunConfig, parameters: int, sites_here: int) -> None:
    try:
        files, path = storage.opened(config.checkpoint_store)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"checkpoint.store {config.checkpoint_store}: cannot be opened ({error}); give a "
            "folder, or a URL that fsspec knows"
        ) from None
    local = storage.is_local(files)
    needed = memory.disk_bytes(config, parameters, sites_here if local else 0)
    place = Path(path) if local else config.folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{config.folder}: checkpoints and model need {needed / memory.GIB:.1f} GiB, "
            f"{free / memory.GIB:.1f} GiB are free; lower checkpoint.keep or choose another "
            "run.folder or checkpoint.store"
        )


def headline(config: RunConfig, files: TokenFiles) -> str:
    """Return a few lines that say what will be trained."""
    blueprint = ModelPlan.of(config, files.vocabulary_size)
    hf: Any = blueprint.hf_config
    outer, site = config.outer, config.site
    counts = [("site", len(config.sites)), ("stage", site.stages), ("shard", site.shards)]
    if site.replicas > 1:
        counts.insert(1, ("replica", site.replicas))
    shape = " x ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts)
    lines = [
        f"run {config.run.name}: {hf.model_type}, {number(count_parameters(hf))} parameters, "
        f"{shape}",
        f"data: {number(files.token_count('train'))} tokens, "
        f"{number(files.token_count('validation'))} held out, vocabulary {files.vocabulary_size}"
        + (f"; {files.left_out} files left out (dilocox data show)" if files.left_out else ""),
        f"method {outer.method}: {_course(config)}",
    ]
    if config.record.enabled and not config.exchanges_gradients:
        lines.append(record_line(config, blueprint, count_parameters(hf)))
    if config.model.handover:
        lines.append(Handover.read(config.model.path).line)
    return "\n".join(lines)


def _course(config: RunConfig) -> str:
    """Describe the length and the first plan of the run."""
    outer, adapt = config.outer, config.control.adapt
    steps = f"{config.total_steps} inner steps in rounds of {outer.inner_steps}"
    if config.exchanges_gradients:
        when = "one step late" if config.gradient_delay else "at once"
        return f"{steps}, gradients used {when}, codec {config.compression.codec}"
    fragments = "1 fragment" if outer.fragments == 1 else f"{outer.fragments} fragments"
    return (
        f"{steps}, {fragments} landing {outer.delay} of {outer.slots} slots later, codec "
        f"{config.compression.codec}"
        + ("" if adapt == "off" else f" to begin with, then by control.adapt {adapt}")
    )
