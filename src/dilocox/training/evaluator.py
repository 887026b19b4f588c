"""Evaluation at one rank: the held-out loss of the anchor, and its gradient for a fragment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from dilocox.inner.counted import CountedLabels
from dilocox.inner.site_model import EvaluatedBatch
from dilocox.outer.loss_gate import GradientProbe
from dilocox.outer.staging import before_change
from dilocox.training.batches import Batch
from dilocox.training.builder import RankParts, anchors
from dilocox.training.control_plane import LeaseControl
from dilocox.training.held_out_sources import SourceBatches
from dilocox.utils import tracing

Measure = Callable[[torch.Tensor, torch.Tensor, CountedLabels | None], EvaluatedBatch]
"""`SiteModel.measure`."""


class HeldOutLoss(NamedTuple):
    """Held-out loss of an anchor, in nats per counted token."""

    mean: float
    by_source: dict[str, float]
    """The loss of each of several sources, by name; empty if they were not asked for."""
    figures: dict[str, float]
    """Figures of preference training by name, see `dilocox.config.preference`; else empty."""


class Evaluator:
    """Evaluates the model with other parameters, and restores the trained parameters after that."""

    def __init__(
        self,
        rank: RankParts,
        control: LeaseControl,
        validation: Sequence[Batch],
        probe_batch: Batch | None,
        sources: Sequence[SourceBatches] = (),
        *,
        measure: Measure | None = None,
    ) -> None:
        """Keep the batches for evaluations.

        `validation`: this rank's part of the held-out batches. `probe_batch`: the batch that the
        gate reads at a boundary; may be None, then no gradient is probed. `sources`: where each of
        several sources is in `validation`, and what is left of it. `measure`: evaluates a
        batch instead of the model's `evaluate`, if the loss gives figures beside it.
        """
        self._rank, self._control = rank, control
        self._validation, self.probe_batch = validation, probe_batch
        self._sources, self._measure = sources, measure

    @property
    def has_held_out(self) -> bool:
        """Whether there is a held-out loss. A loop with data of its own need not give one."""
        return bool(self._validation)

    def held_out_loss(self, round_: int, *, by_source: bool = False) -> HeldOutLoss:
        """Return the mean held-out loss of the anchor after `round_`, in nats per counted token.

        `by_source`: whether the loss of each of several sources is computed, too.
        """
        own: dict[str, float] = {}
        figures: list[dict[str, float]] = []
        span = tracing.span("evaluation", after_round=round_)
        with span, self.standing_at(anchors(self._rank)):
            losses = []
            for batch in self._validation:
                losses.append(self._loss(batch, figures))
            for source in self._sources if by_source else ():
                found = [(self._validation[number], losses[number]) for number in source.whole]
                found += [(batch, self._loss(batch)) for batch in source.rest]
                own[source.name] = _mean([(self._labels(batch), loss) for batch, loss in found])
        weights = [1 if each.counted is None else each.counted.labels for each in self._validation]
        means = {
            name: _mean([(n, each[name]) for n, each in zip(weights, figures, strict=True)])
            for name in (figures[0] if figures else ())
        }
        return HeldOutLoss(_mean(list(zip(weights, losses, strict=True))), own, means)

    def _loss(self, batch: Batch, figures: list[dict[str, float]] | None = None) -> float:
        """Return the loss of a batch; append what the loss gives beside it to `figures`."""
        if self._measure is not None:
            loss, found = self._measure(*batch)
            if figures is not None:
                figures.append(found)
        else:
            loss = self._rank.model.evaluate(*batch)
        self._control.touch()
        return loss

    def _labels(self, batch: Batch) -> int:
        """Return the counted labels of a batch, of all shards."""
        if batch.counted is not None:
            return batch.counted.labels
        return batch.labels.numel() * self._rank.mesh.shards

    def gradient_probe(self, names: Sequence[str]) -> GradientProbe | None:
        """Return held-out loss and its gradients for the tensors `names`; None without probe batch.

        The gradient is taken half-way between the anchors of `names` and this site's own trained
        values, as in the midpoint rule. At the anchor itself the slope may lead nowhere. The rest
        of the model is the anchor. `names` may be empty, since all ranks of the site evaluate
        together, even if only some of them have a boundary.
        """
        if self.probe_batch is None:
            return None
        model, live = self._rank.model, self._rank.live
        where = dict(anchors(self._rank))
        for name in names:
            own = live[name].detach()
            where[name] = where[name].to(own.device).lerp(own, 0.5)
        with tracing.span("gate"), self.standing_at(where):
            inputs, labels, counted = self.probe_batch
            loss, gradients = model.loss_and_gradients(inputs, labels, names, counted)
        self._control.touch()
        return GradientProbe(loss, {name: each.cpu() for name, each in gradients.items()})

    @contextlib.contextmanager
    def standing_at(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Context in which the model has the parameters `values`.

        When the context ends, the parameters that this rank trains are copied back.
        """
        before_change()
        own = {name: tensor.detach().clone() for name, tensor in self._rank.live.items()}
        self._fill(values)
        yield
        self._fill(own)

    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in values.items():
                self._rank.live[name].copy_(tensor)
            self._rank.model.sync_tied()


def _mean(losses: Sequence[tuple[int, float]]) -> float:
    """Return the mean of pairs (weight, loss)."""
    return sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)
