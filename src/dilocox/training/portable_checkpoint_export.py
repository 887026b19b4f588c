"""`dilocox handover`: export a run's checkpoint so that a run of another layout can continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dilocox.config.handover import MOMENTUM
from dilocox.config.run_config import RunConfig, load_written
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import NAME as LOG
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.ledger_audit import union
from dilocox.coordinator.server.restore import restored
from dilocox.coordinator.server.resume import resume_point
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.data import TokenFiles
from dilocox.data.manifest import MANIFEST
from dilocox.errors import CheckpointError, DataError
from dilocox.models import (
    Published,
    finish_model_folder,
    open_weights,
    stage_file_name,
    write_stage_file,
)
from dilocox.models.adapter_export import finish_adapter_folder, write_adapter_stage
from dilocox.models.adapter_weights import with_fixed
from dilocox.outer.layout import Layout, local_shapes
from dilocox.training import checkpoint_io
from dilocox.training.builder import ModelPlan
from dilocox.training.payload_sizes import chunks_to_read, model_shapes, piece_names
from dilocox.training.portable_checkpoint import OF_ADAPTERS, HandedAdapters, Handover
from dilocox.utils.adapter_files import ADAPTER_FILE
from dilocox.utils.storage import sha256_of

Tensors = dict[str, torch.Tensor]


def hand_over(folder: Path, target: Path, tick: int | None = None) -> Handover:
    """Write a handover into the folder `target`, and return its `handover.json`.

    Args:
        folder: run folder of the coordinator. The run must not be going on.
        target: a new or empty folder.
        tick: tick of the checkpoint. None: the newest complete checkpoint.

    Raises:
        CheckpointError: event log, token files or checkpoint are missing, or `target` is not empty.
        TrainingError: the run is going on.
        ModelError: the model has saved buffers, and the weights that the run started from are
            missing.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already; name a new folder")
    config = load_written(folder / "run.toml", [f'run.folder="{folder}"'])
    if config.exchanges_gradients:
        raise CheckpointError(
            f"{folder}: method {config.outer.method} has no outer state; export its model"
        )
    files, (point, site, digests, state) = _parts(config, folder, tick)
    blueprint = ModelPlan.of(config, files.vocabulary_size)
    shapes = model_shapes(config, blueprint)
    target.mkdir(parents=True, exist_ok=True)
    stages = [
        whole_state(config, each, _load_stage(config, site, digests, point.tick, stage))
        for stage, each in enumerate(shapes)
    ]
    if config.adapter is None:
        _write_model(config, blueprint, files, target, [whole["anchor"] for whole in stages])
    else:
        _write_adapters(config, blueprint, files, target, [whole["anchor"] for whole in stages])
    momenta = {name: each for whole in stages for name, each in whole["momentum"].items()}
    save_file(momenta, target / MOMENTUM)
    plan = state.plans.get(point.round)
    made = Handover(
        run=config.run.name,
        tick=point.tick,
        steps=steps_taken_by(point, plan, state.plans.get(point.round - 1)),
        seed=config.run.seed,
        sequence_length=config.data.sequence_length,
        data_digest=files.digest,
        momentum=sha256_of(target / MOMENTUM),
        ledger=ledger_of(Ledger.from_json(point.ledger), plan, point.slot).to_json(),
        tokenizer=config.data.tokenizer,
        vocabulary_size=config.data.vocabulary_size,
        adapters=_about_adapters(config, target, state),
    )
    made.write(target)
    return made


def _write_model(
    config: RunConfig,
    blueprint: ModelPlan,
    files: TokenFiles,
    target: Path,
    stages: Sequence[Tensors],
) -> None:
    """Write the anchor as a Hugging Face folder, fp32. `stages`: whole tensors of each stage."""
    # Always fp32, because the next run continues from these values.
    form = replace(Published.of(config), bf16=False)
    buffers = saved_buffers(config, blueprint)
    for stage, (tensors, own) in enumerate(zip(stages, buffers, strict=True)):
        name = stage_file_name(stage, len(stages))
        write_stage_file(target / name, tensors | own, blueprint.hf_config, form)
    finish_model_folder(
        target,
        blueprint.hf_config,
        files.tokenizer_folder,
        config.model.revision,
        files.ends_of_turn,
    )


