"""Checks that this machine's memory and disks are large enough for the run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.inner import chunks_of_stage, memory, resolve_precision
from dilocox.inner.cgroup import available_memory
from dilocox.record.log.blob_store import Store
from dilocox.record.pieces import erasure
from dilocox.record.writer.windows import has_windows, small_budget
from dilocox.training.builder import ModelPlan
from dilocox.training.launch.cuda_driver import ranks_use_gpu
from dilocox.training.record_volume import budget_below_rounds, record_bytes
from dilocox.utils import storage
from dilocox.utils.formatting import number, size


def check_capacity(
    config: RunConfig,
    blueprint: ModelPlan,
    parameters: list[int],
    sites_here: int,
    ranks_here: int | None = None,
) -> None:
    """Check memory, disk, and the place of the record.

    Args:
        config: the run.
        blueprint: the run's model.
        parameters: number of trained parameters of each stage.
        sites_here: number of sites on this machine.
        ranks_here: number of the site's ranks on this machine, which are the first ones. None
            means all.

    Raises:
        ConfigError: memory or disk is too small, or `record.keep` is, or a package is missing.
        RecordError: the record's store cannot be used.
    """
    on_gpu = ranks_use_gpu(config)
    if not on_gpu:
        config = _on_this_cpu(config)
    frozen = _frozen(config, blueprint)
    if ranks_here is not None:
        parameters = _held_by_first(config, parameters, ranks_here)
        kinds = zip(*frozen, strict=True)
        divided, packed = (_held_by_first(config, each, ranks_here) for each in kinds)
        frozen = list(zip(divided, packed, strict=True))
    available = available_memory()
    if available is not None:
        windows = has_windows(config, blueprint.trained)
        problem = memory.host_problem(
            config, parameters, sites_here, available, on_gpu, windows, frozen
        )
        if problem is not None:
            raise ConfigError(problem)
    _check_disk(config, sum(parameters), sites_here)
    if config.availability is not None and not erasure.is_installed():
        raise ConfigError(erasure.MISSING)
    if config.record.enabled:
        _check_store(config, blueprint, sum(parameters))


def _on_this_cpu(config: RunConfig) -> RunConfig:
    """Return the run with `site.precision` as ranks on this machine's processor resolve it."""
    bf16 = resolve_precision(config.site, torch.device("cpu")) == torch.bfloat16
    site = config.site.model_copy(update={"precision": "bf16" if bf16 else "fp32"})
    return config.model_copy(update={"site": site})


def _frozen(config: RunConfig, blueprint: ModelPlan) -> list[tuple[int, int]]:
    """Return the bytes of each stage's frozen parameters: those that shards divide, and others.

    The others are kept in four bits.
    """
    site, width = config.site, config.site.value_bytes
    found = []
    for stage in range(site.stages):
        numbers = chunks_of_stage(site.schedule, site.stages, site.chunks, stage)
        chunks = [blueprint.cut[number] for number in numbers]
        divided = sum(chunk.frozen_bytes(width) for chunk in chunks)
        found.append((divided, sum(chunk.packed_bytes for chunk in chunks)))
    return found


def _held_by_first(config: RunConfig, parameters: Sequence[int], ranks: int) -> list[int]:
    """Return how many of each stage's parameters the first `ranks` ranks of a site hold."""
    shards = config.site.shards
    return [
        size * min(shards, max(0, ranks - stage * shards)) // shards
        for stage, size in enumerate(parameters)
    ]


def open_checkpoints(config: RunConfig) -> tuple[Any, str]:
    """Return the fsspec file system of `checkpoint.store`, and the path in this file system.

    Raises `ConfigError` if it cannot be opened.
    """
    try:
        return storage.opened(config.checkpoint_store)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"checkpoint.store {config.checkpoint_store}: cannot be opened ({error}); give a "
            "folder, or a URL that fsspec knows"
        ) from None


def _check_disk(config: RunConfig, parameters: int, sites_here: int) -> None:
    files, path = open_checkpoints(config)
    local = storage.is_local(files)
    needed = memory.disk_bytes(config, parameters, sites_here if local else 0)
    place = Path(path) if local else config.folder
    free = shutil.disk_usage(storage.nearest_existing(place)).free
    if needed > free:
        raise ConfigError(
            f"{config.folder}: checkpoints and model need {needed / memory.GIB:.1f} GiB, "
            f"{free / memory.GIB:.1f} GiB are free; lower checkpoint.keep or choose another "
            "run.folder or checkpoint.store"
        )


def _check_store(config: RunConfig, blueprint: ModelPlan, parameters: int) -> None:
    """Check the place of the record.

    Raises `RecordError` if the store cannot be used, and `ConfigError` if `record.keep` or the
    free disk space is too small."""
    whole = blueprint.trained
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
    needed = record_bytes(config, blueprint, parameters)
    free = shutil.disk_usage(storage.nearest_existing(place)).free
    if needed > free:
        raise ConfigError(
            f"{config.record_store}: the run's record will need {needed / memory.GIB:.1f} GiB, "
            f"{free / memory.GIB:.1f} GiB are free; set record.store to a larger place, "
            'record.keep to a size such as "100GB", or record.enabled = false'
        )
