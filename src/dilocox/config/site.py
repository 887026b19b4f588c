"""Sections of the run file about sites: `[site]`, `[inner]` and `[sites.NAME]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dilocox.config.base import Fraction, Positive, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
SITE_NAME = r"^[a-z0-9][a-z0-9-]{0,30}$"
SiteName = Annotated[str, Field(pattern=SITE_NAME)]


GradientSync = Literal["auto", "step", "micro-batch"]
MOST_RANKS = 65_535
"""Largest number of ranks of a site's first replica. Exchange keys and the record number stages and
shards in 16 bits."""
ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")
"""Schedules that compute gradients of inputs and gradients of weights in separate passes."""


class SiteSection(Section):
    """`[site]`: layout and batch of a site. The layout is the same at all sites."""

    stages: Positive = 1
    shards: Positive = 1
    replicas: Positive = 1
    """Copies of the stages x shards ranks at every site (hybrid sharding). Each replica trains on
    its own part of the batch. Shards gather parameters only from the same replica. Replicas
    exchange gradients once per step. Give one replica to each group of GPUs with fast links."""
    chunks: Positive = 1
    """Model slices per stage. The interleaved and zero-bubble schedules need more than one."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"] = (
        "1f1b"
    )
    batch_size: Positive = 16
    """Sequences per inner step of a site, over all its shards and replicas."""
    micro_batch_size: Positive = 4
    """Sequences per micro-batch of one shard."""
    gradient_sync: GradientSync = "auto"
    """How often the shards of a site of one stage gather parameters and reduce gradients. `step`:
    once per inner step; every rank then holds all parameters in the compute dtype and all gradients
    in fp32. `micro-batch`: for each micro-batch. `auto`: per step on GPUs that certainly have
    enough memory for it, else per micro-batch. Pipelines always do it once per step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads per rank. With 0, the ranks that start on a machine share its cores."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute data type. `auto`: bf16 on hardware that multiplies bf16 natively, else fp32.
    Parameters and optimizer states are always fp32."""
    deterministic: bool = True
    code: Annotated[str, Field(min_length=1)] | None = None
    """Python file on this machine with the user's own functions: `loss`, `dataset`, `optimizer` and
    others. Its SHA-256 is `run.code`, on which all sites agree; its place may differ. No file is
    sent to another machine (docs/your-model.md)."""

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
                'gradient_sync "micro-batch" needs sites of one stage, since pipelines reduce '
                'gradients once per step: set stages = 1, or gradient_sync = "step"'
            )
        problem = self.batch_problem(self.batch_size)
        if problem is not None:
            raise ValueError(f"batch_size {self.batch_size} {problem}")
        return self

    @property
    def batch_unit(self) -> int:
        """Smallest unit of a batch, in sequences. Every valid batch size is a multiple of it.

        It is one micro-batch per shard and replica. Interleaved schedules need as many
        micro-batches as stages.
        """
        stages = self.stages if self.schedule.startswith("interleaved") else 1
        return self.parts * self.micro_batch_size * stages

    def batch_problem(self, batch_size: int) -> str | None:
        """Returns why `batch_size` sequences per step cannot run in this layout, or None."""
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
        """Whether the run file explicitly asks for whole gradients on each rank of a sharded stage.

        True with `gradient_sync = "step"`, one stage, and several shards or replicas.
        """
        return self.gradient_sync == "step" and self.stages == 1 < self.parts

    @property
    def parts(self) -> int:
        """Number of parts of a batch: one for each shard of each replica."""
        return self.replicas * self.shards

    @property
    def product(self) -> str:
        """The factors of `ranks`, as text for messages."""
        return "stages x shards" if self.replicas == 1 else "replicas x stages x shards"

    @property
    def exchanging_ranks(self) -> int:
        """Number of ranks of a site that exchange with other sites: those of the first replica."""
        return self.stages * self.shards

    @property
    def ranks(self) -> int:
        """Number of ranks (processes) of one site, over all replicas."""
        return self.replicas * self.exchanging_ranks

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the compute dtype. `auto` counts as bf16, which takes the least."""
        return 4 if self.precision == "fp32" else 2

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per inner step of one shard of one replica."""
        return self.batch_size // (self.parts * self.micro_batch_size)


def _batches(count: int) -> str:
    return f"{count} micro-batch" + ("" if count == 1 else "es")


class InnerSection(Section):
    """`[inner]`: the optimizer of the inner steps."""

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    muon_learning_rate: Annotated[float, Field(gt=0.0)] | None = None
    """With `muon`: peak learning rate of the matrices. If not set, it is `learning_rate`. In small
    models, embedding and head gain from a higher learning rate than the matrices."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    momentum: Beta = 0.95
    """With `muon`: Nesterov momentum of the matrices, per step."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm of the whole model, over all stages and shards. 0: no clipping."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """With `wsd`: inner steps of the final decay. 0: a fifth of the run."""
    final_fraction: Fraction = 0.1
    """With `cosine` and `wsd`: learning rate at the end, as a fraction of the peak."""


class SiteOverride(Section):
    """`[sites.NAME]`: settings of one site. The table may be empty."""

    batch_size: Positive | None = None
    """Sequences per inner step at this site. The weight of its contribution follows from it. If not
    set, it is `site.batch_size`."""
    speed: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """Declared speed of this site, in any unit that all sites use, such as tokens/s. If some sites
    declare a speed, the others count as 1. If no site declares one, speeds are measured. Used with
    `control.steps = "by-speed"`."""
    data: str | None = None
    """Folder with this site's own token files, for private text. The site then trains on these
    files alone, and its token ranges count in these files."""
    own_code: bool = False
    """Whether this site may replace the loss or the data by code of its own. `dilocox.train` sets
    the key by itself. An audit cannot repeat the rounds of such a site. If the key is false and the
    site replaces code, an audit of the site is a FAIL."""
    interface: str | None = None
    """Network interface that the exchange binds to."""
    advertise: str | None = None
    """Address at which other sites reach this site. Set it if the address differs from the
    interface's own, as behind NAT."""
    ports: str | None = None
    """Range of ports FIRST-LAST for incoming connections of the exchange, one port per rank of the
    site's first replica."""

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
        """First and last port of `ports`; (0, 0) if `ports` is not a range; None if not set."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)