def _write_adapters(
    config: RunConfig,
    blueprint: ModelPlan,
    files: TokenFiles,
    target: Path,
    stages: Sequence[Tensors],
) -> None:
    """Write the adapters' anchor as a PEFT folder, fp32. `stages`: whole tensors of each stage."""
    adapter, hf_config = config.adapter, blueprint.hf_config
    assert adapter is not None
    form = replace(Published.of(config), bf16=False)
    for stage, tensors in enumerate(stages):
        whole = with_fixed(tensors, hf_config, adapter, config.run.seed)
        write_adapter_stage(target, stage, whole, form)
    finish_adapter_folder(
        target, hf_config, config.model, adapter, files.tokenizer_folder, files.ends_of_turn
    )


def _about_adapters(
    config: RunConfig, target: Path, state: CoordinatorState
) -> HandedAdapters | None:
    """Return what `handover.json` says of the adapters in `target`; None without adapters."""
    if config.adapter is None:
        return None
    return HandedAdapters(
        weights=sha256_of(target / ADAPTER_FILE),
        base=str(state.base_digest),
        settings=config.adapter.model_dump(mode="json", include=set(OF_ADAPTERS)),
    )


Point = tuple[e.Resumed, str, dict[tuple[int, int], str], CoordinatorState]


def _parts(config: RunConfig, folder: Path, tick: int | None) -> tuple[TokenFiles, Point]:
    """Return the token files and the checkpoint of the run.

    Raises `CheckpointError` that lists all missing parts, each with the folder where it belongs.
    """
    if config.data.own:
        raise CheckpointError(
            f"a handover of {folder} continues token ranges of text, and the run has none "
            "(data.own); begin a new run from its model folder (model.path)"
        )
    missing: list[str] = []
    files, point = None, None
    if not (folder / "coordinator" / LOG).is_file():
        missing.append(f"{folder / 'coordinator'}: the coordinator's event log")
    else:
        try:
            point = _point(config, folder, tick)
        except CheckpointError as error:
            missing.append(str(error))
    try:
        files = TokenFiles.open(config.data_folder)
    except DataError as error:
        damage = f" ({error})" if (config.data_folder / MANIFEST).is_file() else ""
        missing.append(
            f"{config.data_folder}: the token files that the run trained on, a copy of a site's "
            f"data folder{damage}"
        )
    if files is None or point is None:
        raise CheckpointError(f"a handover of {folder} needs also: {'; and '.join(missing)}")
    return files, point


def _point(config: RunConfig, folder: Path, tick: int | None) -> Point:
    """Return the point at which the run would be resumed, and the checkpoint of a site for it.

    The result is the resume point, a site whose part of the checkpoint is here, digests of that
    part by (stage, shard), and the coordinator's state then. Raises `CheckpointError` if no
    site's part is here.
    """
    log = EventLog(folder / "coordinator")
    try:
        state = restored(config, log)
        point = resume_point(config, log, state, 0.0, tick)
    finally:
        log.close()
    kept = state.checkpoints[point.tick]
    for site in kept.sites or []:
        if all(
            checkpoint_io.exists(config.checkpoint_store, point.tick, site, *rank)
            for rank in state.ranks
        ):
            digests = {rank: kept.written[site, *rank]["files.json"] for rank in state.ranks}
            state.apply(point)
            return point, site, digests, state
    raise CheckpointError(
        f"{config.checkpoint_store}: no site's part of the checkpoint at slot {point.tick} is "
        "complete here; copy the part of one site to this folder, or run this command at that site"
    )


def saved_buffers(config: RunConfig, blueprint: ModelPlan) -> list[Tensors]:
    """Return for each stage the buffers that the model saves, by full name.

    Their values are those from which the run started: no step changes such a buffer, so
    checkpoints do not hold them (see `SiteModel.saved_buffers`). Raises `ModelError` if the
    weights that the run started from are missing.
    """
    stages = [
        [
            name
            for chunk in chunks_to_read(config, blueprint, stage)
            for name in chunk.saved_buffers()
        ]
        for stage in range(config.site.stages)
    ]
    if not any(stages):
        return [{} for _ in stages]
    begun_with = open_weights(config.model, blueprint.hf_config, config.run.seed)
    return [{name: begun_with.tensor(name) for name in names} for names in stages]


