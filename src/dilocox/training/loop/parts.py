"""Builds a rank's parts around the model of a user's loop."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError, ModelError
from dilocox.inner import SiteMesh
from dilocox.inner.fsdp import drop_gathered, finish_sharding, local
from dilocox.inner.loop_optimizers import LoopOptimizers, Stateful
from dilocox.models import WeightSource, read_rows
from dilocox.models.materialise import own_rows
from dilocox.outer.layout import split_pieces
from dilocox.training.builder import ModelPlan, RankParts, RankPlace, build_states
from dilocox.training.loop.model import NO_GATE, Evaluation, LoopModel, trained_tensors
from dilocox.training.loop.ranks import several_processes
from dilocox.training.loop.turns import Turns
from dilocox.training.payload_sizes import model_shapes


@dataclass(frozen=True)
class OwnLoop:
    """The parts of a user's loop."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    evaluation: Evaluation | None = None
    state: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the trained tensors. Raises `ModelError` if there is not exactly one."""
        found = {parameter.device for parameter in trained_tensors(self.model).values()}
        if len(found) != 1:
            where = ", ".join(sorted(map(str, found))) or "nowhere: none is trained"
            raise ModelError(f"model: its trained tensors are on {where}; put all on one device")
        return next(iter(found))


def check_loop(config: RunConfig, site: str) -> None:
    """Raise `ConfigError` if no loop of the user's own can take the steps of `site`."""
    if not config.sites[site].own_code:
        raise ConfigError(
            f"sites.{site}.own_code: is false, and a loop of your own takes the site's steps; set "
            "it to true in the run file of the coordinator and of all sites"
        )
    if config.site.stages * config.site.replicas != 1:
        raise ConfigError(
            "site: a loop of your own has no pipeline and no replicas; set site.stages and "
            "site.replicas to 1, or use dilocox join"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not several_processes():
        raise ConfigError(
            "site: a launcher started several processes, which have formed no group; call "
            "torch.distributed.init_process_group and wrap the model in DistributedDataParallel "
            "before dilocox.site, or start one process"
        )
    world = dist.get_world_size() if several_processes() else 1
    if config.site.shards not in (1, world):
        raise ConfigError(
            f"site.shards {config.site.shards}: a loop of your own has one process for each shard, "
            f"and this one has {world}; start {config.site.shards}, with a model divided by "
            "fully_shard, or set it to 1 at all sites"
        )
    if config.site.code is not None:
        raise ConfigError(
            "site.code: has functions for dilocox's own loop, and a loop of your own takes the "
            "steps; leave it out, and call the functions in the loop"
        )
    if config.exchanges_gradients:
        raise ConfigError(
            f'outer.method "{config.outer.method}": exchanges the gradients of every step, which '
            "only dilocox's own loop does; use another method"
        )
    if config.admission.gate:
        raise ConfigError(NO_GATE)
    if config.inner.optimizer != "sgd":
        raise ConfigError(
            'inner.optimizer: set it to "sgd" in the run file, whatever optimizer the loop has, so '
            "that no exchange and no estimate of memory relies on AdamW's moments"
        )
    if config.adapter is not None and config.adapter.freeze_a:
        raise ConfigError("adapter.freeze_a: is done by dilocox's own loop alone; set it to false")
    if config.loss_columns:
        raise ConfigError(
            "data: columns and preferences are read by dilocox's own losses; leave them out"
        )


@dataclass(frozen=True)
class OwnModelPlan(ModelPlan):
    """The plan of a model that only the user's program knows."""

    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    """Shapes of the trained tensors by name, in the model's order."""

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.parameters

    @property
    def flops_per_token(self) -> float:
        """See `ModelPlan`; as if each trained parameter were used once per token."""
        return 6.0 * self.parameters

    @property
    def digest(self) -> str:
        """SHA-256, hex, over names and shapes in order. All sites of a run have the same."""
        listed = [[name, list(shape)] for name, shape in self.shapes.items()]
        text = json.dumps(["dilocox: model of a loop", listed], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def weights(self, config: RunConfig) -> WeightSource:
        """Raise `ModelError`: the user's program has the weights."""
        raise ModelError("model.own: its first weights are those of the user's program")


def plan_of(
    config: RunConfig, loop: OwnLoop, vocabulary_size: int | None
) -> tuple[ModelPlan, dict[str, torch.Size]]:
    """Return the plan of the run's model, and the shapes of its trained tensors, in order.

    Raises `ModelError` if the user's model has other tensors, or tensors that are not fp32, and
    `ConfigError` if its optimizers have others.
    """
    trained = trained_tensors(loop.model)
    blueprint: ModelPlan
    if config.model.own:
        shapes = {name: parameter.shape for name, parameter in trained.items()}
        blueprint = OwnModelPlan(None, (), None, shapes=shapes)
    else:
        blueprint = ModelPlan.of(config, vocabulary_size)
        told = model_shapes(config, blueprint)[0]
        shapes = {name: torch.Size(shape) for name, shape in told.items()}
    _check_model(trained, shapes)
    _check_division(loop.model, trained, config.site.shards)
    if config.adapter is not None:
        _check_scaling(loop.model, config.adapter)
    split_pieces({name: shape.numel() for name, shape in shapes.items()}, config.outer.pieces)
    LoopOptimizers(trained, loop.optimizers, loop.state)
    return blueprint, shapes


def build_parts(
    config: RunConfig,
    vocabulary_size: int | None,
    place: RankPlace,
    loop: OwnLoop,
    turns: Turns,
    due: Callable[[], tuple[int, bool]],
    mean: Callable[[float, int], float] = lambda loss, _: loss,
) -> RankParts:
    """Return the parts of a rank of a site, with theta_0 in the user's model.

    With `model.own` theta_0 is what the model holds.

    Args:
        vocabulary_size: number of tokens of the run's tokenizer; None without text of the run.
        loop: the user's model and optimizers.
        turns: passes steps to the user's thread.
        due: returns the number of the step that is due, and whether it is its round's last one.
        mean: returns the mean of a loss over the processes that divide the model (`LoopModel`).

    Raises the errors of `plan_of`.
    """
    blueprint, shapes = plan_of(config, loop, vocabulary_size)
    trained = trained_tensors(loop.model)
    optimizers = LoopOptimizers(trained, loop.optimizers, loop.state)
    # FSDP2 moves the storage of uneven parts when it makes the root.
    drop_gathered(loop.model)
    finish_sharding(loop.model)
    # In the run's order, since the places in an exchange follow it.
    live = {name: local(trained[name]) for name in shapes}
    if not config.model.own:
        source = blueprint.weights(config)
        with torch.no_grad():
            for name, tensor in live.items():
                rows = own_rows(trained[name])
                if rows is None:
                    tensor.copy_(source.tensor(name))
                elif rows:
                    tensor.copy_(read_rows(source, name, rows))
    mesh = SiteMesh.create(1, config.site.shards, loop.device)
    if config.site.shards > 1:
        # A group of its own: the trainer's collectives are in another thread than the loop's.
        mesh = replace(mesh, own_replica=dist.new_group())
    own_text = config.data.own
    model = LoopModel(loop.model, trained, optimizers, turns, loop.evaluation, due, mean, own_text)
    rank = RankParts(place, blueprint, mesh, model, live, shapes)
    rank.states = build_states(config, rank)
    return rank


def _check_division(model: nn.Module, trained: Mapping[str, nn.Parameter], shards: int) -> None:
    """Raise `ModelError` unless FSDP2 divides the model as the run file says.

    `shards`: number of processes that each hold a part of the rows of every tensor.
    """
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor) and shards == 1:
            raise ModelError(
                f"model: {name} is divided among processes (FSDP2); set site.shards to their "
                "number in the run file of all sites, or use DistributedDataParallel"
            )
        if shards == 1:
            continue
        divided = isinstance(parameter, DTensor) and (
            parameter.placements == (Shard(0),) and parameter.device_mesh.size() == shards
        )
        if not divided:
            raise ModelError(
                f"model: {name} is not divided by rows among {shards} processes, as site.shards "
                "says; call fully_shard of the layers and of the whole model, with a mesh of one "
                "dimension"
            )
    if shards > 1 and not isinstance(model, FSDPModule):
        raise ModelError(
            "model: fully_shard was not called on the whole model; call it after the layers"
        )


def _check_model(trained: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]) -> None:
    """Raise `ModelError` unless `trained` has the run's tensors, in fp32."""
    missing = [name for name in shapes if name not in trained]
    extra = [name for name in trained if name not in shapes]
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"also trains {extra[0]}"
        raise ModelError(
            f"model: {what}, unlike [model] of the run file ({len(missing)} missing, {len(extra)} "
            "further tensors); build the same architecture, and freeze nothing"
        )
    for name, parameter in trained.items():
        if parameter.shape != shapes[name]:
            raise ModelError(
                f"model: {name} has shape {tuple(parameter.shape)}, [model] of the run file says "
                f"{tuple(shapes[name])}; build the same architecture"
            )
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"model: {name} is {str(parameter.dtype).removeprefix('torch.')}; keep trained "
                "tensors in fp32 (model.float()), and compute in less under torch.autocast"
            )


def _check_scaling(model: nn.Module, adapter: AdapterSection) -> None:
    """Raise `ModelError` if a PEFT model scales its adapters unlike `[adapter]`."""
    for module in model.modules():
        found = getattr(module, "scaling", None)
        own = found.get("default") if isinstance(found, dict) else None
        if own is not None and not math.isclose(float(own), adapter.scaling):
            raise ModelError(
                f"model: its adapters are scaled by {own:g}, [adapter] of the run file says "
                f"{adapter.scaling:g}; give LoraConfig the run's rank, alpha and use_rslora"
            )
