"""Runs micro-batches through the chunks of a stage, by the name of a pipeline schedule.

With one stage the micro-batches run in a plain loop. With several stages PyTorch's pipeline
schedules run them. A schedule gets shapes and dtypes at the cuts beforehand, so it neither runs a
trial pass nor sends objects between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from dilocox.config.site import ZERO_BUBBLE
from dilocox.errors import ConfigError
from dilocox.inner.counted import CountedLabels, MicroBatchLoss, OwnLoss, arguments, mean_of
from dilocox.inner.fsdp import (
    drop_gathered,
    keep_gradient_sums_fp32,
    reduce_gradients,
    reduce_over_replicas,
)
from dilocox.inner.head_loss import HeadLoss
from dilocox.inner.loss import mean_cross_entropy, sum_cross_entropy
from dilocox.inner.mesh import SiteMesh
from dilocox.inner.weight_copies import WeightCopies
from dilocox.utils.torch_internals import LeanStage, weight_half_takes_functions

LossFunction = OwnLoss

_SCHEDULES: dict[str, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def chunks_of_stage(schedule: str, stages: int, chunks_per_stage: int, stage: int) -> list[int]:
    """Return the numbers, in model order, of the chunks that `stage` holds.

    The model has stages x chunks_per_stage chunks. Looped schedules give the stages one chunk each
    in turn. `zbv` goes down the stages and back up, so stage i holds chunks i and
    2 * stages - 1 - i.
    """
    if schedule == "zbv":
        return [stage, 2 * stages - 1 - stage]
    return [stage + turn * stages for turn in range(chunks_per_stage)]


def stage_of_chunk(schedule: str, stages: int, chunks_per_stage: int, chunk: int) -> int:
    """Return the stage that holds `chunk`: the inverse of `chunks_of_stage`."""
    if schedule == "zbv" and chunk >= stages:
        return 2 * stages - 1 - chunk
    return chunk % stages


class Computation:
    """Compute dtype of forward passes: fp32, or bf16 with bf16 copies of fp32 parameters.

    `prepare` gives a chunk its copies after the chunk was filled. Every `step()` begins by copying
    the masters' values. Parameters that the chunk names in `kept_in_fp32` have no copy. In a
    sharded stage FSDP makes the copies, also of these parameters, so this class makes none. In
    both cases all values between layers, stages and micro-batches have the compute dtype.
    """

    def __init__(self, precision: torch.dtype, sharded: bool) -> None:
        self.boundary_dtype = precision
        self._copying = precision is not torch.float32 and not sharded
        self._copies: dict[nn.Module, WeightCopies] = {}

    def prepare(self, chunk: nn.Module) -> None:
        """Give `chunk` its copies. Call this once for each chunk, after the chunk was filled."""
        if self._copying:
            kept: frozenset[str] = getattr(chunk, "kept_in_fp32", frozenset())
            self._copies[chunk] = WeightCopies(chunk, self.boundary_dtype, kept)

    def trained(self, chunk: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 master of `parameter` of `chunk`; the parameter itself without copies."""
        return self._copies[chunk].master(parameter) if chunk in self._copies else parameter

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of all micro-batches of a step. On entry the masters' values are copied."""
        for copies in self._copies.values():
            copies.refresh()
        yield

    def end_of_weight_half(self, chunk: nn.Module) -> None:
        """Add up, in fp32, gradients that the weight half of a backward pass left without hooks."""
        keep_gradient_sums_fp32(chunk)
        if chunk in self._copies:
            self._copies[chunk].collect()


