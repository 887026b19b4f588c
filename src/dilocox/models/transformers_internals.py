"""Undocumented names of transformers that dilocox uses, and a check that they exist.

Releases from 5.17 on have these names, but a later release may remove one. `check` reports a
missing name before a model is built.
"""

from __future__ import annotations

from importlib import metadata

from dilocox.errors import ModelError
from dilocox.utils.torch_internals import missing_name

_LOADING = "transformers.core_model_loading"
_AUTO = "transformers.models.auto.modeling_auto"
NAMES = (
    ("transformers.conversion_mapping", "", ("get_model_conversion_mapping",), "model.path"),
    (_LOADING, "", ("WeightConverter",), "model.path"),
    (_LOADING, "", ("WeightRenaming",), "model.path"),
    (_LOADING, "", ("dot_natural_key",), "model.path"),
    (_LOADING, "", ("rename_source_key",), "model.path"),
    (_LOADING, "", ("revert_weight_conversion",), "publishing a model"),
    (_AUTO, "", ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",), "[model]"),
    ("transformers", "PreTrainedModel", ("_init_weights",), "fresh initialisation"),
    ("transformers", "PretrainedConfig", ("base_model_pp_plan",), "stages > 1"),
)
"""Entries (module, class, names, feature); see `torch_internals.NAMES`."""


def check() -> None:
    """Raise `ModelError`, with the first missing name, if transformers lacks one of `NAMES`."""
    missing = missing_name(NAMES)
    if missing is not None:
        name, purpose = missing
        raise ModelError(
            f"transformers {metadata.version('transformers')} has no {name}, which dilocox needs "
            f"for {purpose}; install a tested version (constraints.txt names one)"
        )
