"""Micro-batches through the chunks of a stage, by schedule name.

With one stage the micro-batches run in a plain loop. With more, PyTorch's pipeline schedules run
them; shapes and dtypes at the cuts are told to the schedule beforehand, so it neither runs a trial
pass nor sends objects between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

from dilocox.errors import ConfigError
from dilocox.site.mesh import SiteMesh
from dilocox.site.sharding import drop_gathered, keep_gradient_sums_fp32, reduce_gradients
from dilocox.torch_internals import CONVOLUTIONS, LeanStage

LossFunction = Callable[[Tensor, Tensor], Tensor]

_SCHEDULES: dict[str, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def chunks_of_stage(schedule: str, stages: int, chunks_per_stage: int, stage: int) -> list[int]:
    """Numbers, in model order, of the chunks that `stage` holds (of stages x chunks_per_stage).

    Looped schedules deal the chunks out in turn; `zbv` goes down the stages and back up, so that
    stage i holds chunks i and 2 * stages - 1 - i.
    """
    if schedule == "zbv":
        return [stage, 2 * stages - 1 - stage]
    return [stage + turn * stages for turn in range(chunks_per_stage)]


def stage_of_chunk(schedule: str, stages: int, chunks_per_stage: int, chunk: int) -> int:
    """The stage that holds `chunk`: the inverse of `chunks_of_stage`."""
    if schedule == "zbv" and chunk >= stages:
        return 2 * stages - 1 - chunk
    return chunk % stages


class Computation:
    """How forward passes compute: fp32, or bf16 by autocast over fp32 parameters.

    Inside `step()`, parameters are cast once and shared by all micro-batches. FSDP casts by
    itself, so a sharded stage uses no autocast. Experts are multiplied by an operation that
    autocast does not know: `prepare` has theirs cast in the same way.
    """

    def __init__(self, device: torch.device, precision: torch.dtype, sharded: bool) -> None:
        self._device_type = device.type
        self._precision = precision
        self._autocast = precision is not torch.float32 and not sharded
        self._casts: dict[int, Tensor] = {}
        """Of experts' parameters, by id(), as long as a step lasts."""
        self.boundary_dtype = precision if sharded else torch.float32

    def prepare(self, chunk: nn.Module) -> None:
        """To be called once for each chunk that is to compute in this way."""
        if not self._autocast:
            return
        for module in chunk.modules():
            names = [name for name, p in module._parameters.items() if p is not None]
            three = any(module._parameters[name].dim() == 3 for name in names)  # type: ignore[union-attr]
            if three and not isinstance(module, CONVOLUTIONS):
                # No closure: a copy of the chunk is to run its own parameters.
                run = partial(self._with_casts, module, names, module.forward)
                setattr(module, "forward", run)  # noqa: B010

    # A cast made in a compiled layer could be used by one backward pass only.
    @torch.compiler.disable
    def _with_casts(
        self, module: nn.Module, names: list[str], run: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        if not torch.is_autocast_enabled(self._device_type):
            return run(*args, **kw)
        held: dict[str, Any] = module._parameters
        own = {name: held[name] for name in names}
        try:
            held.update((name, self._cast(parameter)) for name, parameter in own.items())
            return run(*args, **kw)
        finally:
            held.update(own)

    def _cast(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._casts:
            self._casts[id(parameter)] = parameter.to(self._precision)
        return self._casts[id(parameter)]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of a step. Casts are forgotten when it ends."""
        if not self._autocast:
            yield
            return
        try:
            # Autocast forgets its own when the last of its blocks ends.
            with torch.autocast(self._device_type, dtype=self._precision, enabled=False):
                yield
        finally:
            self._casts.clear()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around one forward pass; backward passes run outside, as autocast asks for."""
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._precision)


class _Stage(LeanStage):
    """A chunk in PyTorch's terms, with this package's mixed precision."""

    def __init__(self, computation: Computation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computation = computation

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._computation.forward():
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            keep_gradient_sums_fp32(self.submod)
        return result


class Pipeline:
    """Runs the micro-batches of one rank: training passes, and forward passes alone."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: SiteMesh,
        schedule: str,
        computation: Computation,
        loss: LossFunction,
        micro_batch_size: int,
        hidden_size: int,
        whole_gradients: bool = False,
    ) -> None:
        self._chunks = list(chunks)
        self._whole_gradients = whole_gradients
        self._mesh = mesh
        self._schedule_name = schedule
        self._computation = computation
        self.loss = loss
        self._rows = micro_batch_size
        self._hidden_size = hidden_size
        self._numbers = chunks_of_stage(schedule, mesh.stages, len(chunks), mesh.stage)
        self._total = mesh.stages * len(chunks)
        self._built: dict[tuple[int, int], Any] = {}
        self.is_first = self._numbers[0] == 0
        self.is_last = self._numbers[-1] == self._total - 1

    def accumulate(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Add the gradients of the mean loss over the shard's rows to the parameters' `.grad`.

        `input_ids`, `labels`: int64 [b, L], b a multiple of the micro-batch size; only the first
        stage reads the one and only the last the other. Returns that mean loss, an fp32 scalar on
        the device; 0 on ranks without the last chunk.
        """
        rows, length = input_ids.shape
        if rows % self._rows or rows == 0:
            raise ConfigError(
                f"site.batch_size: {rows} rows per shard are not divisible into micro-batches of "
                f"{self._rows}"
            )
        count = rows // self._rows
        with self._computation.step():
            if self._mesh.stages == 1:
                losses = self._loop(input_ids, labels, count)
            else:
                losses = self._scheduled(input_ids, labels, count, length)
        if not self.is_last:
            return torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        # Each micro-batch's loss is already divided by their number.
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _loop(self, input_ids: Tensor, labels: Tensor, count: int) -> list[Tensor]:
        chunk, losses = self._chunks[0], []
        parts = zip(input_ids.split(self._rows), labels.split(self._rows), strict=True)
        for number, (ids, targets) in enumerate(parts):
            # Else FSDP adds every micro-batch into the sharded gradient: no rank ever holds a whole
            # one.
            if self._whole_gradients:
                reduce_gradients(chunk, number == count - 1)
            with self._computation.forward():
                logits = chunk(ids)
            loss = self.loss(logits, targets).float()
            del logits
            if count > 1:
                loss = loss / count
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _scheduled(
        self, input_ids: Tensor, labels: Tensor, count: int, length: int
    ) -> list[Tensor]:
        key = (count, length)
        if key not in self._built:
            self._built[key] = self._build(count, length)
        losses: list[Tensor] = []
        self._built[key].step(
            *((input_ids,) if self.is_first else ()),
            target=labels if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
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
                # What the last chunk puts out goes to nobody, so its shape is of no concern.
                output_args=hidden,
                group=self._mesh.pipeline_group,
            )
            for chunk, number in zip(self._chunks, self._numbers, strict=True)
        ]

        def loss_of_micro_batch(logits: Tensor, targets: Tensor) -> Tensor:
            return self.loss(logits, targets).float() / count

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
    def mean_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the shard's rows, forward only; 0 on ranks without the last chunk.

        Any number of rows. Micro-batches go through one after the other: looped schedules do not
        overlap here, so that no two ranks ever wait to send to each other.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        with self._computation.step():
            for ids, targets in zip(
                input_ids.split(self._rows), labels.split(self._rows), strict=True
            ):
                passed: Tensor | None = None
                for chunk, number in zip(self._chunks, self._numbers, strict=True):
                    value = ids if number == 0 else self._receive(number, passed, ids)
                    with self._computation.forward():
                        passed = chunk(value)
                    if number == self._total - 1:
                        total += self.loss(passed, targets).float() * len(ids)
                    else:
                        self._send(number, passed)
        for chunk in self._chunks:
            drop_gathered(chunk)
        return total / len(input_ids)

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
    """Let `chunk` put out `dtype` and contiguous, as the next stage expects to receive it."""
    chunk.register_forward_hook(lambda _module, _inputs, output: output.to(dtype).contiguous())