class _Stage(LeanStage):
    """A chunk as a stage of PyTorch's schedules, with this package's mixed precision."""

    def __init__(self, computation: Computation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computation = computation

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            self._computation.end_of_weight_half(self.submod)
        return result


def computes_head_with_loss(schedule: str) -> bool:
    """Return True if head and loss can be one autograd function in this schedule.

    Zero-bubble schedules split the backward pass. Not every PyTorch can split it at a custom
    function; the head then gives all logits of a micro-batch.
    """
    return schedule not in ZERO_BUBBLE or weight_half_takes_functions()


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of the values between chunks, without the sequence length."""

    rows: int
    """Rows of a micro-batch."""
    hidden_size: int
    """Last dimension of the values."""


class Pipeline:
    """Runs the micro-batches of one rank: training passes, and forward passes alone.

    Args:
        chunks: this rank's chunks in model order.
        mesh: this rank's place in the site.
        schedule: name of the pipeline schedule.
        computation: compute dtype and copies of parameters.
        loss: mean loss of a micro-batch, or its sum and count, of logits and labels.
        shape: rows and width of the values between chunks.
        whole_gradients: reduce gradients over shards once per step, see `SiteModel`.
        compiled: compile the loss of a chunk of tokens.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: SiteMesh,
        schedule: str,
        computation: Computation,
        loss: LossFunction,
        shape: MicroBatchShape,
        whole_gradients: bool = False,
        compiled: bool = False,
    ) -> None:
        self._chunks = list(chunks)
        self._whole_gradients = whole_gradients
        self._mesh = mesh
        self._schedule_name = schedule
        self._computation = computation
        self.loss = loss
        self._rows = shape.rows
        self._hidden_size = shape.hidden_size
        self._numbers = chunks_of_stage(schedule, mesh.stages, len(chunks), mesh.stage)
        self._total = mesh.stages * len(chunks)
        self._built: dict[tuple[int, int], Any] = {}
        self.is_first = self._numbers[0] == 0
        self.is_last = self._numbers[-1] == self._total - 1
        # A user's loss gets logits; the built-in loss is computed together with the head.
        self._inside = (
            loss is mean_cross_entropy
            and hasattr(self._chunks[-1], "head_loss")
            and computes_head_with_loss(schedule)
        )
        self._own = None if loss is mean_cross_entropy else MicroBatchLoss(loss)
        self._mean_head = HeadLoss(compiled=compiled)
        self._sum_head = HeadLoss(compiled=compiled, summed=True)
        self._scale: float | None = None
        """Factor of a micro-batch's sum; None: its mean is divided by the number of micro-batches.
        """

    def loss_of(
        self, chunk: nn.Module, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None
    ) -> Tensor:
        """Return the fp32 mean loss over these rows; `chunk` is a copy of the whole model.

        May be called beside `accumulate`: nothing of this pipeline is changed.
        """
        more = arguments(counted)
        if self._inside:
            self._set_head_loss(chunk, summed=counted is not None)
            more["labels"] = labels
        output: Tensor = chunk(input_ids, **more)
        if self._own is not None:
            return mean_of(self.loss(output, labels))
        if counted is None:
            return (output if self._inside else mean_cross_entropy(output, labels)).float()
        loss = output if self._inside else sum_cross_entropy(output, labels)
        return loss.float() / counted.labels

    @property
    def has_own_loss(self) -> bool:
        """True if the loss is a user's function, which may return a sum and a count."""
        return self._own is not None

    def _begin(self, counted: CountedLabels | None) -> dict[str, Tensor]:
        """Set the loss for the micro-batches of a batch; return the chunks' further arguments."""
        self._scale = None
        if counted is not None:
            # Gradients become the mean over shards and replicas.
            self._scale = self._mesh.shards * self._mesh.replicas / counted.divisor
        if self._inside and self.is_last:
            self._set_head_loss(self._chunks[-1], summed=counted is not None)
        return arguments(counted)

    def _set_head_loss(self, chunk: Any, *, summed: bool) -> None:
        chunk.head_loss = self._sum_head if summed else self._mean_head
        chunk.sums_labels = summed

    def _part(self, output: Tensor, labels: Tensor, whole: float) -> Tensor:
        """Return a micro-batch's part of the batch's loss, fp32, from the last chunk's output.

        `whole`: micro-batches of the batch, or rows of the batch / rows of the micro-batch.
        """
        if self._own is not None:
            return self._own(output, labels, whole, self._scale)
        if self._scale is None:
            loss = output if self._inside else mean_cross_entropy(output, labels)
            return loss.float() / whole
        loss = output if self._inside else sum_cross_entropy(output, labels)
        return loss.float() * self._scale

    def correct(self, value: Tensor, counted: CountedLabels | None) -> tuple[Tensor, Tensor]:
        """Return (factor of loss and gradients, corrected `value`), fp32 scalars on the device.

        If a user's loss gave sums, the factor is 1 / the sum of the counts of the whole batch, in
        units of this rank's share. A site does not know the counts of other sites. If gradients are
        averaged over sites, the site therefore weighs as many counts as its share of the counted
        labels. Otherwise the factor is 1. Collective over the site; waits for nothing.
        """
        mesh = self._mesh
        own = torch.zeros((), dtype=torch.float32, device=mesh.device)
        if self._own is not None and self.is_last:
            own = self._own.take_count(mesh.device)
        count = mesh.gather(mesh.mean_of_replicas(own).unsqueeze(0)).sum()
        # The mean over the replicas' counts, and over the shards' losses.
        weighed = count if counted is None else count * counted.stretch
        factor = torch.where(count > 0, mesh.shards / weighed, torch.ones_like(count))
        return factor, value * factor

    def figures(self, counted: CountedLabels | None) -> dict[str, float]:
        """Return the figures of the batch that `mean_loss` has just evaluated, by name.

        They are means over what the loss counts, of all shards and replicas; none if the loss has
        no figures. Collective over the site.
        """
        if self._own is None or counted is None or not self._own.figure_names:
            return {}
        mesh = self._mesh
        own = self._own.take_figures(mesh.device)
        sums = mesh.gather(mesh.mean_of_replicas(own)).sum(0) * mesh.replicas
        means = (sums.double() / counted.labels).tolist()
        return dict(zip(self._own.figure_names, means, strict=True))

    def accumulate(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> Tensor:
        """Add the gradients of the mean loss over the shard's rows to the parameters' `.grad`.

        With `counted` they are this shard's part of the mean loss over the counted labels of all
        shards, times the number of shards.

        `input_ids`, `labels`: int64 [b, L]; b is a multiple of the micro-batch size. Only the first
        stage reads `input_ids`, and only the last stage reads `labels`. Returns the mean loss, an
        fp32 scalar on the device; 0 on ranks without the last chunk. Raises `ConfigError` if b is
        not a multiple of the micro-batch size.
        """
        given = self._begin(counted)
        rows = len(input_ids)
        if rows % self._rows or rows == 0:
            raise ConfigError(
                f"site.batch_size: {rows} rows per shard are not divisible into micro-batches of "
                f"{self._rows}"
            )
        count = rows // self._rows
        with self._computation.step():
            if self._mesh.stages == 1:
                losses = self._loop(input_ids, labels, count, given)
            else:
                losses = self._scheduled(input_ids, labels, count, given)
        if not self.is_last:
            return torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        # Each micro-batch's loss is its part of the batch's loss already.
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _loop(
        self, input_ids: Tensor, labels: Tensor, count: int, given: dict[str, Tensor]
    ) -> list[Tensor]:
        chunk, losses = self._chunks[0], []
        for number, (ids, targets, more) in enumerate(self._split(input_ids, labels, given)):
            # Without whole gradients, FSDP reduces every micro-batch into the sharded gradient.
            if self._whole_gradients:
                reduce_gradients(chunk, number == count - 1)
            elif self._mesh.replicas > 1:
                reduce_over_replicas(chunk, number == count - 1)
            if self._inside:
                more["labels"] = targets
            loss = self._part(chunk(ids, **more), targets, count)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _split(
        self, input_ids: Tensor, labels: Tensor, given: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield inputs, labels and the chunks' further arguments of each micro-batch."""
        parts = {name: tensor.split(self._rows) for name, tensor in given.items()}
        both = zip(input_ids.split(self._rows), labels.split(self._rows), strict=True)
        for number, (ids, targets) in enumerate(both):
            yield ids, targets, {name: part[number] for name, part in parts.items()}

    def _scheduled(
        self, input_ids: Tensor, labels: Tensor, count: int, given: dict[str, Tensor]
    ) -> list[Tensor]:
        key = (count, input_ids.shape[1])
        if key not in self._built:
            self._built[key] = self._build(*key)
        losses: list[Tensor] = []
        self._built[key].step(
            *((input_ids,) if self.is_first else ()),
            target=labels if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
            **given,
            **({"labels": labels} if self._inside and self.is_last else {}),
        )
        return [loss.detach() for loss in losses]

    def _build(self, count: int, length: int) -> Any:
        ids = torch.empty(self._rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            self._rows,
            length,
            self._hidden_size,
            dtype=self._computation.boundary_dtype,
            device="meta",
            requires_grad=True,
        )
        stages = [
            _Stage(
                self._computation,
                chunk,
                number,
                self._total,
                self._mesh.device,
                input_args=ids if number == 0 else hidden,
                # No rank receives the output of the last chunk, so its shape does not matter.
                output_args=hidden,
                group=self._mesh.pipeline_group,
            )
            for chunk, number in zip(self._chunks, self._numbers, strict=True)
        ]

        def loss_of_micro_batch(output: Tensor, targets: Tensor) -> Tensor:
            return self._part(output, targets, count)

        kind = _SCHEDULES[self._schedule_name]
        single = self._schedule_name in ("gpipe", "1f1b")
        try:
            return kind(
                stages[0] if single else stages,
                count,
                loss_fn=loss_of_micro_batch,
                scale_grads=False,
            )
        except ValueError as error:
            raise ConfigError(
                f'site.schedule: "{self._schedule_name}" cannot run {count} micro-batches over '
                f"{self._mesh.stages} stages ({error}); change batch_size or micro_batch_size"
            ) from error

    @torch.no_grad()
    def mean_loss(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> Tensor:
        """Return the mean loss over the shard's rows, by forward passes alone.

        With `counted` it is this shard's part as in `accumulate`. The result is 0 on ranks without
        the last chunk. Any number of rows is allowed.
        Micro-batches run one after the other, also in looped schedules, so that no two ranks ever
        wait to send to each other.
        """
        given = self._begin(counted)
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        with self._computation.step():
            for ids, targets, more in self._split(input_ids, labels, given):
                passed: Tensor | None = None
                for chunk, number in zip(self._chunks, self._numbers, strict=True):
                    value = ids if number == 0 else self._receive(number, passed, ids)
                    if number == self._total - 1:
                        if self._inside:
                            more["labels"] = targets
                        output = chunk(value, **more)
                        if self._own is not None and counted is not None:
                            self._own.measure(output, targets)
                        if self._own is None and counted is None:
                            total += self._part(output, targets, 1) * len(ids)
                        else:
                            total += self._part(output, targets, len(input_ids) / len(ids))
                    else:
                        passed = chunk(value, **more)
                        self._send(number, passed)
        for chunk in self._chunks:
            drop_gathered(chunk)
        return total / len(input_ids) if self._own is None and counted is None else total

    def _receive(self, number: int, passed: Tensor | None, ids: Tensor) -> Tensor:
        source = self._stage_of(number - 1)
        if source == self._mesh.stage and passed is not None:
            return passed
        buffer = torch.empty(
            *ids.shape,
            self._hidden_size,
            dtype=self._computation.boundary_dtype,
            device=self._mesh.device,
        )
        dist.recv(buffer, group=self._mesh.pipeline_group, group_src=source)
        return buffer

    def _send(self, number: int, hidden: Tensor) -> None:
        target = self._stage_of(number + 1)
        if target != self._mesh.stage:
            dist.send(hidden.contiguous(), group=self._mesh.pipeline_group, group_dst=target)

    def _stage_of(self, number: int) -> int:
        return stage_of_chunk(self._schedule_name, self._mesh.stages, len(self._chunks), number)


def cast_boundary(chunk: nn.Module, dtype: torch.dtype) -> None:
    """Make the outputs of `chunk` contiguous and of `dtype`, as the next stage expects."""
    chunk.register_forward_hook(lambda _module, _inputs, output: output.to(dtype).contiguous())
