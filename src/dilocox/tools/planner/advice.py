"""Finds changes of the run file with which ranks that do not fit their GPUs would fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice
from dilocox.errors import DilocoxError
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import counted, footprints, needed
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.variants import changed


@dataclass(frozen=True)
class Change:
    """One or more changes of the run file that lower the memory need of a device."""

    values: Mapping[str, Any]
    """New value by key, such as `site.stages`."""
    needed: int
    """Bytes that the fullest device needs with the change."""
    available: int
    """Bytes that training may use of this device."""
    device: str
    """Name of the device that is fullest with the change. Another device may be fullest without
    the change."""

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device with the change."""
        return self.needed <= self.available

    @property
    def text(self) -> str:
        """The change as arguments of the command line, `--set KEY=VALUE ...`."""
        return " ".join(
            f"--set {key}={json.dumps(value).strip(chr(34))}" for key, value in self.values.items()
        )


MOST_ADVICE = 3
"""Single changes to return at most."""
MOST_TOGETHER = 4
"""Keys to change together at most."""


Check = Callable[[Mapping[str, Any], ModelOutline], tuple[int, GpuPlacement] | None]
"""Plans the run with changed keys, and the outline of the changed run. Returns the bytes that the
fullest device needs, and the placement of this device. Returns None if the change would fill a
machine's host memory. Raises `DilocoxError` if the run file does not allow the change."""


def advice(
    config: RunConfig,
    outline: ModelOutline,
    place: GpuPlacement,
    gpus: int,
    rounds: Choice | None = None,
    check: Check | None = None,
) -> list[Change]:
    """Return changes with which the run fits at `place`, those that cost training least first.

    If no single change is enough, the changes that save most are combined, one after another,
    until the run fits or nothing more helps. Then the list has that one combination; its `fits`
    may be False.

    Args:
        config: The run.
        outline: Outline of the run's model.
        place: GPUs of the site that does not fit.
        gpus: Number of GPUs that every site has.
        rounds: Settings of the rounds, by which the search estimates the need. None: those of the
            run file.
        check: Plans a changed run. A change may change what the controller chooses for the
            rounds, so the result only has what `check` returns. None: the result has estimates.
    """
    search = _Search(config, outline, place, gpus, rounds, check)
    singles = search.tried({})
    if any(change.fits for change in singles):
        return [change for change in singles if change.fits][:MOST_ADVICE]
    together: Change | None = None
    while singles and (together is None or len(together.values) < MOST_TOGETHER):
        best = min(singles, key=lambda change: change.needed)
        if together is not None and best.needed >= together.needed:
            break
        together = best
        if together.fits:
            break
        singles = search.tried(together.values)
    if together is not None and not together.fits:
        together = search.checked(together)
    return [] if together is None else [together]


@dataclass(frozen=True)
class _Search:
    """The arguments of `advice`."""

    config: RunConfig
    outline: ModelOutline
    place: GpuPlacement
    gpus: int
    rounds: Choice | None
    check: Check | None

    def tried(self, before: Mapping[str, Any]) -> list[Change]:
        """Try single changes on top of `before`, until `MOST_ADVICE` of them fit."""
        basis = changed(self.config, before) if before else self.config
        found: list[Change] = []
        for change in _changes(basis, self.outline, self.place, self.gpus):
            values = {**before, **change}
            try:
                shape = self._shape(values)
                one: Change | None = self._estimated(values, shape)
                if one is not None and one.fits:
                    one = self.checked(one, shape)
            except DilocoxError:
                continue  # the run file does not allow this change
            if one is not None:
                found.append(one)
            if sum(each.fits for each in found) == MOST_ADVICE:
                break
        return found

    def checked(self, change: Change, shape: ModelOutline | None = None) -> Change | None:
        """Return `change` as it is planned. None if it would fill a machine's host memory.

        `shape`: outline of the changed run. None: it is built here.
        """
        if self.check is None:
            return change
        found = self.check(change.values, self._shape(change.values) if shape is None else shape)
        return None if found is None else _change(change.values, *found)

    def _estimated(self, values: Mapping[str, Any], shape: ModelOutline) -> Change:
        run, place = changed(self.config, values), self.place
        stages = footprints(run, shape, place, counted(run, shape), self.rounds)
        return _change(values, needed(stages, place, run), place)

    def _shape(self, values: Mapping[str, Any]) -> ModelOutline:
        """Return the outline of the run with changed keys."""
        if not any(name in RESHAPES for name in values):
            return self.outline
        return ModelOutline.of(changed(self.config, values))


def _change(values: Mapping[str, Any], bytes_: int, place: GpuPlacement) -> Change:
    """Return a change with which the devices of `place` are fullest, and need `bytes_` bytes."""
    return Change(values, bytes_, place.device.memory, place.device.name)


RESHAPES = ("site.stages", "site.schedule", "data.sequence_length")
"""Keys that change where the model is cut into stages."""


def _changes(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, gpus: int
) -> Iterator[dict[str, Any]]:
    """Yield single changes worth trying, those that cost training least first."""
    site = config.site
    for key, value in _smaller(config, place):
        yield {key: value}
    if not place.device.shared:
        # The number of GPUs stays the same, and each GPU holds less.
        for factor in (2, 4, 8):
            if site.replicas % factor == 0:
                fewer = {"site.replicas": site.replicas // factor}
                yield {**fewer, "site.shards": factor * site.shards}
        most = min(gpus // site.parts, int(outline.hf_config.num_hidden_layers))
        for share in (1.25, 1.5, 2, 3, 4, 8):
            if site.chunks == 1 and site.stages < math.ceil(share * site.stages) <= most:
                yield {"site.stages": math.ceil(share * site.stages)}
        for factor in (2, 4, 8):
            if factor * site.ranks <= gpus:
                yield {"site.shards": factor * site.shards}
    if config.inner.optimizer == "adamw":
        yield {"inner.optimizer": "muon"}
    if config.data.sequence_length > SHORT:
        yield {"data.sequence_length": config.data.sequence_length // 2}


def _smaller(config: RunConfig, place: GpuPlacement) -> Iterator[tuple[str, Any]]:
    """Yield those changes that keep the layout, the optimizer and the data as they are."""
    site = config.site
    if config.outer.device == "model" and not place.device.shared:
        yield "outer.device", "cpu"
        if config.outer.momentum_dtype == "fp32":
            yield "outer.momentum_dtype", "bf16"
    if site.schedule == "gpipe" and site.stages > 1:
        yield "site.schedule", "1f1b"
    if site.asks_for_whole_gradients:
        yield "site.gradient_sync", "micro-batch"
    smaller = site.micro_batch_size // 2
    while smaller >= 1:
        yield "site.micro_batch_size", smaller
        smaller //= 2
    if not config.model.activation_checkpointing:
        yield "model.activation_checkpointing", "selective"
    if config.model.activation_checkpointing is not True:
        yield "model.activation_checkpointing", True


SHORT = 512
"""Tokens: sequences of at most this length are not shortened further."""
