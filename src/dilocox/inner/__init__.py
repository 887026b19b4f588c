"""Inside one site: device mesh, pipeline schedule, FSDP and the inner optimizer."""

from __future__ import annotations

from dilocox.inner.attention import set_sdpa_backends
from dilocox.inner.chunk_setup import ChunkSettings
from dilocox.inner.determinism import determinism_facts
from dilocox.inner.determinism_mode import set_determinism, settle_determinism
from dilocox.inner.device import (
    available_cores,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
    set_threads,
    use_expandable_segments,
)
from dilocox.inner.head_loss import head_loss_bytes
from dilocox.inner.loss import loss_bytes, mean_cross_entropy
from dilocox.inner.lr_schedule import learning_rate
from dilocox.inner.mesh import SiteMesh, place_of_rank, rank_of_place, start_site_group
from dilocox.inner.pipeline import chunks_of_stage, computes_head_with_loss, stage_of_chunk
from dilocox.inner.site_model import SiteModel
from dilocox.inner.step_result import StepResult

__all__ = [
    "ChunkSettings",
    "SiteMesh",
    "SiteModel",
    "StepResult",
    "available_cores",
    "chunks_of_stage",
    "computes_head_with_loss",
    "determinism_facts",
    "head_loss_bytes",
    "keep_freed_memory",
    "learning_rate",
    "loss_bytes",
    "mean_cross_entropy",
    "place_of_rank",
    "rank_of_place",
    "resolve_device",
    "resolve_precision",
    "set_determinism",
    "set_sdpa_backends",
    "set_threads",
    "settle_determinism",
    "stage_of_chunk",
    "start_site_group",
    "use_expandable_segments",
]
