"""Builds the parts of one rank from a run file: model, data and outer state of the pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dilocox.config.adapter import compile_setting
from dilocox.config.run_config import RunConfig
from dilocox.config.site import SiteSection
from dilocox.errors import ConfigError
from dilocox.inner import (
    ChunkSettings,
    SiteMesh,
    SiteModel,
    chunks_of_stage,
    keep_freed_memory,
    mean_cross_entropy,
    place_of_rank,
    rank_of_place,
    resolve_device,
    resolve_precision,
    set_determinism,
    set_sdpa_backends,
    set_threads,
    settle_determinism,
    start_site_group,
    use_expandable_segments,
)
from dilocox.inner.affinity import stay_near
from dilocox.inner.columns import ColumnLoss, plain_targets, takes_columns
from dilocox.inner.counted import CountedLabels, OwnLoss
from dilocox.inner.lr_schedule import learning_rate
from dilocox.inner.memory import check_gpu, sums_whole_gradients
from dilocox.inner.own_optimizer import OptimizerFactory
from dilocox.inner.preference import preference_loss
from dilocox.models import (
    WeightSource,
    build_chunk,
    materialise,
    read_rows,
)
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.outer_step import MOMENTUM_DTYPES
from dilocox.outer.private import privacy_of
from dilocox.training.batches import Batch
from dilocox.training.batches import Batches as Batches
from dilocox.training.batches import Dataset as Dataset
from dilocox.training.batches import Sequences as Sequences
from dilocox.training.model_plan import ModelPlan as ModelPlan
from dilocox.training.own_code import (
    check_code,
    check_columns,
    check_preference,
    check_signatures,
)
from dilocox.training.rank_model import RankModel

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""(logits [b, L, V], labels int64 [b, L]) -> scalar mean, or (sum, count). A parameter named
`columns` gets {name: float32 [b, L]}."""


@dataclass(frozen=True)
class Hooks:
    """Functions that a user of the Python API may replace. They run in the ranks' processes."""

    dataset: Dataset | None = None
    """Replaces the token files. It must return the same tokens at every site."""
    loss: Loss = mean_cross_entropy
    on_evaluation: Callable[[int, float], object] | None = None
    """Called with (round, held-out loss) on the first rank of the plan's first site. If it returns
    True, the run ends early, with a checkpoint, and publishes its anchor."""
    validation: Dataset | None = None
    """Returns the sequences of evaluations, in place of the token files' held-out text."""
    optimizer: OptimizerFactory | None = None
    """Makes the inner optimizer, in place of `inner.optimizer`."""
    schedule: Callable[[int, int], float] | None = None
    """(inner step from 0, inner steps of the run) -> learning rate, instead of `inner.schedule`."""

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The user's own functions that training and evaluation use, by name."""
        found = {
            "dataset": self.dataset,
            "loss": None if self.loss is mean_cross_entropy else self.loss,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "validation": self.validation,
        }
        return {name: each for name, each in found.items() if each is not None}

    @property
    def replaced(self) -> list[str]:
        """Names of the parts of an inner step that the user has replaced: `dataset`, `loss` ..."""
        return [name for name in self.functions if name != "validation"]

    def check(self, config: RunConfig, *, required: bool) -> None:
        """Check that the run can use these functions, and that all sites have agreed on them.

        `required`: see `own_code.check_code`. Raises `ConfigError` if one of the two fails.
        """
        check_signatures(self.functions)
        self.check_agreed(config.run.code, required=required)
        check_columns(config.data.columns, self.functions)
        check_preference(config.data.format, self.functions)
        if self.optimizer is None:
            return
        if config.inner.optimizer != "sgd":
            raise ConfigError(
                'optimizer: set inner.optimizer = "sgd" in the run file, so that no exchange and '
                "no estimate of memory relies on AdamW's moments"
            )
        if config.site.replicas > 1:
            raise ConfigError(
                "optimizer: replicas only exchange moments of dilocox's own optimizers; set "
                "site.replicas = 1, and raise site.shards instead"
            )

    def check_agreed(self, agreed: str, *, required: bool) -> None:
        """Check that all sites have agreed on these functions. Raises `ConfigError` otherwise.

        `agreed`: the run file's `run.code`. `required`: see `own_code.check_code`.
        """
        check_code(agreed, self.functions, required=required)

    def loss_of(self, config: RunConfig) -> OwnLoss:
        """Return the loss, of logits and targets: a loss that takes columns gets them by name."""
        if config.data.format == "preference":
            return preference_loss(config.preference, config.loss_columns)
        if not takes_columns(self.loss):
            return self.loss
        return ColumnLoss(self.loss, config.loss_columns)

    def learning_rate(self, step: int, config: RunConfig) -> float:
        """Return the learning rate of inner step `step` of the run, counted from 0."""
        if self.schedule is not None:
            return float(self.schedule(step, config.total_steps))
        return learning_rate(step, config.total_steps, config.inner)


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank: its site, and its stage, shard and replica within the site."""

    site: str
    stage: int
    shard: int
    replica: int = 0

    @classmethod
    def of_rank(cls, site: str, rank: int, layout: SiteSection) -> RankPlace:
        """Return the place of the rank with number `rank`, counted from 0 within the site."""
        return cls(site, *place_of_rank(rank, layout.shards, layout.stages))

    def rank_of(self, layout: SiteSection) -> int:
        """Return the number of this rank, counted from 0 within the site."""
        return rank_of_place(
            self.stage, self.shard, self.replica, shards=layout.shards, stages=layout.stages
        )

    @property
    def exchanges(self) -> bool:
        """Whether the rank exchanges with other sites. Only ranks of the first replica do."""
        return self.replica == 0

    @property
    def leads(self) -> bool:
        """Whether the rank reports to the coordinator for its whole site."""
        return self.stage == 0 and self.shard == 0 and self.exchanges

    @property
    def file_name(self) -> str:
        """Name of the rank's process, with which the names of the rank's files begin, too."""
        replica = "" if self.exchanges else f"-replica{self.replica}"
        return f"{self.site}-stage{self.stage}-shard{self.shard}{replica}"

    def __str__(self) -> str:
        replica = "" if self.exchanges else f" replica {self.replica}"
        return f"{self.site} stage {self.stage} shard {self.shard}{replica}"


@dataclass
class RankParts:
    """The model of one rank, and the outer state of its pieces."""

    place: RankPlace
    blueprint: ModelPlan
    mesh: SiteMesh
    model: RankModel
    live: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]
    """Shapes of the whole tensors by full name. `live` holds this rank's part of each tensor."""
    states: list[FragmentState] = field(default_factory=list)
    not_deterministic: tuple[str, ...] = ()
    """Operations of the model that lack a deterministic kernel at any rank of the site."""


