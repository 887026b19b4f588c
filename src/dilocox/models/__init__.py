"""A Hugging Face causal LM into pipeline chunks, and back into a Hugging Face checkpoint.

The road: `load_model_config` reads the configuration, `probe_cut` shows on a tiny copy that the
type can be cut and `probe_weights` that it can begin with fresh weights, `plan_cut` says where,
`build_chunk` builds one chunk on the meta device, and `materialise` fills it from `open_weights`.
`write_stage_file` and `finish_model_folder` lead back.
transformers is imported only when one of them is called.
"""

from dilocox.models.architecture import load_model_config
from dilocox.models.chunk import ModelChunk, build_chunk
from dilocox.models.export import (
    Published,
    finish_model_folder,
    stage_file_name,
    write_stage_file,
)
from dilocox.models.materialise import materialise
from dilocox.models.meta_model import count_parameters, tied_pair
from dilocox.models.partition import ChunkSpec, plan_cut
from dilocox.models.partition_probe import probe_attention, probe_cut, probe_weights
from dilocox.models.weight_source import WeightSource, open_weights, read_rows

__all__ = [
    "ChunkSpec",
    "ModelChunk",
    "Published",
    "WeightSource",
    "build_chunk",
    "count_parameters",
    "finish_model_folder",
    "load_model_config",
    "materialise",
    "open_weights",
    "plan_cut",
    "probe_attention",
    "probe_cut",
    "probe_weights",
    "read_rows",
    "stage_file_name",
    "tied_pair",
    "write_stage_file",
]
