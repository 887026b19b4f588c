"""Sections of the run file about a site: what it is like inside, its optimizer, what is its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dilocox.config.base import Fraction, Positive, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
SITE_NAME = r"^[a-z0-9][a-z0-9-]{0,30}$"
SiteName = Annotated[str, Field(pattern=SITE_NAME)]


GradientSync = Literal["auto", "step", "micro-batch"]
MOST_RANKS = 65_535
"""Of a site: stages and shards are numbered in 16 bits, in keys of exchanges and in records."""
ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")
"""Schedules that split the backward pass into its input and its weight half."""


class SiteSection(Section):
    """`[site]`: what every site looks like inside. The layout is the same at all sites."""

    stages: Positive = 1
    shards: Positive = 1
    replicas: Positive = 1
    """Copies of the stages x shards ranks at every site, each of which trains on its own part of
    the batch (hybrid sharding). Shards gather parameters inside a replica alone. Replicas exchange
    gradients once per step. Give one replica to each group of GPUs with fast links."""
    chunks: Positive = 1
    """Model slices per stage; more than one for the interleaved and zero-bubble schedules."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"] = (
        "1f1b"
    )
    batch_size: Positive = 16
    """Sequences per inner step and site, over all of its shards and replicas."""
    micro_batch_size: Positive = 4
    """Sequences per micro-batch and shard."""
    gradient_sync: GradientSync = "auto"
    """How often the shards of a site of one stage gather parameters and reduce gradients: once per
    `step`, for which every rank holds the whole model's in the compute dtype and its gradients in
    fp32, or for each `micro-batch`. `auto`: per step on GPUs whose memory that is surely enough
    for, per micro-batch elsewhere. Pipelines do it once per step in every case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads per rank; 0 shares the machine's cores among the ranks that start on it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto`: bf16 where the hardware multiplies it natively, else fp32. Parameters
    and optimizer states are fp32 in every case."""
    deterministic: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> SiteSection:
        if self.stages * self.shards > MOST_RANKS:
            raise ValueError(f"stages x shards is above {MOST_RANKS}: lower one of them")
        looped = self.schedule in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")
        if looped and self.stages < 2:
            raise ValueError(f'schedule "{self.schedule}" needs stages of 2 or more')
        if looped and self.chunks < 2:
            raise ValueError(f'schedule "{self.schedule}" needs chunks of 2 or more')
        if not looped and self.chunks != 1:
            raise ValueError(f'schedule "{self.schedule}" has one chunk per stage: set chunks = 1')
        if self.schedule == "zbv" and self.chunks != 2:
            raise ValueError('schedule "zbv" has exactly two chunks per stage: set chunks = 2')
        if self.gradient_sync == "micro-batch" and self.stages > 1:
            raise ValueError(
                'gradient_sync "micro-batch" is for sites of one stage, pipelines reduce gradients '
                'once per step: set stages = 1, or gradient_sync = "step"'
            )
        problem = self.batch_problem(self.batch_size)
        if problem is not None:
            raise ValueError(f"batch_size {self.batch_size} {problem}")
        return self

    @property
    def batch_unit(self) -> int:
        """Sequences that a batch is a multiple of: a micro-batch on every shard of every replica,
        on as many stages as the schedule needs at a time."""
        stages = self.stages if self.schedule.startswith("interleaved") else 1
        return self.parts * self.micro_batch_size * stages

    def batch_problem(self, batch_size: int) -> str | None:
        """Why `batch_size` sequences per step cannot run in this layout, or none."""
        group = self.parts * self.micro_batch_size
        if batch_size % group:
            parts = "shards" if self.replicas == 1 else "replicas x shards"
            return (
                f"is not divisible into micro-batches: make it a multiple of {parts} x "
                f"micro_batch_size = {group}"
            )
        count = batch_size // group
        if self.schedule.startswith("interleaved") and count % self.stages:
            return (
                f'gives {_batches(count)}, schedule "{self.schedule}" needs a multiple of '
                f"stages = {self.stages}: make it a multiple of {group * self.stages}"
            )
        if self.stages > 1 and count < self.stages and self.schedule != "gpipe":
            return (
                f'gives {_batches(count)}, schedule "{self.schedule}" needs at least as many '
                f"as stages: raise it to {group * self.stages}, or lower micro_batch_size"
            )
        return None

    @property
    def asks_for_whole_gradients(self) -> bool:
        """Whether `gradient_sync` itself asks each rank of one stage to hold whole gradients."""
        return self.gradient_sync == "step" and self.stages == 1 < self.parts

    @property
    def parts(self) -> int:
        """Parts of a batch: one for every shard of every replica."""
        return self.replicas * self.shards

    @property
    def product(self) -> str:
        """What `ranks` is the product of, in words."""
        return "stages x shards" if self.replicas == 1 else "replicas x stages x shards"

    @property
    def exchanging_ranks(self) -> int:
        """Ranks of one site that other sites know: those of its first replica."""
        return self.stages * self.shards

    @property
    def ranks(self) -> int:
        """Ranks (processes) of one site, in all of its replicas."""
        return self.replicas * self.exchanging_ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches per inner step, of every shard of every replica."""
        return self.batch_size // (self.parts * self.micro_batch_size)


def _batches(count: int) -> str:
    return f"{count} micro-batch" + ("" if count == 1 else "es")


class InnerSection(Section):
    """`[inner]`: the optimizer of the local steps."""

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    muon_learning_rate: Annotated[float, Field(gt=0.0)] | None = None
    """`muon`: peak for the matrices, if not that of all else. Embedding and head of small models
    gain from more than the matrices."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    momentum: Beta = 0.95
    """`muon`: Nesterov momentum of the matrices, per step."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm, over stages and shards; 0 switches clipping off."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """`wsd`: steps of the final decay; 0 means a fifth of the run."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of `cosine` and `wsd`, as a fraction of the peak."""


class SiteOverride(Section):
    """`[sites.NAME]`: what one site has of its own. An empty table is a site like all others."""

    batch_size: Positive | None = None
    """Sequences per inner step at this site; weighs its contribution."""
    speed: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """How fast this site is, in any unit that all sites use, such as tokens/s; sites that do not
    say it count as 1. Not set at any site: measured. Used with `control.steps = "by-speed"`."""
    data: str | None = None
    """Folder of this site's own token files (private text): its own space of token ranges."""
    own_code: bool = False
    """This site may replace loss or data by code of its own (`dilocox.train`, which writes this
    itself). An audit cannot repeat its rounds. Without this, an audit of such a site is a FAIL."""
    interface: str | None = None
    """Network interface that the exchange binds to."""
    advertise: str | None = None
    """Address under which the other sites reach this one, if not the interface's own (NAT)."""
    ports: str | None = None
    """Port range FIRST-LAST for incoming exchange connections, one port per rank."""

    @model_validator(mode="after")
    def _consistent(self) -> SiteOverride:
        first, last = self.port_range or (1, 1)
        if not 1 <= first <= last <= 65535:
            raise ValueError(
                f'ports "{self.ports}" is not a range: write FIRST-LAST, for example "29500-29507"'
            )
        return self

    @property
    def port_range(self) -> tuple[int, int] | None:
        """First and last port of `ports`; (0, 0) if it is not written as a range."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)
