"""What can be refused before any process starts: folders, model, memory, disk."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

from dilocox.assembly import Blueprint
from dilocox.config import RunConfig, resolve_run
from dilocox.data import TokenFiles
from dilocox.display import number
from dilocox.errors import ConfigError, TrainingError
from dilocox.metrics import check_sinks
from dilocox.models import build_chunk, count_parameters, probe_cut
from dilocox.outer.fragments import split_fragments
from dilocox.site import chunks_of_stage

KEPT = ("data",)
"""What `--overwrite` leaves of an earlier run."""
GIB = 2**30


def claim_folder(config: RunConfig, resume: bool, overwrite: bool = False) -> Path:
    """Make the run's folder, or open it to go on.

    Raises `TrainingError` for a folder that holds a run already (without `resume`), another run,
    or none (with `resume`).
    """
    folder = config.folder
    written = folder / "run.toml"
    if resume:
        if not written.exists():
            raise TrainingError(f"{folder}: no run to resume; leave out --resume to begin one")
        _check_same_run(config, written)
    elif written.exists() and not overwrite:
        raise TrainingError(
            f"{folder}: holds a run already; add --resume to go on, --overwrite to replace it, or "
            "choose another run.name"
        )
    elif written.exists():
        for entry in folder.iterdir():
            if entry.name in KEPT:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"{folder}: cannot be made ({error.strerror}); choose another run.folder"
        ) from None
    if not os.access(folder, os.W_OK):
        raise TrainingError(f"{folder}: cannot be written to; choose another run.folder")
    return folder


def _check_same_run(config: RunConfig, written: Path) -> None:
    earlier = resolve_run(tomllib.loads(written.read_text(encoding="utf-8")), where=str(written))
    if earlier.digest() == config.digest():
        return
    before, now = earlier.model_dump(), config.model_dump()
    for section, values in now.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if before[section].get(key) != value:
                raise TrainingError(
                    f"{written.parent}: was begun with {section}.{key} = "
                    f"{before[section].get(key)!r}, the run file says {value!r}; resume with the "
                    "same values, or choose another run.name"
                )
    raise TrainingError(f"{written.parent}: was begun with other sites; choose another run.name")


def check_coordinator(config: RunConfig) -> None:
    """Raise `ConfigError` for what only the coordinator needs."""
    check_sinks(config)


def check_run(config: RunConfig, vocabulary_size: int, sites_here: int) -> None:
    """Raise the error that a rank would meet later, before any rank is started.

    `sites_here`: sites of the run on this machine.
    """
    check_sinks(config)
    blueprint = Blueprint.of(config, vocabulary_size)
    if config.site.stages * config.site.chunks > 1:
        probe_cut(
            blueprint.hf_config, config.site.stages * config.site.chunks, config.model.attention
        )
    parameters = [_stage_parameters(config, blueprint, s) for s in range(config.site.stages)]
    _check_memory(config, parameters, sites_here)
    _check_disk(config, sum(parameters), sites_here)


def _stage_parameters(config: RunConfig, blueprint: Blueprint, stage: int) -> int:
    """Parameters of a stage, which is also shown to divide into fragments."""
    sizes: dict[str, int] = {}
    for index in chunks_of_stage(
        config.site.schedule, config.site.stages, config.site.chunks, stage
    ):
        chunk = build_chunk(
            blueprint.hf_config,
            blueprint.cut[index],
            attention=config.model.attention,
            activation_checkpointing=False,
        )
        sizes |= {chunk.full_name(n): p.numel() for n, p in chunk.named_parameters()}
    if config.outer.method != "allreduce":
        split_fragments(sizes, config.outer.fragments)
    return sum(sizes.values())


def outer_bytes_per_parameter(config: RunConfig) -> int:
    """Anchor, momentum, reference and one fragment in flight, fp32; residual and eager's copy."""
    extra = 4 * config.compression.error_feedback + 4 * (config.outer.overlap == "eager")
    return 16 + extra


def _check_memory(config: RunConfig, parameters: list[int], sites_here: int) -> None:
    """fp32 parameters, gradients and two moments, and the outer state; activations not counted."""
    if config.site.device == "cuda":
        return  # each rank looks at its own GPU
    available = _available_memory()
    if available is None:
        return
    per_parameter = 16 + outer_bytes_per_parameter(config)
    needed = sites_here * sum(parameters) * per_parameter
    if needed > available:
        stage = max(range(len(parameters)), key=lambda index: parameters[index])
        raise ConfigError(
            f"{sites_here} sites here need {needed / GIB:.1f} GiB of memory (stage {stage} alone "
            f"{parameters[stage] * per_parameter / GIB:.1f} GiB), {available / GIB:.1f} GiB are "
            "free; use a smaller model, or put the sites on machines of their own"
        )


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _check_disk(config: RunConfig, parameters: int, sites_here: int) -> None:
    """All kept checkpoints, one being written, and the model."""
    each = parameters * (12 + outer_bytes_per_parameter(config))
    needed = sites_here * each * (config.checkpoint.keep + 1) + 4 * parameters
    place: Path = config.folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{config.folder}: checkpoints and model need {needed / GIB:.1f} GiB, "
            f"{free / GIB:.1f} GiB are free; lower checkpoint.keep or choose another run.folder"
        )


def headline(config: RunConfig, files: TokenFiles) -> str:
    """What is about to be trained, in a few lines."""
    blueprint = Blueprint.of(config, files.vocabulary_size)
    hf: Any = blueprint.hf_config
    outer, site = config.outer, config.site
    shape = f"{len(config.sites)} sites x {site.stages} stages x {site.shards} shards"
    lines = [
        f"run {config.run.name}: {hf.model_type}, {number(count_parameters(hf))} parameters, "
        f"{shape}",
        f"data: {number(files.token_count('train'))} tokens, "
        f"{number(files.token_count('validation'))} held out, vocabulary {files.vocabulary_size}",
        f"method {outer.method}: {outer.rounds} rounds of {outer.inner_steps} inner steps, "
        f"{outer.fragments} fragments landing {outer.delay} of {outer.slots} slots later, "
        f"codec {config.compression.codec}",
    ]
    return "\n".join(lines)
