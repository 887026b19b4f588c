"""Inside one site: device mesh, pipeline schedule, FSDP and the inner optimizer."""

from __future__ import annotations

from dilocox.site.attention import set_sdpa_backends
from dilocox.site.determinism import determinism_facts
from dilocox.site.determinism_mode import set_determinism, settle_determinism
from dilocox.site.head_loss import head_loss_bytes
from dilocox.site.loss import loss_bytes, mean_cross_entropy
from dilocox.site.machine import (
    available_cores,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
    set_threads,
    use_expandable_segments,
)
from dilocox.site.mesh import SiteMesh, place_of_rank, rank_of_place, start_site_group
from dilocox.site.model import SiteModel
from dilocox.site.pipeline import chunks_of_stage, computes_head_with_loss, stage_of_chunk
from dilocox.site.rates import learning_rate
from dilocox.site.step import StepResult

__all__ = [
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