def _load_stage(
    config: RunConfig, site: str, digests: Mapping[tuple[int, int], str], tick: int, stage: int
) -> list[Mapping[str, torch.Tensor]]:
    """Return the checkpointed tensors of every shard of a stage of `site`."""
    store, patience = config.checkpoint_store, config.network.link_timeout
    return [
        checkpoint_io.load(store, tick, site, stage, shard, digests[stage, shard], patience).tensors
        for shard in range(config.site.shards)
    ]


def whole_state(
    config: RunConfig,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, Tensors]:
    """Join anchor and momentum of a stage into whole tensors, from its shards' checkpoints.

    `shapes`: whole shapes by full name, in model order. `parts`: tensors of each shard. Returns
    fp32 tensors by full name, under "anchor" and "momentum". Raises `CheckpointError` if the
    checkpoint does not fit the shapes.
    """
    whole: dict[str, Tensors] = {"anchor": {}, "momentum": {}}
    shards = len(parts)
    for number, names in enumerate(piece_names(config, shapes)):
        layouts = [Layout.of(local_shapes(shapes, names, s, shards)) for s in range(shards)]
        for kind, tensors in whole.items():
            flats = [part[f"outer/{number}/{kind}"].float() for part in parts]
            if [len(flat) for flat in flats] != [layout.length for layout in layouts]:
                raise CheckpointError(
                    f"piece {number}: the checkpoint's {kind} does not fit the run file's model"
                )
            views = [layout.views(flat) for layout, flat in zip(layouts, flats, strict=True)]
            for name in names:
                tensors[name] = torch.cat([each[name] for each in views])
    return {kind: {name: tensors[name] for name in shapes} for kind, tensors in whole.items()}


def steps_taken_by(point: e.Resumed, plan: RoundPlan | None, before: RoundPlan | None) -> int:
    """Return the inner steps of the typical site up to the checkpoint at `point`.

    `plan` is the plan of the checkpoint's round, and `before` the plan of the round before. Either
    may be None.
    """
    if plan is not None:
        done = point.slot * plan.inner_steps // plan.slots if plan.slots else 0
        return plan.first_step + done
    return before.first_step + before.inner_steps if before is not None else 0


def ledger_of(ledger: Ledger, plan: RoundPlan | None, slot: int) -> Ledger:
    """Return the ledger with which a run continues after `slot` slots of the round of `plan`.

    Ranges that any site had trained on by then count as trained. The rest is given out again.
    """
    done: dict[str, list[tuple[int, int]]] = {}
    back = Ledger(next=dict(ledger.next), pool={s: list(p) for s, p in ledger.pool.items()})
    trained = {}
    for site, member in (plan.members if plan is not None else {}).items():
        steps = member.steps(slot * plan.inner_steps // plan.slots) if plan and plan.slots else 0
        trained[site] = steps * member.batch
    for entry in ledger.entries:
        if entry.state == "returned":
            continue
        whole = entry.state == "committed"
        count = entry.count if whole else min(entry.count, trained.get(entry.site, 0))
        if not whole:
            trained[entry.site] = trained.get(entry.site, 0) - count
        if count:
            done.setdefault(entry.space, []).append((entry.start, count))
        if count < entry.count:
            back.give_back_range(entry.space, entry.start + count, entry.count - count)
    for space, ranges in done.items():
        back.note_committed("handover", space, union(ranges))
    return back


def describe(made: Handover, target: Path) -> list[str]:
    """Return the lines that `dilocox handover` prints."""
    committed = sum(entry["count"] for entry in made.ledger["entries"])
    named = f'model.path = "{target}" and model.handover = true'
    if made.adapters is not None:
        named = f'adapter.handover = "{target}" beside the same [adapter] and model.path'
    waiting: Any = [count for items in made.ledger["pool"].values() for _, count in items]
    return [
        f"{target}: anchor and outer momentum of run {made.run} at slot {made.tick}, after "
        f"{made.steps} inner steps; {committed} sequences trained on, {sum(waiting)} to be given "
        "out again",
        f"go on with {named} in the run file of a new "
        "run, with any sites, stages and shards; residuals, inner moments and exchanges that had "
        "not landed yet (a round at most) are not part of it",
    ]
