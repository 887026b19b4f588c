"""Splits a Hugging Face causal LM into pipeline chunks, and writes it back as a checkpoint.

The functions are used in this order:

1. `load_model_config` reads the configuration.
2. `probe_cut` checks with a tiny copy that this model type can be cut into chunks. `probe_weights`
   checks that the type can start with fresh weights, `probe_packing` that documents of one row do
   not see each other.
3. `plan_cut` decides where to cut.
4. `build_chunk` builds one chunk on the meta device.
5. `materialise` fills the chunk with weights from `open_weights`.
6. `write_stage_file` and `finish_model_folder` write the model back.

transformers is imported only when one of these functions is called.
"""

from dilocox.models.architecture import load_model_config
from dilocox.models.chunk import ModelChunk, bare_chunks, build_chunk
from dilocox.models.export import (
    Published,
    finish_model_folder,
    stage_file_name,
    write_stage_file,
    write_tensors,
)
from dilocox.models.materialise import materialise
from dilocox.models.meta_model import count_parameters, tied_pair
from dilocox.models.partition import ChunkSpec, plan_cut
from dilocox.models.partition_probe import (
    probe_attention,
    probe_cut,
    probe_packing,
    probe_weights,
)
from dilocox.models.weight_source import WeightSource, open_weights, read_rows

__all__ = [
    "ChunkSpec",
    "ModelChunk",
    "Published",
    "WeightSource",
    "bare_chunks",
    "build_chunk",
    "count_parameters",
    "finish_model_folder",
    "load_model_config",
    "materialise",
    "open_weights",
    "plan_cut",
    "probe_attention",
    "probe_cut",
    "probe_packing",
    "probe_weights",
    "read_rows",
    "stage_file_name",
    "tied_pair",
    "write_stage_file",
    "write_tensors",
]
