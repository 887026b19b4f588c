"""One rank's part of a site's model, and the inner step that trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dilocox.compression.second_moments import SecondMoments
from dilocox.config.site import InnerSection, SiteSection
from dilocox.errors import ConfigError
from dilocox.inner.chunk_setup import ChunkSettings, Fill, prepare_chunk
from dilocox.inner.compilation import Compilation, compiles
from dilocox.inner.counted import CountedLabels, on_device
from dilocox.inner.fsdp import local
from dilocox.inner.local_gradients import LocalGradients
from dilocox.inner.loss import mean_cross_entropy
from dilocox.inner.mesh import SiteMesh
from dilocox.inner.model_copy import loss_of_copy
from dilocox.inner.optimizer import InnerOptimizer
from dilocox.inner.own_optimizer import OptimizerFactory, OwnOptimizer
from dilocox.inner.parameters import parameters_by_name
from dilocox.inner.pipeline import (
    Computation,
    LossFunction,
    MicroBatchShape,
    Pipeline,
    chunks_of_stage,
    stage_of_chunk,
)
from dilocox.inner.replicas import Leader, follow, from_first_replica
from dilocox.inner.step_result import StepResult, status_of_rank
from dilocox.inner.tied_weights import TiedPair, find_tied
from dilocox.utils import tracing

ExchangeGradients = Callable[[dict[str, Tensor]], None]


class EvaluatedBatch(NamedTuple):
    """What forward passes alone found on a batch of the site."""

    loss: float
    """Mean loss over the rows of all shards."""
    figures: dict[str, float]
    """Further figures of a loss that has some, by name (`ColumnLoss.figures`)."""


class SiteModel:
    """The chunks that one rank of a site holds, trained together with the site's other ranks.

    Building is collective over the site.

    Args:
        chunks: this rank's chunks in model order, on the meta device. Each chunk has `layers`,
            `embedding` and `closing`, the modules that FSDP wraps (see `fsdp.Units`). Its
            `full_names()` maps local parameter names to full Hugging Face names.
        fill: gives a chunk its values after sharding; called with chunk and device.
        mesh: this rank's place in the site.
        site: section `[site]` of the run file.
        inner: section `[inner]` of the run file.
        settings: how the chunks compute.
        loss: of logits [b, L, V] and labels [b, L]: mean over a micro-batch, or (sum, count).
        optimizer: makes an optimizer that replaces the one of `inner`.

    Raises `ConfigError` if the settings cannot run together, and `ModelError` if a tied tensor is
    not in the expected chunks.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        fill: Fill,
        mesh: SiteMesh,
        site: SiteSection,
        inner: InnerSection,
        settings: ChunkSettings,
        *,
        loss: LossFunction = mean_cross_entropy,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        numbers = chunks_of_stage(site.schedule, mesh.stages, site.chunks, mesh.stage)
        if len(chunks) != len(numbers):
            raise ConfigError(
                f"site.chunks: stage {mesh.stage} was given {len(chunks)} chunks and needs "
                f"{len(numbers)}"
            )
        self._mesh = mesh
        self._clip = inner.clip
        precision, tied = settings.precision, settings.tied
        self.whole_gradients = settings.whole_gradients and mesh.stages == 1 and mesh.sharded
        self._chunks = list(chunks)
        computation = Computation(precision, sharded=mesh.sharded)
        total = mesh.stages * site.chunks
        self._compilation: Compilation | None = None
        if compiles(settings.compile_layers, site, mesh.device):
            self._compilation = Compilation(required=settings.compile_layers is True)
        for number, chunk in zip(numbers, chunks, strict=True):
            prepare_chunk(
                chunk,
                fill,
                mesh,
                computation,
                is_last=number == total - 1,
                compilation=self._compilation,
                whole_gradients=self.whole_gradients,
            )
        self._pipeline = Pipeline(
            chunks,
            mesh,
            site.schedule,
            computation,
            loss,
            MicroBatchShape(site.micro_batch_size, settings.hidden_size),
            self.whole_gradients,
            compiled=self._compilation is not None and mesh.device.type == "cuda",
        )
        self._parameters = parameters_by_name(chunks, tied, computation)
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        self._last_stage = stage_of_chunk(site.schedule, mesh.stages, site.chunks, total - 1)
        self._owner, self._copy = find_tied(
            tied, self._trained, mesh, self._pipeline.is_first, self._pipeline.is_last
        )
        between = tied is not None and mesh.stages > 1
        self._tied = TiedPair(mesh, 0, self._last_stage) if between else None
        # Made once: PyTorch's version counter belongs to a tensor object, not to its storage.
        state = self._trained if settings.frozen_base else self._parameters
        self._held = {n: local(p) for n, p in state.items() if n != self._copy}
        # FSDP never replaces a shard's storage, so an optimizer may hold a plain view of it.
        self._locals = {
            name: nn.Parameter(local(parameter)) if mesh.sharded else parameter
            for name, parameter in self._trained.items()
        }
        self._optimizer = self._make_optimizer(inner, precision, optimizer)
        self._counted = [
            name for name, p in self._locals.items() if p.numel() > 0 and name != self._copy
        ]
        self._names = mesh.gather_names(self._counted)
        self._gradients = LocalGradients(chunks, self._trained, self._locals, mesh)
        self._leader: Leader | None = None
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step, once gradients are computed, before parameters or state change."""
        self.sync_tied()

    def _make_optimizer(
        self, inner: InnerSection, precision: torch.dtype, factory: OptimizerFactory | None
    ) -> InnerOptimizer | OwnOptimizer:
        if factory is not None:
            return OwnOptimizer(self._locals, factory, inner.learning_rate)
        return InnerOptimizer(
            self._locals,
            inner,
            shapes={name: parameter.shape for name, parameter in self._trained.items()},
            group=self._mesh.shard_mesh.get_group() if self._mesh.shards > 1 else None,
            precision=precision,
        )

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's fp32 storage by full name, in model order, to read and write in place.

        Under FSDP a tensor is the rank's shard along the first dimension, possibly of 0 rows. With
        adapters, frozen tensors are left out. The copy of a tied tensor is left out: call
        `sync_tied` after a change of the owner.
        """
        return dict(self._held)

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint of the model holds, by full name.

        Floating-point buffers are fp32. Every shard holds whole buffers. Sites do not exchange
        buffers: no supported architecture writes to one during training (the bias of a router such
        as DeepSeek's is only read). So all sites keep the buffers of the start. If an architecture
        wrote to a buffer, a checkpoint would hold the values of this site alone.
        """
        found: dict[str, Tensor] = {}
        for chunk in self._chunks:
            saved: Mapping[str, Tensor] = chunk.saved_buffers()  # type: ignore[operator]
            for name, buffer in saved.items():
                found[name] = buffer.float() if buffer.is_floating_point() else buffer
        return found

    def sync_tied(self, moments: bool = False) -> None:
        """Set the copy of a tied tensor from its owner; with `moments` its second moments, too.

        All ranks of the site call this at the same point. Only the ranks of owner and copy
        communicate. Without a tied tensor nothing is sent.
        """
        if self._leader is not None:
            self._leader.tied_synced(moments)
        if self._tied is not None:
            self._tied.send(self._storage(self._owner), self._storage(self._copy))
            if moments:
                second = self.second_moments().live
                self._tied.send(second.get(self._owner or ""), second.get(self._copy or ""))

    def _storage(self, name: str | None) -> Tensor | None:
        return None if name is None else local(self._parameters[name])

    def inner_step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        learning_rate: float,
        exchange_gradients: ExchangeGradients | None = None,
        counted: CountedLabels | None = None,
    ) -> StepResult:
        """Take one optimizer step on this shard's rows of the site's batch.

        Collective over the site. The gradient is the mean over the site's batch, with `counted`
        over the labels that count. If loss or norm is not finite, no step is taken, and the result
        says so. After `exchange_gradients` the norm alone decides, so that all sites do the same.

        Args:
            input_ids: int64 [b, L], the same shape on all ranks; only the first stage reads it.
            labels: int64 [b, L], the same shape on all ranks; only the last stage reads it.
            learning_rate: rate of this step.
            exchange_gradients: gets local fp32 gradients by full name before clipping, and may
                change them in place.
            counted: how many labels of the batch count, if not all do.

        Raises `TrainingError`, which names the tensor, if a trained parameter got no gradient.
        """
        averaged = exchange_gradients is not None
        if self._leader is not None:
            input_ids, labels, counted = self._leader.order(
                "inner_step",
                input_ids,
                labels,
                counted,
                learning_rate=learning_rate,
                averaged=averaged,
            )
        loss, gradients = self._backward(input_ids, labels, counted)
        loss = self._mesh.mean_of_replicas(loss)
        owner = None if self._owner is None else gradients[self._owner]
        copy = None if self._copy is None else gradients[self._copy]
        self.before_update()
        with torch.no_grad():
            if exchange_gradients is not None:
                exchange_gradients({n: g for n, g in gradients.items() if n != self._copy})
                if self._tied is not None:
                    self._tied.send(owner, copy)
                if self._mesh.replicas > 1:
                    from_first_replica(self._mesh, list(gradients.values()))
            status = status_of_rank(loss, [gradients[name] for name in self._counted])
            result = StepResult(
                self._mesh.gather(status), self._mesh.shards, self._last_stage, self._names
            )
            with tracing.span("optimizer"):
                divisor, skip = result.divisor_and_skip(self._clip, averaged)
                self._optimizer.step(learning_rate, divisor, skip)
        self._gradients.drop()
        if self._leader is not None:
            self._leader.done()
        return result

    def compile_problem(self) -> str | None:
        """Return, once after the first step, why layers run without being compiled, or None.

        Raises `ConfigError` instead if `model.compile` is true.
        """
        return None if self._compilation is None else self._compilation.problem()

    def loss_and_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        names: Sequence[str],
        counted: CountedLabels | None = None,
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over the rows of all shards, and its gradients. Trains nothing.

        Collective over the site; `input_ids`, `labels`, `counted` as for `inner_step`. The
        gradients are local, fp32 by full name, of the trained tensors among `names`; a tied tensor
        goes by its owner's name. The model is in evaluation mode (no dropout).
        """
        if self._leader is not None:
            input_ids, labels, counted = self._leader.order(
                "loss_and_gradients", input_ids, labels, counted, names=names
            )
        for chunk in self._chunks:
            chunk.eval()
        loss, gradients = self._backward(input_ids, labels, counted)
        for chunk in self._chunks:
            chunk.train()
        found = {name: gradients[name] for name in names if name in gradients}
        self._gradients.drop()
        return self._mean_over_shards(loss), found

    def _backward(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the shard's rows, and local gradients by full name.

        The loss is 0 on ranks without the last chunk.
        """
        with tracing.span("forward and backward"):
            loss = self._pipeline.accumulate(
                input_ids.to(self._mesh.device, non_blocking=True),
                labels.to(self._mesh.device, non_blocking=True),
                on_device(counted, self._mesh.device),
            )
        with torch.no_grad():
            gradients = self._gradients.collect()
            if self._tied is not None:
                self._tied.sum_gradients(
                    None if self._owner is None else gradients[self._owner],
                    None if self._copy is None else gradients[self._copy],
                )
            if self._pipeline.has_own_loss:
                factor, loss = self._pipeline.correct(loss, counted)
                torch._foreach_mul_(list(gradients.values()), factor)
        return loss if counted is None else loss * counted.stretch, gradients

    def _mean_over_shards(self, loss: Tensor) -> float:
        mean = self._mesh.mean_of_replicas(loss)
        losses = self._mesh.gather(mean.double().unsqueeze(0))[:, 0]
        return float(losses.sum().item()) / self._mesh.shards

    def evaluate(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> float:
        """Return the mean loss over the rows of all shards, by forward passes alone.

        Collective over the site; all ranks get the same number. `input_ids`, `labels`: int64
        [b, L], with the same b and L on all ranks. `counted`: as for `inner_step`.
        """
        return self.measure(input_ids, labels, counted).loss

    def measure(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> EvaluatedBatch:
        """Return what `evaluate` returns, and the figures that the loss has beside it."""
        if self._leader is not None:
            input_ids, labels, counted = self._leader.order("evaluate", input_ids, labels, counted)
        for chunk in self._chunks:
            chunk.eval()
        loss = self._pipeline.mean_loss(
            input_ids.to(self._mesh.device),
            labels.to(self._mesh.device),
            on_device(counted, self._mesh.device),
        )
        if self._pipeline.has_own_loss:
            loss = self._pipeline.correct(loss, counted)[1]
        figures = self._pipeline.figures(counted)
        for chunk in self._chunks:
            chunk.train()
        return EvaluatedBatch(self._mean_over_shards(loss), figures)

    def loss_beside(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> Callable[[Mapping[str, Tensor]], float]:
        """Return a function from tensors by full name to the mean loss over these rows.

        The function loads the tensors into a copy of this model, which computes in fp32. One thread
        at a time may call it while this model trains. `input_ids`, `labels`: int64 [b, L] on the
        device; `counted`: as for `inner_step`, with positions on the device. Only for a rank that
        holds the whole model.
        """
        assert self._mesh.stages == 1
        assert not self._mesh.sharded
        return loss_of_copy(
            self._chunks[0],
            self._parameters,
            lambda copied: self._pipeline.loss_of(copied, input_ids, labels, counted),
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the live state of the inner optimizer: `moment/FULL NAME` and `step`.

        The state of a tied copy is included.
        """
        return self._optimizer.state()

    def second_moments(self) -> SecondMoments:
        """Return AdamW's second moments. SGD and Muon's matrices have none."""
        live, weights = self._optimizer.second_moments()
        first_rows = {}
        if self._mesh.shards > 1:
            for name, tensor in live.items():
                whole = self._trained[name].shape
                before = self._mesh.shard * -(-whole[0] // self._mesh.shards)
                first_rows[name] = before * math.prod(tensor.shape[1:-1])
        return SecondMoments(live, weights, first_rows)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the inner optimizer's state, bit for bit. Raises `CheckpointError` if it does not
        fit."""
        self._optimizer.load(state)
        if self._leader is not None:
            self._leader.optimizer_replaced()

    def moments(self) -> list[Tensor]:
        """Return the storage of the inner optimizer's moments; see `InnerOptimizer.moments`."""
        return self._optimizer.moments()

    def lead(self) -> None:
        """Let further replicas repeat every call of this rank of the first replica from now on."""
        if self._mesh.replicas > 1:
            self._leader = Leader(self, self._mesh)

    def follow(self, step_done: Callable[[], None]) -> None:
        """Follow the first replica's calls, as a rank of a further replica, until its `let_go`."""
        follow(self, self._mesh, step_done)

    def let_go(self) -> None:
        """Order further replicas to end."""
        if self._leader is not None:
            self._leader.end()