@dataclass(frozen=True)
class RankWiring:
    """How a rank's process reaches the other ranks of its site, and its place on its machine."""

    store: dist.Store | None
    """Rendezvous store of the site's ranks. May be None if their process group exists."""
    local_rank: int
    """Number of this rank among the ranks on this machine, from 0."""
    ranks_here: int
    """Number of ranks on this machine."""
    timeout: float
    """Time limit of collectives inside the site, in seconds."""


def build_rank(
    config: RunConfig,
    blueprint: ModelPlan,
    place: RankPlace,
    hooks: Hooks,
    wiring: RankWiring,
    progress: Callable[[], None] = lambda: None,
) -> RankParts:
    """Build this rank's part of the model and fill it with weights. Collective over the site.

    `progress` is called before each tensor that is read. Raises `DilocoxError` if the model cannot
    be built, or does not fit into the GPU's memory.
    """
    device = _set_up_device(config, wiring)
    mesh = start_site_group(
        config.site.stages,
        config.site.shards,
        device,
        timedelta(seconds=wiring.timeout),
        replicas=config.site.replicas,
        rank=place.rank_of(config.site),
        store=wiring.store,
    )
    numbers = chunks_of_stage(
        config.site.schedule, config.site.stages, config.site.chunks, place.stage
    )
    check_gpu(
        config,
        blueprint.hf_config,
        [blueprint.cut[number] for number in numbers],
        place.site,
        place.stage,
        device,
        resolve_precision(config.site, device),
        wiring.ranks_here,
    )
    precision = resolve_precision(config.site, device)
    chunks = [
        build_chunk(
            blueprint.hf_config,
            blueprint.cut[number],
            attention=config.model.attention,
            activation_checkpointing=config.model.activation_checkpointing,
            # Frozen weights need no fp32 form.
            dtype=torch.float32 if blueprint.adapter is None else precision,
            adapter=blueprint.adapter,
        )
        for number in numbers
    ]
    shapes = {
        chunk.full_name(name): parameter.shape
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    source = _Watched(blueprint.weights(config), progress)
    model = SiteModel(
        chunks,
        lambda chunk, where: materialise(chunk, source, where),  # type: ignore[arg-type]
        mesh,
        config.site,
        config.inner,
        ChunkSettings(
            hidden_size=blueprint.hf_config.hidden_size,
            precision=precision,
            tied=blueprint.tied,
            frozen_base=blueprint.adapter is not None,
            compile_layers=compile_setting(config.adapter, config.model),
            whole_gradients=_sums_whole_gradients(config, blueprint, mesh),
        ),
        loss=hooks.loss_of(config),
        optimizer=hooks.optimizer,
    )
    live = model.local_tensors()
    if blueprint.tied is not None:
        owner, copy = blueprint.tied
        shapes.setdefault(owner, shapes.get(copy, torch.Size()))
    rank = RankParts(place, blueprint, mesh, model, live, {name: shapes[name] for name in live})
    rank.states = build_states(config, rank)
    rank.not_deterministic = _settle_determinism(config, rank)
    return rank


def _set_up_device(config: RunConfig, wiring: RankWiring) -> torch.device:
    """Set threads, determinism and memory of this process as its device needs; return the device.

    Call this before the first CUDA operation (see `set_determinism`).
    """
    set_threads(config.site.threads, wiring.ranks_here)
    device = resolve_device(config.site, wiring.local_rank)
    set_determinism(config.site.deterministic, device, config.model.attention)
    set_sdpa_backends(config.model.attention, config.data.sequence_length, device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        use_expandable_segments()
    stay_near(device, fit_threads=config.site.threads == 0)
    return device


def _settle_determinism(config: RunConfig, rank: RankParts) -> tuple[str, ...]:
    """Settle the determinism mode, then the attention backends that the mode allows.

    Returns the operations without a deterministic kernel. Collective over the site.
    """
    inputs, labels, counted = _example(config, rank.blueprint)
    found = settle_determinism(
        rank.mesh, lambda: rank.model.loss_and_gradients(inputs, labels, [], counted)
    )
    set_sdpa_backends(config.model.attention, config.data.sequence_length, rank.mesh.device)
    return found


def _example(config: RunConfig, blueprint: ModelPlan) -> Batch:
    """Return the smallest batch that can be trained on: one micro-batch for each stage."""
    rows = config.site.micro_batch_size * config.site.stages
    length, vocabulary = config.data.sequence_length, int(blueprint.hf_config.vocab_size)
    tokens = (torch.arange(length + 1) % vocabulary).repeat(rows, 1)
    counted = None
    if config.data.rows.packing == "documents":
        positions = (torch.arange(length) % -(-length // 2)).repeat(rows, 1)
        whole = rows * length * config.site.parts
        counted = CountedLabels(whole, float(whole), positions)
    targets = plain_targets(tokens[:, 1:].contiguous(), len(config.loss_columns))
    return Batch(tokens[:, :-1].contiguous(), targets, counted)


def _sums_whole_gradients(config: RunConfig, blueprint: ModelPlan, mesh: SiteMesh) -> bool:
    """Return `memory.sums_whole_gradients`, the same at all ranks. Collective over the site."""
    memory = None
    if mesh.device.type == "cuda":
        total = torch.cuda.get_device_properties(mesh.device).total_memory
        found = mesh.gather(torch.tensor([total], device=mesh.device)).min()
        memory = int(mesh.least_of_replicas(found).item())
    width = resolve_precision(config.site, mesh.device).itemsize
    return sums_whole_gradients(config, blueprint.hf_config, blueprint.cut, memory, width)


@dataclass(frozen=True)
class _Watched:
    """A source of weights that calls `progress` before it reads a tensor."""

    source: WeightSource
    progress: Callable[[], None]

    def tensor(self, full_name: str) -> torch.Tensor:
        """See `WeightSource`."""
        self.progress()
        return self.source.tensor(full_name)

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """See `RowSource`."""
        self.progress()
        return read_rows(self.source, full_name, rows)


def build_states(config: RunConfig, rank: RankParts) -> list[FragmentState]:
    """Return the outer state of each of this rank's pieces.

    Raises `ConfigError` if the run file asks for more pieces than this rank's tensors allow.
    """
    sizes = {name: shape.numel() for name, shape in rank.shapes.items()}
    device = torch.device("cpu") if config.outer.device == "cpu" else rank.mesh.device
    states = []
    for names in split_pieces(sizes, config.outer.pieces):
        layout = Layout.of({name: rank.live[name].shape for name in names})
        states.append(
            FragmentState(
                layout,
                rank.live,
                error_feedback=config.compression.error_feedback,
                eager=config.outer.overlap == "eager",
                device=device,
                momentum_dtype=MOMENTUM_DTYPES[config.outer.momentum_dtype],
                privacy=privacy_of(config, rank.place.site, layout, sum(sizes.values())),
            )
        )
    return states


def anchors(rank: RankParts) -> Mapping[str, torch.Tensor]:
    """Return this rank's part of the anchor: fp32 views in the local shape, by full name."""
    return {
        name: view
        for state in rank.states
        for name, view in state.layout.views(state.anchor).items()
    }
